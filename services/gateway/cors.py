"""Which pages of other origins may call the API from a browser (CORS)."""

from collections.abc import Mapping, Sequence

Headers = list[tuple[bytes, bytes]]

ANY = "*"
_METHODS = b"GET, POST, DELETE"
_KEPT_S = b"600"  # a browser asks again after so long
_EXPOSED = (  # what a page may read of an answer, besides what it may read of any
    b"x-request-id, request-id, x-trace-id, retry-after, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


class Origins:
    """The origins that may; none by default. Keys travel in headers, never in cookies."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """`allowed`: such as "https://chat.example"; "*" is any."""
        self._any = ANY in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def headers(self, asked: Mapping[bytes, bytes]) -> Headers:
        """Of an answer to a request with these headers; without them a browser keeps it back."""
        origin = asked.get(b"origin")
        if origin is None or not self._may(origin):
            return []
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", _EXPOSED),
            *self._vary(),
        ]

    def preflight(self, asked: Mapping[bytes, bytes]) -> Headers:
        """What OPTIONS answers besides: a browser asks before it sends the request itself."""
        if b"access-control-request-method" not in asked or not self.headers(asked):
            return []
        wanted = asked.get(b"access-control-request-headers", b"")
        return [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _KEPT_S),
            *([(b"access-control-allow-headers", wanted)] if wanted else []),
        ]

    def _may(self, origin: bytes) -> bool:
        return self._any or origin in self._allowed

    def _vary(self) -> Headers:
        return [] if self._any else [(b"vary", b"origin")]
