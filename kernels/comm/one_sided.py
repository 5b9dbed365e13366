"""The exchange by one-sided writes into windows of the other ranks: `csrc/exchange.cu`.

Sizes are those of the step's capacity and nothing is read by the host, so a whole step can be a
CUDA graph. All ranks must enter the same exchanges in the same order, and replay the same graphs.
The same source runs on a host, where ranks are threads: that is how the protocol is tested.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda, portable
from kernels.comm.comm import Arrivals, ExchangeError

PATIENCE_S = 5.0
_STATE_WORDS, _STATUS_WORDS = 4, 6
_FAILED, _TAG = 2, 3  # words of the state
_APART = 2  # value of the first of these
_STOP, _CODE, _EXCHANGE, _FROM, _TOKEN, _THEIR_TAG = range(_STATUS_WORDS)
_LATE, _STOPPED, _ELSEWHERE = 1, 2, 3  # values of the code


@dataclass(frozen=True)
class Geometry:
    """What all ranks of a group agree on."""

    ranks: int
    capacity: int  # tokens of a rank in a step, at most
    hidden: int
    top_k: int
    fp8_rows: bool = True  # tokens travel as the experts round them; else as float32
    slots: torch.dtype = torch.bfloat16  # of results on their way back, or float32
    is_fast: bool = False  # one sum a rank travels back: other bits for other placements

    def __post_init__(self) -> None:
        """Refuse what the kernels have no code for."""
        if self.top_k > 32:
            raise ValueError(f"{self.top_k} experts of a token: at most 32")
        if self.hidden % 32:
            raise ValueError(f"hidden {self.hidden} must be a multiple of 32")
        if self.slots not in (torch.bfloat16, torch.float32):
            raise ValueError(f"slots of {self.slots}: bfloat16 or float32")

    @property
    def window_bytes(self) -> int:
        """Of memory that each rank opens to the others."""
        built = portable.library("comm", "exchange", is_cuda=torch.cuda.is_available())
        count = built.exchange_window_bytes
        count.restype = ctypes.c_int64
        return int(count(ctypes.byref(_Group.of(self))))


class _Group(ctypes.Structure):
    """`Group` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "ranks", "capacity", "hidden", "top_k")),
        *((name, ctypes.c_int64) for name in ("is_fp8", "slot_bytes", "is_fast", "is_shared")),
        ("patience_ns", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("windows", "state", "status")),
    )

    @staticmethod
    def of(
        geometry: Geometry,
        rank: int = 0,
        patience_s: float = PATIENCE_S,
        *,
        is_shared: bool = False,
    ) -> "_Group":
        return _Group(
            rank,
            geometry.ranks,
            geometry.capacity,
            geometry.hidden,
            geometry.top_k,
            geometry.fp8_rows,
            geometry.slots.itemsize,
            geometry.is_fast,
            is_shared,
            int(patience_s * 1e9),
        )


class OneSidedExchange:
    """One rank's `Exchange`. Arrivals have room for the capacity of every rank, in which a token
    lies at its place among those of its rank; experts of what is not wanted here are -1.
    """

    def __init__(
        self,
        geometry: Geometry,
        rank: int,
        windows: Sequence[int],
        *,
        device: str = "cuda",
        patience_s: float = PATIENCE_S,
        shares_device: bool | None = None,
    ) -> None:
        """
        Args:
            windows: addresses of `geometry.window_bytes` zeroed bytes of each rank.
            patience_s: how long a kernel waits for another rank.
            shares_device: whether two ranks are on one GPU; None: if there are fewer GPUs.
        """
        self.rank, self.ranks, self.slots = rank, geometry.ranks, geometry.slots
        self._geometry, self.device = geometry, torch.device(device)
        is_cuda = self.device.type == "cuda"
        self._state = torch.zeros(_STATE_WORDS, dtype=torch.int32, device=device)
        self._status = torch.zeros(_STATUS_WORDS, dtype=torch.int32, pin_memory=is_cuda)
        self._table = torch.tensor(list(windows), dtype=torch.int64, device=device)
        if shares_device is None:
            shares_device = is_cuda and geometry.ranks > torch.cuda.device_count()
        self._group = _Group.of(geometry, rank, patience_s, is_shared=shares_device)
        self._group.windows, self._group.state = self._table.data_ptr(), self._state.data_ptr()
        self._group.status = self._status.data_ptr()
        self._library = portable.library("comm", "exchange", is_cuda=is_cuda)
        with self._on_device():
            cuda.check(self._library.exchange_prepare(ctypes.byref(self._group)))
        self.set_tag(0)  # loads what that runs: later would be behind kernels that wait
        if is_cuda:
            torch.cuda.synchronize(self.device)
        self._capacity = 0
        self._status_at = self._status.numpy()
        self._sent: tuple[Tensor, Tensor] | None = None  # ids and owners of our own tokens

    @property
    def capacity(self) -> int:
        """Tokens of a rank in one exchange, at most."""
        return self._geometry.capacity

    def begin(self, tag: int, capacity: int) -> None:
        """A step begins, or is captured: `tag` (31 bits) and `capacity` (tokens a rank, at most)
        are the same on all ranks. A graph that is replayed needs `set_tag` alone.
        """
        self.set_capacity(capacity)
        self.set_tag(tag)

    def set_capacity(self, capacity: int) -> None:
        """Tokens a rank of the exchanges that follow, or are captured, at most: the same on all
        ranks."""
        assert 0 < capacity <= self._geometry.capacity
        self._capacity = capacity

    def set_tag(self, tag: int) -> None:
        """Name the step that the next exchanges belong to; on the current stream."""
        self._state[_TAG].fill_(tag)

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        owners: Tensor,
        meanwhile: Callable[[], None] | None = None,
        *,
        held: Tensor | None = None,
    ) -> Arrivals:
        """See `Exchange`; x may be float32 or bfloat16 and arrives as it was given, ids and
        owners are int32, an id below 0 is nobody's. Raises only what was found before.

        Args:
            held: [1], int32: how many of the ids that arrive are held here is added.
        """
        self.check()
        tokens, shape = x.shape[0], self._geometry
        assert tokens <= self._capacity, f"{tokens} tokens, capacity {self._capacity}"
        assert expert_ids.dtype == owners.dtype == torch.int32
        x, expert_ids, weights = x.contiguous(), expert_ids.contiguous(), weights.contiguous()
        rows = self.ranks * self._capacity
        arrived = Arrivals(
            x.new_empty(rows, shape.hidden),
            expert_ids.new_empty(rows, shape.top_k),
            weights.new_empty(rows, shape.top_k),
        )
        capacity, is_bf16 = map(ctypes.c_int64, (self._capacity, x.dtype is torch.bfloat16))
        counter = ctypes.c_void_p(None if held is None else held.data_ptr())
        room = _at(arrived.expert_ids), _at(arrived.weights), counter
        own = _at(x), is_bf16, _at(expert_ids), _at(weights), _at(owners)
        tokens_here = ctypes.c_int64(tokens)
        self._call("exchange_send", capacity, tokens_here, *own, _at(arrived.x), *room)
        if meanwhile is not None:
            meanwhile()
        self._call("exchange_receive", capacity, _at(arrived.x), is_bf16, *room)
        self._sent = expert_ids, owners
        return arrived

    def combine(self, slots: Tensor) -> Tensor:
        """See `Exchange`; slots have the geometry's type."""
        assert self._sent is not None, "combine before dispatch"
        ids, owners = self._sent
        assert slots.dtype is self._geometry.slots
        slots, capacity = slots.contiguous(), ctypes.c_int64(self._capacity)
        self._call("exchange_return", capacity, _at(slots))
        out = torch.empty(ids.shape[0], self._geometry.hidden, device=self.device)
        tokens, sent = ctypes.c_int64(ids.shape[0]), (_at(ids), _at(owners))
        self._call("exchange_reduce", tokens, capacity, *sent, _at(slots), _at(out))
        self._sent = None
        return out

    def skip(self) -> None:
        """In the place of `combine`, on all ranks: nothing comes back. For benchmarks."""
        assert self._sent is not None, "skip before dispatch"
        nothing, self._sent = ctypes.c_int64(0), None
        self._call("exchange_return", nothing, ctypes.c_void_p())

    def check(self) -> None:
        """Look whether an exchange has failed; waits for nothing.

        Raises:
            ExchangeError: what came after it cannot be used.
        """
        words = self._status_at.tolist()
        where = f"exchange {words[_EXCHANGE]}"
        match words[_CODE]:
            case 0:
                return
            case 2:
                raise ExchangeError("the group has been given up")
            case 3:
                raise ExchangeError(
                    f"rank {words[_FROM]} is at {where} of step {words[_THEIR_TAG]:#x},"
                    " this rank at another step"
                )
            case _:
                raise ExchangeError(f"{where}: rank {words[_FROM]} is late (token {words[_TOKEN]})")

    def reset(self, windows: Sequence[int], *, is_apart: bool = False) -> None:
        """Begin with exchange 1 over these windows, whatever happened before: graphs stay valid.

        No rank may write to a window of ours from before the call until all have made it, and the
        windows are zeroed meanwhile.

        Args:
            windows: as in the constructor.
            is_apart: exchanges reach nobody: nothing arrives, and sums are 0.
        """
        self._table.copy_(torch.tensor(list(windows), dtype=torch.int64))
        self._state.zero_()
        if is_apart:
            self._state[_FAILED].fill_(_APART)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._status.zero_()
        self._sent = None

    def stop(self) -> None:
        """End what waits; may come from any thread. The group is of no use any more."""
        self._status[_STOP] = 1

    def _call(self, name: str, *arguments: object) -> None:
        with self._on_device():
            stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
            function = getattr(self._library, name)
            last = ctypes.c_void_p(stream)
            cuda.check(function(ctypes.byref(self._group), *arguments, last))

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
