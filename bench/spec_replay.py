"""The draft policy replayed without a device: recorded acceptance, measured costs, made-up noise.

What a policy is worth then depends on nothing that the machine does meanwhile, so that a change of
it can be judged in a second. Steps are planned one ahead of results, as on a device; drafts,
confidences, their calibration and the split over rows are those of the executor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.spec_acceptance import Acceptance
from services.executor.calibration import Calibration
from services.executor.speculation import best_drafts
from services.scheduler.core.draft_counts import StepDrafts
from services.scheduler.core.speculation import NUM_BINS, Choice, VerifyCapacity
from services.scheduler.core.step_curve import SpeculationCosts

DEPTH = 2  # steps in flight
NOISE = 0.08  # standard deviation of the logarithm of a step's time
HELD_UP, LONGEST = 0.01, 3.0  # share of steps that others hold up, and how many times as long


@dataclass(frozen=True)
class Machine:
    """What steps take at one number of rows."""

    name: str
    rows: int
    costs: SpeculationCosts  # as measured at load
    steps_ms: tuple[tuple[int, float], ...]  # (drafts a row, of a step without its draft pass)
    draft_ms: float

    def step_ns(self, tokens: float) -> float:
        """Of a step of so many tokens, its rows included."""
        lengths, times = zip(*self.steps_ms, strict=True)
        return 1e6 * float(np.interp(tokens / self.rows - 1, lengths, times))

    def rate(self, length: int, tokens_a_row: float) -> float:
        """Tokens per second of a fixed length that brings so many."""
        draft_ms = self.draft_ms if length else 0.0
        return (
            1e3
            * self.rows
            * tokens_a_row
            / (self.step_ns(self.rows * (1 + length)) / 1e6 + draft_ms)
        )


class Replay:
    """One engine's policy over any number of steps."""

    def __init__(
        self, machine: Machine, acceptance: Acceptance, *, seed: int, draft_len: int = 5
    ) -> None:
        self.policy = VerifyCapacity(draft_len=draft_len, costs=machine.costs)
        self._machine, self._acceptance, self._len = machine, acceptance, draft_len
        self._draw = np.random.default_rng(seed)
        self._calibration = Calibration(draft_len)
        self._drafts: tuple[NDArray[np.bool_], NDArray[np.float32]] | None = None
        self._waiting: list[tuple[StepDrafts, bytes, int]] = []
        self.choices: list[Choice] = []
        self.tokens, self.took_ns = 0, 0.0

    @property
    def gain(self) -> float:
        """Tokens per time so far, in those without drafts and with the same noise on average."""
        noise = np.exp(NOISE**2 / 2) * (1 + HELD_UP * (LONGEST - 1))
        plain = self._machine.rows / self._machine.step_ns(self._machine.rows)
        return float(self.tokens / self.took_ns * noise / plain)

    def run(self, steps: int) -> None:
        """So many steps of decode rows."""
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        machine, rows = self._machine, self._machine.rows
        choice = self.policy.choose(rows, len(self._waiting))
        self.choices.append(choice)
        verified, accepted = self._verify(choice)
        took_ns = machine.step_ns(rows + verified) * self._noise()
        draft_ns, data = 0.0, b""
        self._drafts = None
        if choice.drafts:
            draft_ns, data = machine.draft_ms * 1e6 * self._noise(), self._propose()
        self.tokens += rows + accepted
        self.took_ns += took_ns + draft_ns
        seen = StepDrafts(
            rows=rows,
            widest_rows=rows,
            widest_tokens=rows + verified,
            verified=verified,
            accepted=accepted,
            tokens=rows + accepted,
            draft_ns=int(draft_ns),
            draft_rows=rows if choice.drafts else 0,
        )
        self._waiting.append((seen, data, int(took_ns + draft_ns)))
        if len(self._waiting) == DEPTH:
            drafts, told, all_ns = self._waiting.pop(0)
            self.policy.observe(told)
            self.policy.saw(drafts, all_ns)

    def _verify(self, choice: Choice) -> tuple[int, int]:
        """Drafts verified and accepted."""
        rows, spare = self._machine.rows, choice.capacity - self._machine.rows
        if self._drafts is None or spare <= 0:
            return 0, 0
        right, confidence = self._drafts
        survival = self._calibration.apply(confidence).cumprod(1)
        most = np.full(rows, self._len)
        widths = best_drafts(survival, most, spare, np.arange(rows, dtype=np.uint64))
        holds = right.cumprod(1).astype(bool) & (np.arange(self._len) < widths[:, None])
        accepted = holds.sum(1)
        seen = widths > 0
        self._calibration.learn(confidence[seen], widths[seen], accepted[seen])
        return int(widths.sum()), int(accepted.sum())

    def _propose(self) -> bytes:
        """The histogram of StepResult.confidence."""
        right, confidence = list[NDArray[np.bool_]](), list[NDArray[np.float32]]()
        for place in self._acceptance.places[: self._len]:
            weights = np.array(place.drafts, np.float64)
            chosen = self._draw.choice(len(weights), self._machine.rows, p=weights / weights.sum())
            right.append(self._draw.random(self._machine.rows) < np.array(place.right)[chosen])
            confidence.append(np.array(place.confidence, np.float32)[chosen])
        self._drafts = np.stack(right, 1), np.stack(confidence, 1)
        survival = self._calibration.apply(self._drafts[1]).cumprod(1)
        bins = np.minimum((survival * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        return np.bincount(bins.ravel(), minlength=NUM_BINS).astype("<u4").tobytes()

    def _noise(self) -> float:
        held_up = LONGEST if self._draw.random() < HELD_UP else 1.0
        return held_up * float(np.exp(NOISE * self._draw.standard_normal()))


def ratios(machine: Machine, acceptance: Acceptance) -> list[float]:
    """Of fixed lengths from 0 on to none, without noise."""
    plain = machine.rate(0, 1.0)
    found = [
        machine.rate(length, acceptance.tokens(length)) / plain
        for length in range(1, len(acceptance.places) + 1)
    ]
    return [1.0, *found]


def costs_of(
    measured: Sequence[tuple[int, float]], draft_ms: tuple[float, float], most: int
) -> SpeculationCosts:
    """From milliseconds at some tokens: lines between them and on behind the last one."""
    at, ms = (np.array(column, np.float64) for column in zip(*measured, strict=True))
    slope = (ms[-1] - ms[-2]) / (at[-1] - at[-2])
    tokens = [*range(1, 16), *(int(16 * 1.15**n) for n in range(64))]
    tiers = tuple(
        (count, 1e6 * float(np.interp(count, at, ms) + slope * max(0.0, count - at[-1])))
        for count in [*(count for count in tokens if count < most), most]
    )
    return SpeculationCosts(tiers, draft_ms[0] * 1e6, draft_ms[1] * 1e6)


# What two models took on one core (milliseconds of CPU): steps by drafts a row, at batches.
TINY = (
    ((1, 1.08), (2, 1.18), (4, 1.75), (8, 3.31), (16, 5.0), (32, 8.0), (64, 13.2), (108, 21.6)),
    (0.605, 0.155),
    {
        1: (((0, 2.74), (1, 3.10), (2, 3.04), (3, 3.25), (5, 3.59)), 0.96),
        4: (((0, 3.26), (1, 4.80), (2, 4.95), (3, 5.15), (5, 7.60)), 1.7),
        16: (((0, 6.9), (1, 11.9), (2, 14.5), (3, 15.6), (5, 19.2)), 4.15),
        64: (((0, 13.4), (1, 23.5), (2, 29.6), (3, 33.2), (5, 41.0)), 12.0),
        256: (((0, 40.0), (1, 68.6), (2, 98.7), (3, 109.0), (5, 178.0)), 46.0),
    },
)
MEDIUM = (
    (
        (1, 15.5),
        (2, 21.8),
        (4, 33.5),
        (8, 58.5),
        (16, 89.7),
        (32, 133.0),
        (64, 195.0),
        (108, 319.0),
    ),
    (6.59, 0.743),
    {
        1: (((0, 17.0), (1, 26.0), (2, 30.0), (3, 33.5), (5, 40.0)), 8.0),
        4: (((0, 36.0), (1, 56.0), (2, 70.0), (3, 83.0), (5, 105.0)), 10.5),
        16: (((0, 93.0), (1, 135.0), (2, 165.0), (3, 190.0), (5, 235.0)), 19.0),
        64: (((0, 200.0), (1, 320.0), (2, 430.0), (3, 540.0), (5, 760.0)), 55.0),
    },
)


def machines() -> list[Machine]:
    """All of them."""
    return [
        Machine(f"{name} {rows}", rows, costs_of(measured, draft, 6 * rows), steps, draft_ms)
        for name, (measured, draft, batches) in (("tiny", TINY), ("medium", MEDIUM))
        for rows, (steps, draft_ms) in batches.items()
    ]
