"""Whether a step drafts, and how many drafts it verifies: chosen from confidences two steps old.

The device splits the capacity over rows by their current survival probabilities; the host only
sets its size, from data that no token of the step can depend on. So the choice never biases the
output, whatever it is.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .draft_counts import DraftCounts, StepDrafts
from .step_curve import SpeculationCosts, StepCurve

NUM_BINS = 16  # of survival probability, 0..1; StepResult.confidence is uint32 [NUM_BINS]
MIDDLES = (np.arange(NUM_BINS - 1, -1, -1) + 0.5) / NUM_BINS  # of the bins, the last one first
CAUSAL_STEPS = 2  # a step's capacity comes from data this many steps old
AVERAGED = 32  # rows, whose drafts are looked at together
MARGIN = 0.02  # drafts that promise less are not worth being wrong about
PROBE_SHARE = 0.01  # of the time, for draft passes that show whether drafts pay by now
# Steps without drafts that trials may cost, which verify some to see what it takes and brings: at
# first, in a probe; a trial costs so much at least, even if it seems to pay.
FIRST_TRIALS, TRIALS, LEAST_TRIAL = 3.0, 1.0, 0.15
LOOK = 24  # steps that verify fewer drafts than there are, to one that verifies them all
HOPE = 0.7  # of the tokens per time without drafts: what promises less is not tried
MIN_PROBE, MAX_PATIENCE = 16, 16  # steps without drafts between two probes; times as many
MEMORY, LEAST_MEMORY = 400.0, 0.95  # drafts expected to hold that are remembered; a step, at least
PRIOR = 32.0  # tokens that the expectation is believed for at first
HIT = (0.2, 1.25)
RELAX = 0.1  # of doubt that a probe takes away

SHARES = np.linspace(0, 1, 41)  # of a step's drafts, the likeliest ones

Gains = NDArray[np.float64]  # [SHARES], tokens that verifying these brings, for each draft of all


class Choice(NamedTuple):
    """What a step does about drafts."""

    capacity: int  # tokens that it sends to the main model, rows included
    drafts: bool  # whether it proposes some for the steps behind it


class VerifyCapacity:
    """Chooses for the best expected tokens per unit of time; one per engine epoch.

    What steps take is corrected by those that ran, what drafts bring by what they brought.
    """

    def __init__(
        self,
        *,
        draft_len: int,
        costs: SpeculationCosts | None = None,
        counts: DraftCounts | None = None,
        learned: Sequence[float] = (),
    ) -> None:
        """Without `costs` every step drafts, and verifies all. `learned`: of an earlier one."""
        self._draft_len = draft_len
        self._counts = counts or DraftCounts()
        self._curve = StepCurve(costs, learned[1:]) if costs is not None else None
        self._expected = PRIOR
        self._brought = PRIOR * (min(max(learned[0], HIT[0]), HIT[1]) if learned else 1.0)
        # what steps promised and of how many drafts, the newest last; and those before, averaged
        self._steps: deque[tuple[Gains, float]] = deque(maxlen=CAUSAL_STEPS)
        self._old: Gains | None = None
        self._trials = 0.0 if learned else FIRST_TRIALS  # that are left, in what they cost
        self._narrow = self._tried = 0
        self._idle, self._patience = 0, 1  # steps since drafts last paid; times as many to a probe

    @property
    def learned(self) -> list[float]:
        """For a later one of the same engine; empty: nothing."""
        return [self._hit, *self._curve.learned] if self._curve is not None else []

    @property
    def _hit(self) -> float:
        """Accepted drafts over expected ones."""
        return float(min(max(self._brought / self._expected, HIT[0]), HIT[1]))

    def observe(self, confidence: bytes) -> None:
        """Confidence data of a step of rank 0, which stands for all; empty: it drafted nothing."""
        has_data = len(confidence) == 4 * NUM_BINS
        found = np.frombuffer(confidence, "<u4") if has_data else np.zeros(NUM_BINS)
        if len(self._steps) == CAUSAL_STEPS:
            self._old = self._mixed(self._old, *self._steps[0])
        self._steps.append((gains(found), float(found.sum())))

    def saw(self, drafts: StepDrafts, took_ns: int) -> None:
        """A step that only decodes is complete on all ranks: learn from it."""
        curve = self._curve
        if curve is None or not drafts.rows:
            return
        verifies = drafts.verified > 0
        curve.saw(drafts.widest_tokens, took_ns - drafts.draft_ns, verifies=verifies)
        curve.saw_draft(drafts.draft_rows, drafts.draft_ns)
        known = self._known(in_flight=1)
        if verifies and known is not None:
            expected = self._gain(known, drafts.rows, drafts.verified)
            memory = max(LEAST_MEMORY, 1 - expected / MEMORY)
            self._expected = memory * self._expected + expected
            self._brought = memory * self._brought + drafts.accepted
        plain_ns = curve.step(drafts.widest_rows)
        self._counts.took_ns += took_ns
        self._counts.plain_ns += plain_ns * drafts.tokens / drafts.rows

    def choose(self, rows: int, in_flight: int = 0) -> Choice:
        """For a step with so many decode rows on its widest rank.

        Args:
            in_flight: steps before it that nothing has been heard of yet.
        """
        full, curve, known = rows * (1 + self._draft_len), self._curve, self._known(in_flight)
        if curve is None or not rows:
            return Choice(full, drafts=True)
        if known is None:  # what drafts promise is seen before any is verified
            return Choice(rows, drafts=True)
        begin = bisect_right(curve.tiers, rows)
        end = max(begin, bisect_left(curve.tiers, full))
        tokens = np.array([*curve.tiers[begin:end], full])
        took = np.append(curve.verifying(begin, end), curve.step(full, verifies=True))
        gain = self._gain(known, rows, tokens - rows)
        rates = (rows + self._hit * gain) / (took + curve.draft(rows))
        best = int(rates.argmax())
        plain = rows / curve.step(rows)
        if rates[best] > (1 + MARGIN) * plain:
            self._idle, self._patience = 0, 1
            return Choice(self._looked(tokens, rates, best), drafts=True)
        took_ns, plain_ns = float(took[best]) + curve.draft(rows), curve.step(rows)
        trial = max(LEAST_TRIAL, took_ns / plain_ns * (1 - float(rates[best]) / plain))
        if (is_hopeful := bool(rates[best] > HOPE * plain)) and self._trials > 0:
            self._trials -= trial
            self._tried += 1
            is_wide = self._tried % 2 == 0 and rates[-1] > HOPE * plain
            return Choice(int(tokens[-1 if is_wide else best]), drafts=True)
        cost = curve.draft(rows) / plain_ns + (max(TRIALS, trial) if is_hopeful else 0.0)
        return self._rest(rows, curve, cost, is_hopeful=is_hopeful)

    def _looked(self, tokens: NDArray[np.int64], rates: NDArray[np.float64], best: int) -> int:
        """The best number of tokens, or now and then the largest, whose cost is a guess until it
        is seen."""
        if best == len(tokens) - 1:
            self._narrow = 0
        elif rates[-1] > HOPE * rates[best]:
            self._narrow += 1
            if self._narrow >= LOOK:
                self._narrow, best = 0, -1
        return int(tokens[best])

    def _known(self, in_flight: int) -> Gains | None:
        """The newest data that is old enough, of AVERAGED rows at least; None: there is none."""
        young = max(0, CAUSAL_STEPS - 1 - in_flight)
        known = self._old
        for found, num in list(self._steps)[: len(self._steps) - young]:
            known = self._mixed(known, found, num)
        return known

    def _mixed(self, known: Gains | None, found: Gains, num: float) -> Gains | None:
        """One row's drafts tell little of the next ones': few rows are averaged with others. Gains
        are, not confidences: a row alone cannot give way to likelier drafts of another step."""
        if not num:
            return known
        weight = min(1.0, num / (self._draft_len * AVERAGED))
        return found if known is None else known + weight * (found - known)

    def _gain(
        self, known: Gains, rows: int, verified: NDArray[np.int64] | int
    ) -> NDArray[np.float64]:
        """Tokens that so many verified drafts of so many rows are expected to bring."""
        most = rows * self._draft_len
        return most * np.interp(np.asarray(verified) / most, SHARES, known)

    def _rest(self, rows: int, curve: StepCurve, cost: float, *, is_hopeful: bool) -> Choice:
        """Drafts do not pay: none, but for a draft pass at times that tells whether they do now,
        and, if there is hope, a few steps that verify. How often follows from what that costs.

        Args:
            cost: of a probe, in steps.
        """
        self._idle += 1
        if self._idle < max(MIN_PROBE, self._patience * cost / PROBE_SHARE):
            self._counts.skipped_steps += 1
            return Choice(rows, drafts=False)
        self._idle, self._patience = 0, min(2 * self._patience, MAX_PATIENCE)
        self._brought += RELAX * (self._expected - self._brought)
        curve.doubt()
        self._trials = TRIALS if is_hopeful else 0.0
        return Choice(rows, drafts=True)


def gains(histogram: NDArray[np.float64]) -> Gains:
    """What the likeliest drafts of a step bring.

    `histogram` counts its drafts by their probability to survive, which includes the survival of
    those before them; so the likeliest drafts are always a prefix of each row.
    """
    counts, total = histogram[::-1], max(1.0, float(histogram.sum()))
    upto = np.concatenate(([0.0], np.cumsum(counts)))
    gained = np.concatenate(([0.0], np.cumsum(counts * MIDDLES)))
    return np.interp(SHARES * total, upto, gained) / total
