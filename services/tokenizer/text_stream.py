"""What the service asks of the text side of a request, whatever its protocol."""

from typing import NamedTuple, Protocol

from deepmesh.wire.messages import FinishReason

TopLogprobs = list[tuple[int, float]]


class Token(NamedTuple):
    """One output token."""

    id: int
    logprob: float | None = None
    top: TopLogprobs = []  # noqa: RUF012  never written to


class TextStream(Protocol):
    """Turns tokens into indexed events (streams) or one body (plain answers).

    The same tokens give the same events, byte for byte, in whatever pieces they arrive: a
    restarted stream goes on where the old one ended.
    """

    stopped: bool  # a stop string has been found; no further token may come
    fingerprint: str  # of the engine; told before `start`

    def start(self, cached_tokens: int) -> list[bytes]:
        """Events before the first token; once, first of all."""
        ...

    def push(self, token: Token) -> list[bytes]:
        """Events that this token causes."""
        ...

    def finish(self, reason: FinishReason) -> list[bytes]:
        """The last events; once, last of all."""
        ...

    def body(self) -> bytes:
        """The plain answer, after `finish`."""
        ...
