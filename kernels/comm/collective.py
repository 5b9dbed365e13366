"""The exchange by collectives on padded buffers: all_gather out, reduce_scatter back.

Every rank gets every token and its slots come back in a buffer in which each has one owner and is
zero from all others, so that no order of the collective's sum can change a bit. Sizes are those of
the step's capacity and nothing is read by the host: with NCCL a step can be a CUDA graph. Up to
some 4 ranks nearly every token is wanted everywhere, and this moves little that need not move.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from kernels.comm.comm import Arrivals, ExchangeError
from kernels.moe.experts_ref import combine_slots_ref


class CollectiveExchange:
    """One rank's `Exchange` in a process group (NCCL, or gloo on a host) of its own.

    Arrivals have room for the capacity of every rank; experts of what is not taken, and of other
    ranks, are -1.
    """

    def __init__(self, group: Backend, *, device: str = "cpu", is_fast: bool = False) -> None:
        """`is_fast`: sums of a rank travel back instead of single slots; from three ranks on their
        order is the collective's own.
        """
        self.rank, self.ranks = group.rank(), group.size()
        self._group, self._is_fast = group, is_fast
        self._capacity = 0
        self._tag = torch.zeros(1, dtype=torch.int32, device=device)
        self._elsewhere = torch.zeros(1, dtype=torch.bool, device=device)
        self._sent: tuple[int, Tensor] | None = None  # tokens, and which arrived slots are ours

    def begin(self, tag: int, capacity: int) -> None:
        """A step begins, or is captured: `tag` (31 bits) and `capacity` (tokens a rank, at most)
        are the same on all ranks. A graph that is replayed needs `set_tag` alone.
        """
        self._capacity = capacity
        self.set_tag(tag)

    def set_tag(self, tag: int) -> None:
        """Name the step that the next exchanges belong to; on the current stream."""
        self._tag.fill_(tag)

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        owners: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Arrivals:
        """See `Exchange`; x may be float32 or bfloat16 and arrives as it was given; an id below 0
        is nobody's."""
        tokens, capacity = x.shape[0], self._capacity
        assert tokens <= capacity, f"{tokens} tokens, capacity {capacity}"
        top_k = expert_ids.shape[1]
        words = x.contiguous().view(torch.int32)
        block = words.new_zeros(capacity + 1, words.shape[1] + 2 * top_k)
        block[0, :1] = self._tag
        block[1 : tokens + 1] = torch.cat((words, weights.view(torch.int32), expert_ids.int()), 1)
        block[tokens + 1 :, -top_k:] = -1
        gathered = block.new_empty(self.ranks * (capacity + 1), block.shape[1])
        gather = self._group._allgather_base  # pyright: ignore[reportAttributeAccessIssue] # no stub
        work = gather(gathered, block)
        if meanwhile is not None:
            meanwhile()
        self._wait(work)
        blocks = gathered.unflatten(0, (self.ranks, -1))
        self._elsewhere |= (blocks[:, 0, 0] != self._tag).any()
        rows = blocks[:, 1:].flatten(0, 1)
        ids = rows[:, -top_k:].long()
        is_here = (ids >= 0) & (owners.long()[ids.clamp_min(0)] == self.rank)
        self._sent = tokens, is_here
        return Arrivals(
            rows[:, : words.shape[1]].contiguous().view(x.dtype),
            torch.where(is_here, ids, -1).to(expert_ids.dtype),
            rows[:, words.shape[1] : -top_k].contiguous().view(torch.float32),
        )

    def combine(self, slots: Tensor) -> Tensor:
        """See `Exchange`; slots may be float32 or bfloat16."""
        assert self._sent is not None, "combine before dispatch"
        (tokens, is_here), self._sent = self._sent, None
        own = torch.where(is_here.unsqueeze(2), slots, 0.0)
        if self._is_fast:
            own = combine_slots_ref(own.float()).to(slots.dtype).unsqueeze(1)
        back = own.new_empty(self._capacity, *own.shape[1:])
        scatter = self._group._reduce_scatter_base  # pyright: ignore[reportAttributeAccessIssue]
        self._wait(scatter(back, own, dist.ReduceScatterOptions()))
        return combine_slots_ref(back[:tokens].float())

    def check(self) -> None:
        """Look whether a rank was at another step; waits for the device.

        Raises:
            ExchangeError: one was: nothing of this step can be used.
        """
        if self._elsewhere.item():
            raise ExchangeError("another rank is at another step")

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()  # of NCCL: on the stream alone
        except RuntimeError as error:
            raise ExchangeError(str(error)) from error
