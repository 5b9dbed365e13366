"""Routed experts of a device that is one of several: tokens go where their experts are."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.comm.comm import Arrivals, ExchangeError
from kernels.comm.one_sided import OneSidedExchange
from kernels.moe.spread_portable import choose_slots
from services.executor.gpu.flight import LoadsBuffer
from services.executor.interface import GroupLost
from services.executor.models.spread import SpreadExperts


class DeviceSpread:
    """`SpreadExperts` of a layer, as the device reads it; copies take turns by a token's place."""

    def __init__(
        self, host: SpreadExperts, rank: int, counts: Tensor, rows: Tensor, device: torch.device
    ) -> None:
        """
        Args:
            counts: [num_experts], int32: rows of our own tokens are added.
            rows: [1], int32: rows that come to the experts held here are added.
        """
        self.host, self._rank, self._counts, self.rows = host, rank, counts, rows
        ranks = len(host.places)  # none of which has an expert twice
        self.owners = host.owners.int().to(device)
        self._table = torch.zeros(host.num_experts, ranks, dtype=torch.int32, device=device)
        self._copies = torch.ones(host.num_experts, dtype=torch.int32, device=device)
        self.update()

    def update(self) -> None:
        """Take over where experts lie by now; behind what was launched before."""
        table, copies = self.host.table()
        self._table[:, : table.shape[1]].copy_(table)
        self._copies.copy_(copies)

    def choose(self, expert_ids: Tensor) -> Tensor:
        """Slots of the group for [num_tokens, top_k] experts, int32."""
        return choose_slots(expert_ids, self._table, self._copies, self._counts, rank=self._rank)


class GroupExchange:
    """What the layers of a model in a group share: its exchange, and what they count.

    Whoever launches a forward, or captures it, says first how many tokens the rank with most of
    them has: `padded`.
    """

    def __init__(
        self,
        exchange: OneSidedExchange,
        spreads: list[SpreadExperts],
        device: torch.device,
    ) -> None:
        self._exchange, self.padded = exchange, 0
        shape = len(spreads), spreads[0].num_experts
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)  # since they were zeroed
        self.rows = torch.zeros(len(spreads), dtype=torch.int32, device=device)
        self.spreads = [
            DeviceSpread(host, exchange.rank, self.counts[at], self.rows[at : at + 1], device)
            for at, host in enumerate(spreads)
        ]

    @property
    def slots_type(self) -> torch.dtype:
        """Of results on their way back."""
        return self._exchange.slots

    def report(self, room: LoadsBuffer, *, with_loads: bool) -> Callable[[], tuple[bytes, bytes]]:
        """Copy what was counted behind a step, and begin anew.

        Args:
            with_loads: rows of our own tokens, too, counted since the last such call.
        Returns: once the copies are made, StepResult.expert_rows and .expert_loads.
        """
        room.rows.copy_(self.rows, non_blocking=True)
        self.rows.zero_()
        if with_loads:
            room.counts.copy_(self.counts, non_blocking=True)
            self.counts.zero_()

        def settle() -> tuple[bytes, bytes]:
            loads = room.counts.numpy().astype("<u4").tobytes() if with_loads else b""
            return room.rows.numpy().astype(np.dtype("<u4")).tobytes(), loads

        return settle

    def sums(
        self,
        u: Tensor,
        expert_ids: Tensor,
        shares: Tensor,
        spread: DeviceSpread,
        compute: Callable[[Arrivals], Tensor],
    ) -> Tensor:
        """Sums of the tokens' experts, wherever these are; all ranks call it for the same layer.

        Args:
            u: [num_tokens, hidden].
            expert_ids: [num_tokens, top_k], int32, ascending; negative: none.
            compute: the rows of slots held here, [num_arrived, top_k, hidden] of `slots_type`.
        Returns:
            [num_tokens, hidden], float32; added in ascending expert.
        Raises:
            GroupLost: an exchange before this one failed, as far as the host knows by now.
        """
        exchange, sums = self._exchange, list[Tensor]()
        slots, shares = spread.choose(expert_ids.contiguous()), shares.contiguous()
        for first in range(0, self.padded, exchange.capacity):
            exchange.set_capacity(min(exchange.capacity, self.padded - first))
            part = slice(first, first + exchange.capacity)
            try:
                here = exchange.dispatch(
                    u[part], slots[part], shares[part], spread.owners, held=spread.rows
                )
            except ExchangeError as error:
                raise GroupLost(str(error)) from error
            sums.append(exchange.combine(compute(here)))
        return sums[0] if len(sums) == 1 else torch.cat(sums)
