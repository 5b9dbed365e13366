"""The part of a run that `bench spec` counts: steps in which all its requests decode."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol

from bench.determinism.outputs import Output

LEAST_STEPS = 6  # that say anything about a policy


class EmptyWindow(RuntimeError):
    """A run in which nothing could be measured, and what to do about it."""


class Decoding(Protocol):
    """A `Rig`, as far as a window looks at it."""

    @property
    def outputs(self) -> Mapping[int, Output]:
        """Of this run, by request."""
        ...

    @property
    def num_answered(self) -> int:
        """The latest step whose results are here."""
        ...

    @property
    def drafts(self) -> tuple[list[int], list[int]]:
        """Verified and accepted ones so far, by place."""
        ...

    def abort(self) -> None:
        """End the run."""


class Counts(NamedTuple):
    """Of a run up to a moment, or between two of them."""

    seconds: float
    steps: int
    tokens: int
    verified: list[int]  # drafts, by place
    accepted: list[int]

    def since(self, before: "Counts") -> "Counts":
        """What came in between."""
        return Counts(
            seconds=self.seconds - before.seconds,
            steps=self.steps - before.steps,
            tokens=self.tokens - before.tokens,
            verified=_minus(self.verified, before.verified),
            accepted=_minus(self.accepted, before.accepted),
        )


def _minus(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip_longest(after, before, fillvalue=0)]


class Window:
    """Opens when every request has a token, and ends the run when it has seen enough of it.

    That is after so many steps, or before the first output is so long that its drafts are cut.
    """

    def __init__(self, clock: Callable[[], float], *, longest: int, most_steps: int) -> None:
        """`longest`: output tokens of a request, up to which all its drafts are verified."""
        self._clock = clock
        self._longest, self._most_steps = longest, most_steps
        self._begin: Counts | None = None
        self._end: Counts | None = None
        self._without = 0  # requests that had no token when another one was near its end

    def look(self, rig: Decoding) -> None:
        """After results; see `Rig.run`."""
        if self._end is not None or self._without:
            return
        lengths = [output.num_tokens for output in rig.outputs.values()]
        now = Counts(self._clock(), rig.num_answered, sum(lengths), *rig.drafts)
        is_late = max(lengths) > self._longest
        if self._begin is None and all(lengths):
            self._begin = now
        if self._begin is None:
            self._without = lengths.count(0) if is_late else 0
        elif is_late or now.steps - self._begin.steps >= self._most_steps:
            self._end = now
        if self._end is not None or self._without:
            rig.abort()

    def found(self) -> Counts:
        """What was counted.

        Raises:
            EmptyWindow: too little.
        """
        if self._without:
            raise EmptyWindow(
                f"{self._without} requests had no token yet when another one was near its end: "
                "give more --tokens, or a smaller --batch"
            )
        if self._begin is None or self._end is None:
            raise EmptyWindow("the run ended before it was measured: give more --tokens")
        found = self._end.since(self._begin)
        if found.steps < LEAST_STEPS:
            raise EmptyWindow(
                f"{found.steps} steps in which all requests decode, and {LEAST_STEPS} are the "
                "least that is measured: give more --tokens"
            )
        return found
