"""API keys: `Authorization: Bearer KEY` or `x-api-key: KEY`, known by their SHA-256 digests."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from deepmesh.wire.messages import ErrorCode
from services.gateway.errors import ProblemError, problem


class Keys:
    """The keys that may use the API; none at all means that no key is asked for."""

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = list(digests)

    def check(self, headers: Mapping[bytes, bytes]) -> str:
        """The digest of the caller's key, or "" when no key is asked for.

        Every known digest is compared, each in constant time, so the time taken tells nothing.

        Raises:
            ProblemError: 401, without a key or with an unknown one.
        """
        if not self._digests:
            return ""
        key = _key_of(headers)
        if not key:
            raise ProblemError(
                problem(
                    ErrorCode.UNAUTHORIZED,
                    "no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                )
            )
        digest = hashlib.sha256(key).hexdigest()
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        if not is_known:
            raise ProblemError(problem(ErrorCode.UNAUTHORIZED, "this API key is not known here"))
        return digest


def tenant_salt(digest: str) -> bytes:
    """Keeps the cached prefixes of one key's requests apart from those of all others.

    A shared cache would tell by its speed what others have asked. Not the digest itself: the salt
    reaches processes that need not know who asks. Without keys (digest "") all share.
    """
    if not digest:
        return b""
    return hashlib.blake2b(digest.encode(), digest_size=16, person=b"prefix cache").digest()


def _key_of(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key", b"").strip()
