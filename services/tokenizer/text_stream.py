"""What the service asks of the text side of a request, whatever its protocol."""

from typing import NamedTuple, Protocol

from deepmesh.wire.messages import FinishReason, PromptLogprobs

_LOWEST_LOGPROB = -9999.0  # JSON has no -inf, and SDK models want a number
TopLogprobs = list[tuple[int, float]]


class Token(NamedTuple):
    """One output token."""

    id: int
    logprob: float | None = None
    top: TopLogprobs = []  # noqa: RUF012  never written to


def clamp_logprob(logprob: float) -> float:
    """A number that JSON can carry."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB  # NaN compares false, too


class TextStream(Protocol):
    """Turns tokens into indexed events (streams) or one body (plain answers).

    The same tokens give the same events, byte for byte, in whatever pieces they arrive: a
    restarted stream goes on where the old one ended.
    """

    stopped: bool  # a stop string has been found; no further token may come
    fingerprint: str  # of the engine; told before `start`

    def take_prompt(self, found: PromptLogprobs) -> None:
        """Log-probabilities of the prompt, where they were asked for; before `start`."""
        ...

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
