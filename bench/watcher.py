"""An exchange of one rank that shows what each layer routes to."""

from collections.abc import Callable

from torch import Tensor

from kernels.comm.comm import Arrivals
from kernels.moe.experts import combine_slots


class Watcher:
    """An `Exchange`, and not an `Alone`: step programs ask it in every layer."""

    ranks = 1

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        """`see` gets the expert ids of each layer, [num_tokens, top_k]."""
        self._see = see

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        owners: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Arrivals:
        """All tokens stay."""
        if meanwhile is not None:
            meanwhile()
        self._see(expert_ids)
        return Arrivals(x, expert_ids, weights)

    def combine(self, slots: Tensor) -> Tensor:
        """Add the slots."""
        return combine_slots(slots)
