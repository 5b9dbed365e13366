"""How many tokens a verify step sends to the target: chosen from confidences two steps old.

The device splits the capacity over rows by their current survival probabilities; the host only
sets its size, from data that no token of the step can depend on. So the choice never biases the
output, whatever it is.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 16  # of survival probability, 0..1; StepResult.confidence is uint32 [NUM_BINS]
CAUSAL_STEPS = 2  # a step's capacity comes from data this many steps old


def expected_tokens(histogram: NDArray[np.uint32], rows: int, capacity: int) -> float:
    """Tokens that `rows` rows gain when the likeliest `capacity - rows` drafts are verified.

    `histogram` counts the drafts of a step by their probability to survive, which includes the
    survival of those before them; so the likeliest drafts are always a prefix of each row.
    """
    left, gain = max(0, capacity - rows), float(rows)
    for at in range(NUM_BINS - 1, -1, -1):
        taken = min(left, int(histogram[at]))
        gain += taken * (at + 0.5) / NUM_BINS
        left -= taken
    return gain


class VerifyCapacity:
    """Chooses V among captured tiers for the best expected tokens per unit of time."""

    def __init__(self, *, draft_len: int, cost_by_tier: dict[int, float] | None = None) -> None:
        self._width = 1 + draft_len
        self._cost_by_tier = cost_by_tier or {}  # tokens -> time; profiled on the device
        self._confidences: deque[NDArray[np.uint32]] = deque(maxlen=CAUSAL_STEPS)

    def observe(self, confidence: bytes) -> None:
        """Confidence data of a step, in step order; a step without any counts as a gap."""
        if len(confidence) == 4 * NUM_BINS:
            self._confidences.append(np.frombuffer(confidence, "<u4"))
        else:
            self._confidences.clear()

    def choose(self, rows: int) -> int:
        """V of the next step. Without a cost table, or data, every draft is verified."""
        full = rows * self._width
        tiers = [tier for tier in sorted(self._cost_by_tier) if rows <= tier < full]
        if not tiers or len(self._confidences) < CAUSAL_STEPS:
            return full
        histogram = self._confidences[0]
        covering = [tier for tier in sorted(self._cost_by_tier) if tier >= full]
        best, best_rate = full, 0.0
        for tier in [*tiers, *covering[:1]]:
            rate = expected_tokens(histogram, rows, tier) / self._cost_by_tier[tier]
            if rate > best_rate:
                best, best_rate = min(tier, full), rate
        return best
