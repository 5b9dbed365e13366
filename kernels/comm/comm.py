"""Expert parallelism: tokens go to the ranks that hold their experts, results come back."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.moe.experts import combine_slots


class ExchangeError(RuntimeError):
    """A peer is gone, late, or at another exchange: nothing of this step can be used."""


@dataclass(frozen=True)
class Arrivals:
    """Tokens whose experts are wanted here: from rank 0, then from rank 1, and so on."""

    x: Tensor  # [num_arrived, hidden], float32
    expert_ids: Tensor  # [num_arrived, top_k], int64, ascending; also those of other ranks
    weights: Tensor  # [num_arrived, top_k], float32


class Exchange(Protocol):
    """Two exchanges a layer, entered by every rank of the group in the same order.

    A rank without tokens enters them, too, with none: its experts may be wanted.
    """

    @property
    def ranks(self) -> int:
        """Size of the group."""
        ...

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor, owners: Tensor) -> Arrivals:
        """Send tokens to the ranks of their experts; returns what arrived here.

        Args:
            x: [num_tokens, hidden], float32; at most the step's capacity of tokens.
            expert_ids: [num_tokens, top_k], int64, ascending within a row.
            weights: [num_tokens, top_k], float32.
            owners: [num_experts], int64: the rank that holds each expert, the same everywhere.
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

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor, owners: Tensor) -> Arrivals:
        """All tokens stay."""
        return Arrivals(x, expert_ids, weights)

    def combine(self, slots: Tensor) -> Tensor:
        """Add the slots."""
        return combine_slots(slots)
