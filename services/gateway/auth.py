"""API keys: `Authorization: Bearer KEY` or `x-api-key: KEY`, known by their SHA-256 digests."""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepmesh.config import ConfigError
from deepmesh.wire.messages import ErrorCode
from services.gateway.errors import ProblemError, problem


def read_digests(path: str) -> list[str]:
    """Digests of API keys, one a line; what follows a # is for people.

    Raises:
        ConfigError: the file cannot be read, or a line is no digest; a key itself is not shown.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.api_keys_file: {path}: {error}") from error
    digests = {number: line.partition("#")[0].strip() for number, line in enumerate(lines, 1)}
    for number, digest in digests.items():
        if digest and not re.fullmatch(r"[0-9a-f]{64}", digest):
            words = "not the SHA-256 hex digest of a key, as `deepmesh keys` prints it"
            raise ConfigError(f"gateway.api_keys_file: {path}, line {number}: {words}")
    return [digest for digest in digests.values() if digest]


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
