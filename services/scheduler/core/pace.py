"""How much prefill a step may hold beside decode rows, so that streams hardly feel it."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import StepKind

from .costs import Costs
from .group import StepRecord
from .policy import Geometry

FINE_ALIGN = 8  # grid of chunks where any boundary gives the same bits
LEARNING = 0.05  # weight of the latest step in what is learned from steps
MOST_SLOWER = 4.0


class Pace:
    """Bounds the prefill of steps that decode, by time.

    Of such a step prefill may take `share`. Where that is less than fair it may take more: as much
    for each prompt as for each decode row. A few prompts beside many streams then cost these
    little, and many prompts beside a few streams need not wait for them.

    Ranks step together, so a step lasts as long as its slowest rank: each may prefill until then,
    whoever decodes less the more, and prompts on several ranks share one stall. What a step takes
    beyond that (ranks measure their work alone, without exchanges) is learned from steps that
    only decode, and counts as decode rows' time; how much longer prefill takes, from the others.

    It binds where steps' costs are known and with one kernel class: only then may a chunk end off
    the kernels' grid, and a whole grid chunk can take longer than all decode rows together.
    """

    def __init__(self, costs: Costs, geometry: Geometry, *, share: float) -> None:
        """`share`: below 1; 1 is no bound."""
        self.binds = costs.are_known and geometry.one_kernel_class and share < 1
        self._ratio = share / (1 - share) if share < 1 else 0.0  # to the decode rows' time
        self._costs = costs
        self._width = geometry.decode_width
        self._together_ns = 0.0  # of a step, beyond the slowest rank's own work
        self._spent_ns = self._planned_ns = 0.0  # on prefill of recent steps
        self._slower = 1.0  # a prefill token takes so many times as long as a rank alone measured

    @property
    def together_ns(self) -> float:
        """What exchanges of a step take beyond the slowest rank's own work, as learned."""
        return self._together_ns

    def saw(self, step: StepRecord) -> None:
        """A step has run on all ranks: learn from it, if there are several."""
        costs = self._costs
        if not self.binds or len(costs.base) == 1:
            return
        took_ns = step.end_ns - step.begin_ns
        rank_of = np.repeat(np.arange(len(costs.base)), np.diff(step.bounds))
        rows, prefills = step.rows, step.rows.is_prefill
        decodes = np.bincount(rank_of[~prefills], minlength=len(costs.base))
        own_ns = costs.base + costs.decode_row * decodes * self._width
        if step.kind == StepKind.DECODE:
            beyond_ns = max(0.0, took_ns - float(own_ns.max()))
            self._together_ns += LEARNING * (beyond_ns - self._together_ns)
        elif step.kind == StepKind.MIXED:
            tokens = np.bincount(rank_of[prefills], rows.q[prefills], len(costs.base))
            more_ns = costs.prefill_token * tokens
            last = int((own_ns + more_ns).argmax())
            if more_ns[last] > 0:  # sums, not quotients: of a small chunk most is noise
                spent_ns = float(took_ns - self._together_ns - own_ns[last])
                self._spent_ns += LEARNING * (spent_ns - self._spent_ns)
                self._planned_ns += LEARNING * (float(more_ns[last]) - self._planned_ns)
                self._slower = min(max(self._spent_ns / self._planned_ns, 1.0), MOST_SLOWER)

    def tokens(
        self, rows: NDArray[np.int64], context: NDArray[np.int64], prompts: int
    ) -> NDArray[np.int64] | None:
        """Most prefill tokens of a step by rank, multiples of FINE_ALIGN; None: no bound.

        Args:
            rows: decode rows of the step, by rank.
            context: positions that these attend to, all together, by rank.
            prompts: requests of all ranks that prefill, or could if there was time.
        """
        num_rows = int(rows.sum())
        if not (self.binds and num_rows and prompts):
            return None
        costs = self._costs
        decode_ns = costs.base + costs.decode_row * rows * self._width
        decode_ns = decode_ns + costs.context_token * context
        slowest_ns = float(decode_ns.max())
        more_ns = max(self._ratio, prompts / num_rows) * (slowest_ns + self._together_ns)
        token_ns = costs.prefill_token * self._slower
        tokens = ((slowest_ns + more_ns - decode_ns) // token_ns).astype(np.int64)
        return np.maximum(FINE_ALIGN, tokens // FINE_ALIGN * FINE_ALIGN)
