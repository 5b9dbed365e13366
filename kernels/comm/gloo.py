"""The exchange on the CPU: torch.distributed's gloo, padded capacity out, exact rows back."""

import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.comm.comm import Arrivals, ExchangeError
from kernels.comm.routes import Routes, plan_routes, slots_back
from kernels.moe.experts import combine_slots

HEADER = 4  # int32 words before a rank's tokens: tag of the step, number of the exchange, tokens, 0
LOOK_S = 0.1  # how often a rank that waits looks whether the group has been given up
PATIENCE_S = 60.0


class GlooExchange:
    """One rank's `Exchange` in a process group that carries nothing else.

    Tokens travel in blocks of the step's capacity, so no sizes are exchanged before them; a
    block's header says how many there are and of which exchange of which step, and a rank that
    is elsewhere is found out. Both sides then know how many slots come back.
    """

    def __init__(
        self,
        group: dist.ProcessGroupGloo,
        stopped: threading.Event,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`stopped`, set by another thread, ends whatever waits here."""
        self.rank, self.ranks = group.rank(), group.size()
        self._group: dist.ProcessGroupGloo | None = group
        self._stopped, self._patience_s = stopped, patience_s
        self._tag = self._number = self._capacity = 0
        self._routes: Routes | None = None
        self._back: tuple[Tensor, list[int]] | None = None  # see slots_back

    def begin(self, tag: int, capacity: int) -> None:
        """A step begins: `tag` (31 bits) and `capacity` (tokens a rank, at most) are the same
        on all ranks.
        """
        self._tag, self._number, self._capacity = tag, 0, capacity

    def barrier(self) -> None:
        """Return when every rank has come here."""
        word = torch.zeros(self.ranks, dtype=torch.int32)
        self._all_to_all(torch.empty_like(word), word, [], [])

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        owners: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Arrivals:
        """See `Exchange`."""
        hidden, top_k = x.shape[1], expert_ids.shape[1]
        assert x.shape[0] <= self._capacity, f"{x.shape[0]} tokens, capacity {self._capacity}"
        routes = plan_routes(expert_ids, owners, self.ranks)
        ids = expert_ids.int()
        rows = torch.cat((x.view(torch.int32), weights.view(torch.int32), ids), 1)
        sent = rows.new_zeros(self.ranks, HEADER + self._capacity * rows.shape[1])
        sent[:, 0], sent[:, 1] = self._tag, self._number
        sent[:, 2] = torch.tensor(routes.num_sent)
        blocks = sent[:, HEADER:].unflatten(1, (self._capacity, -1))
        blocks[routes.ranks, routes.places] = rows[routes.tokens]
        received = torch.empty_like(sent)
        self._all_to_all(received, sent, [], [], meanwhile)
        num_from = self._read_headers(received[:, :HEADER].tolist())
        blocks = received[:, HEADER:].unflatten(1, (self._capacity, -1))
        arrived = torch.cat([block[:count] for block, count in zip(blocks, num_from, strict=True)])
        arrived_ids = arrived[:, hidden + top_k :].long()
        self._routes = routes
        self._back = slots_back(arrived_ids, owners, self.rank, num_from)
        return Arrivals(
            arrived[:, :hidden].contiguous().view(torch.float32),
            arrived_ids,
            arrived[:, hidden : hidden + top_k].contiguous().view(torch.float32),
        )

    def combine(self, slots: Tensor) -> Tensor:
        """See `Exchange`."""
        routes, back = self._routes, self._back
        assert routes is not None, "combine before dispatch"
        assert back is not None
        mask, num_back = back
        own = slots.new_empty(len(routes.slots), slots.shape[2])
        self._all_to_all(own, slots[mask], routes.num_slots, num_back)
        top_k = slots.shape[1]
        gathered = torch.empty(len(own) // top_k, top_k, slots.shape[2])
        gathered[routes.slot_tokens, routes.slots] = own  # each slot has one owner: all are filled
        self._routes = self._back = None
        return combine_slots(gathered)

    def swap(self, sent: Sequence[Tensor], num_from: Sequence[int]) -> list[Tensor]:
        """Bytes to and from each rank: sent[r] (uint8, flat) to rank r, num_from[r] of rank r.

        Raises:
            ExchangeError: the group is no more.
        """
        counts, mine = list(num_from), [len(part) for part in sent]
        got = torch.empty(sum(counts), dtype=torch.uint8)
        self._all_to_all(got, torch.cat(list(sent)), counts, mine)
        return list(got.split(counts))

    def close(self) -> None:
        """Leave the group; peers that wait get an error. Blocks until its threads are done."""
        self._stopped.set()
        self._group = None

    def _read_headers(self, headers: list[list[int]]) -> list[int]:
        for rank, (tag, number, *_) in enumerate(headers):
            if (tag, number) != (self._tag, self._number):
                raise ExchangeError(
                    f"rank {rank} is at exchange {number} of step {tag:#x}, this rank at"
                    f" {self._number} of {self._tag:#x}"
                )
        self._number += 1
        return [count for _, _, count, _ in headers]

    def _all_to_all(
        self,
        out: Tensor,
        sent: Tensor,
        out_splits: list[int],
        splits: list[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        group = self._group
        if group is None or self._stopped.is_set():
            raise ExchangeError("this rank has left the group")
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self._patience_s)
        try:
            work = group.alltoall_base(  # pyright: ignore[reportAttributeAccessIssue] # no stub
                out, sent, out_splits, splits, options
            )
        except RuntimeError as error:
            raise ExchangeError(_plain(str(error))) from error
        del group  # whoever drops it last waits for its threads: never this one
        if meanwhile is not None:
            meanwhile()
        try:
            self._wait(work)
        except RuntimeError as error:
            raise ExchangeError(_plain(str(error))) from error

    def _wait(self, work: dist.Work) -> None:
        """Like work.wait(), but ends when the group is given up."""
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:
                if self._stopped.is_set() and not work.is_completed():
                    raise ExchangeError("the group has been given up") from None
        work.wait()  # its own error, if it has one


def _plain(text: str) -> str:
    """Gloo's own words without their place in its sources and its advice."""
    return re.sub(r"^\[[^]]*\] *", "", text).split(". This is typically")[0]
