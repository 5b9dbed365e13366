"""What decode steps take, by tokens: as measured at load, and corrected by what steps took."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, log2

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import StepCosts

NODES = 16  # corrections at 1, 2, 4, … tokens, lines between them
MEMORY = 0.98  # of steps, in the line through them, a step
RATE_PRIOR, HOST_PRIOR = 2.0, 0.02  # steps that what was measured, and no constant, stand for
MOST_RATE = 8.0
WIDE, OWN, DRAFT = 0.05, 0.05, 0.1  # weight of the latest step in the factors, at least
FIRST = 3.0  # steps that what was measured stands for in a factor: the first ones weigh most
DOUBT = 0.25
LEAK = 0.01  # of a factor near some tokens, a step: what is no more seen is forgotten
MOST = 0.5  # of a logarithm, that one step can be off: what is slower was held up


@dataclass(frozen=True)
class SpeculationCosts:
    """What steps take, ns: by tokens of the main model, and by rows of a draft pass."""

    tiers: tuple[tuple[int, float], ...]  # (tokens, ns), ascending; only these may be submitted
    draft_base: float
    draft_row: float

    @staticmethod
    def of(ranks: Sequence[StepCosts]) -> "SpeculationCosts | None":
        """Tiers that every rank has, each with the time of the slowest; None: not known."""
        by_rank = [dict(costs.verify) for costs in ranks]
        shared = sorted(set(by_rank[0]).intersection(*by_rank)) if by_rank else []
        if not shared:
            return None
        slowest = tuple((tokens, float(max(at[tokens] for at in by_rank))) for tokens in shared)
        draft_base = max(costs.draft_base_ns for costs in ranks)
        draft_row = max(costs.draft_row_ns for costs in ranks)
        return SpeculationCosts(slowest, draft_base, draft_row)

    def step(self, tokens: int) -> float:
        """Of any number of tokens: along the lines between tiers, and the last one beyond them."""
        if len(self.tiers) == 1:
            return self.tiers[0][1]
        at = min(max(1, bisect_left(self.tiers, (tokens, 0.0))), len(self.tiers) - 1)
        (few, less), (many, more) = self.tiers[at - 1], self.tiers[at]
        return less + (more - less) * (tokens - few) / (many - few)

    def draft(self, rows: int) -> float:
        """Of a draft pass."""
        return self.draft_base + self.draft_row * rows


class StepCurve:
    """The costs of steps, refined while they run.

    A step takes `rate` times what was measured at load (contexts have grown, the machine is busy)
    and a constant beside it (the host's own work); then come factors for steps that verify drafts,
    for steps near some number of tokens, and for draft passes. All follow slowly, so that no single
    step moves a choice.
    """

    def __init__(self, costs: SpeculationCosts, learned: Sequence[float] = ()) -> None:
        """`learned`: of an earlier one of the same engine, see there."""
        self.costs = costs
        self._unit = max(1.0, costs.tiers[0][1])  # of time, ns
        self._rate, self._host = 1.0, 0.0  # the latter in units
        self._wide, self._drafts = 0.0, 0.0  # logarithms, like those that follow
        self._own = [0.0] * NODES
        # steps that each factor has been learned from
        self._num_wide, self._num_drafts, self._num_own = 0.0, 0.0, [0.0] * NODES
        if len(learned) == 4 + NODES:
            self._rate, self._host, self._wide, self._drafts, *self._own = learned
        # what the prior stands for until steps have been seen
        self._prior: tuple[float, float] = (self._rate, self._host)
        self._sums = [0.0] * 5  # of xx, x, 1, xy, y over steps, weighted
        self.tiers = [tokens for tokens, _ in costs.tiers]
        self._ns = np.array([ns for _, ns in costs.tiers])
        places = [_place(tokens) for tokens, _ in costs.tiers]
        self._low = np.array([low for low, _ in places], np.int64)
        self._share = np.array([share for _, share in places])

    @property
    def learned(self) -> list[float]:
        """All corrections."""
        return [self._rate, self._host, self._wide, self._drafts, *self._own]

    def step(self, tokens: int, *, verifies: bool = False) -> float:
        """Of so many tokens, ns, the draft pass left out."""
        low, share = _place(tokens)
        own = self._own[low] * (1 - share) + self._own[low + 1] * share
        off = own + (self._wide if verifies else 0.0)
        return (self.costs.step(tokens) * self._rate + self._host * self._unit) * exp(off)

    def verifying(self, begin: int, end: int) -> NDArray[np.float64]:
        """Of some of the tiers, all of which verify drafts, ns."""
        own, part = np.array(self._own), slice(begin, end)
        low, share = self._low[part], self._share[part]
        off = self._wide + own[low] * (1 - share) + own[low + 1] * share
        return (self._ns[part] * self._rate + self._host * self._unit) * np.exp(off)

    def draft(self, rows: int) -> float:
        """Of a draft pass, ns."""
        return self.costs.draft(rows) * exp(self._drafts)

    def saw(self, tokens: int, took_ns: int, *, verifies: bool) -> None:
        """A step that only decodes took so long, its draft pass left out."""
        if took_ns <= 0 or self.costs.step(tokens) <= 0:
            return
        expected = self.step(tokens, verifies=verifies)
        off = min(max(log(took_ns / expected), -MOST), MOST)
        seen_ns = expected * exp(off)
        self._fit(self.costs.step(tokens) / self._unit, seen_ns / self._unit)
        off = log(seen_ns / self.step(tokens, verifies=verifies))  # what the line leaves
        if verifies:
            # steps of several sizes are there now, so what tells them apart is worth keeping
            rate, host = self._prior
            rate, host = rate + WIDE * (self._rate - rate), host + WIDE * (self._host - host)
            self._prior = (rate, host)
            self._num_wide += 1
            self._wide = _bounded(self._wide + max(WIDE, 1 / (FIRST + self._num_wide)) * off)
        low, share = _place(tokens)
        for node, weight in ((low, 1 - share), (low + 1, share)):
            self._num_own[node] += weight
            part = max(OWN, 1 / (FIRST + self._num_own[node])) * weight
            kept = self._own[node] * (1 - LEAK * weight)
            self._own[node] = _bounded(kept + part * off)

    def saw_draft(self, rows: int, took_ns: int) -> None:
        """A draft pass took so long."""
        if took_ns > 0 and self.costs.draft(rows) > 0:
            off = min(max(log(took_ns / self.draft(rows)), -MOST), MOST)
            self._num_drafts += 1
            self._drafts = _bounded(self._drafts + max(DRAFT, 1 / (FIRST + self._num_drafts)) * off)

    def doubt(self) -> None:
        """Nothing has verified drafts for long: what is held against that is worth less by now."""
        self._wide *= 1 - DOUBT
        self._drafts *= 1 - DOUBT

    def _fit(self, x: float, y: float) -> None:
        """Least squares of `y` by a line of `x`, relative errors, the latest steps first. Where
        these tell the two apart too little, it is the constant that gives way."""
        weight = 1 / (y * y)
        sure_rate, sure_host = RATE_PRIOR * weight * x * x, HOST_PRIOR * weight
        news = (x * x, x, 1.0, x * y, y)
        xx, x1, one, xy, y1 = self._sums = [
            MEMORY * old + weight * new for old, new in zip(self._sums, news, strict=True)
        ]
        rate, host = self._prior
        a, b, d = xx + sure_rate, x1, one + sure_host
        p, q = xy + sure_rate * rate, y1 + sure_host * host
        whole = a * d - b * b
        host = max(0.0, (a * q - b * p) / whole)
        self._rate = min(max((p - b * host) / a, 1 / MOST_RATE), MOST_RATE)
        self._host = host


def _place(tokens: int) -> tuple[int, float]:
    """The node below, and how far towards the next one."""
    at = min(log2(max(1, tokens)), NODES - 1.001)
    return int(at), at - int(at)


def _bounded(value: float) -> float:
    return min(max(value, -3.0), 3.0)
