"""Expert parallelism: tokens go to the ranks that hold their experts, results come back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.moe.experts import combine_slots


class ExchangeError(RuntimeError):
    """A peer is gone, late, or at another exchange: nothing of this step can be used."""


@dataclass(frozen=True)
class Arrivals:
    """Tokens whose experts are wanted here: from rank 0, then from rank 1, and so on, each rank's
    in their order. Where the exchange is one of padded buffers, there is room for all tokens."""

    x: Tensor  # [num_arrived, hidden], float32
    expert_ids: Tensor  # [num_arrived, top_k], int64, as they were sent; also other ranks'
    weights: Tensor  # [num_arrived, top_k], float32


class Exchange(Protocol):
    """Two exchanges a layer, entered by every rank of the group in the same order.

    A rank without tokens enters them, too, with none: its experts may be wanted.
    """

    @property
    def ranks(self) -> int:
        """Size of the group."""
        ...

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        owners: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Arrivals:
        """Send tokens to the ranks of their experts; returns what arrived here.

        Args:
            x: [num_tokens, hidden], float32; at most the step's capacity of tokens.
            expert_ids: [num_tokens, top_k], int64: the slots of the group that hold a token's
                experts, in ascending order of the experts.
            weights: [num_tokens, top_k], float32.
            owners: [num_slots], int64: the rank of each slot, the same everywhere.
            meanwhile: runs while the tokens are on their way.
        Raises:
            ExchangeError: the group is no more.
        """
        ...

    def combine(self, slots: Tensor) -> Tensor:
        """Send results back; returns the sum over the experts of each of this rank's own tokens.

        Strict: every slot comes back as a row of its own and is added on the source rank in
        ascending expert id, so neither the number of ranks nor the placement changes a bit.

        Args:
            slots: [num_arrived, top_k, hidden], float32, for the latest `Arrivals`; slots of
                experts that are not held here are not looked at.
        Returns:
            [num_tokens, hidden], float32: in the order of the latest `dispatch`.
        Raises:
            ExchangeError: the group is no more.
        """
        ...


class Alone:
    """The `Exchange` of a rank that holds every expert: nothing moves."""

    ranks = 1

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
        return Arrivals(x, expert_ids, weights)

    def combine(self, slots: Tensor) -> Tensor:
        """Add the slots."""
        return combine_slots(slots)


class Loopback:
    """The `Exchange` of a rank that measures what its own experts cost: as much arrives as does
    from `ranks` ranks like this one, and what others hold is left out of the sums.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        owners: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Arrivals:
        """Our own tokens, once for each rank."""
        if meanwhile is not None:
            meanwhile()
        self._tokens = x.shape[0]
        repeats = self.ranks, 1
        return Arrivals(x.repeat(repeats), expert_ids.repeat(repeats), weights.repeat(repeats))

    def combine(self, slots: Tensor) -> Tensor:
        """Add the slots of the first copy."""
        return combine_slots(slots[: self._tokens])
