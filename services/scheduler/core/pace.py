"""How much prefill a step may hold beside decode rows, so that streams hardly feel it."""

import numpy as np

from .costs import Costs
from .policy import Geometry

FINE_ALIGN = 8  # grid of chunks where any boundary gives the same bits


class Pace:
    """Bounds the prefill of steps that decode, by time.

    Of such a step prefill may take `share`. Where that is less than fair it may take more: as much
    for each prompt as for each decode row. A few prompts beside many streams then cost these
    little, and many prompts beside a few streams need not wait for them.

    It binds where steps' costs are known, for a rank alone (ranks that step together are
    `alignment.py`'s) and with one kernel class: only then may a chunk end off the kernels' grid,
    and a whole grid chunk can take longer than all decode rows together.
    """

    def __init__(self, costs: Costs, geometry: Geometry, *, share: float) -> None:
        """`share`: below 1; 1 is no bound."""
        is_alone = len(costs.base) == 1
        self._binds = costs.are_known and is_alone and geometry.one_kernel_class and share < 1
        self._ratio = share / (1 - share) if share < 1 else 0.0  # to the decode rows' time
        self._costs = costs
        self._width = geometry.decode_width

    def tokens(self, rows: int, context: int, prompts: int) -> int | None:
        """Most prefill tokens of a step, a multiple of FINE_ALIGN; None: no bound.

        Args:
            rows: decode rows of the step.
            context: positions that they attend to, all together.
            prompts: requests that prefill, or could if there was time.
        """
        if not (self._binds and rows and prompts):
            return None
        costs = self._costs
        decode_ns = costs.base[0] + costs.decode_row[0] * rows * self._width
        decode_ns += costs.context_token[0] * context
        prefill_ns = max(self._ratio, prompts / rows) * decode_ns
        tokens = int(np.floor(prefill_ns / costs.prefill_token[0]))
        return max(FINE_ALIGN, tokens // FINE_ALIGN * FINE_ALIGN)
