"""The stream of one device: what is launched runs in this order, and nobody waits but at marks."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from kernels.step.slots_portable import stamp
from services.executor.gpu.clock import WallClock

_READINGS = 20  # of the device's clock; the quickest counts


class Mark(Protocol):
    """A place in the stream."""

    def wait(self) -> None:
        """Until the device has come to it."""
        ...


class DeviceStream(Protocol):
    """Launches of one thread at a time, carried out in their order."""

    device: torch.device

    def on(self) -> AbstractContextManager[object]:
        """What this thread launches meanwhile goes to the stream."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """Copies of this thread go past it meanwhile; they touch nothing that a step in flight
        does."""
        ...

    def mark(self) -> Mark:
        """Behind what was launched up to now, by this thread and in this context."""
        ...

    def shared(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Host memory that kernels reach by its address."""
        ...

    def wall_ns(self, begin: int, end: int) -> tuple[int, int]:
        """What two stamps of kernels mean on the wall clock; the second is heard of just now."""
        ...


class HostStream:
    """A host in the place of a device: what is launched is done.

    `hold` lets tests stand between the end of a launch and the moment somebody hears of it.
    """

    device = torch.device("cpu")

    def __init__(self, hold: Callable[[], None] = lambda: None) -> None:
        self._hold = hold

    def on(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        return nullcontext()

    def mark(self) -> Mark:
        """See `DeviceStream`."""
        return _HostMark(self._hold)

    def shared(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """See `DeviceStream`."""
        return torch.zeros(shape, dtype=dtype)

    def wall_ns(self, begin: int, end: int) -> tuple[int, int]:
        """See `DeviceStream`."""
        return begin, end


class _HostMark:
    def __init__(self, hold: Callable[[], None]) -> None:
        self._hold = hold

    def wait(self) -> None:
        """See `Mark`."""
        self._hold()


class CudaStream:
    """A CUDA stream for steps, and one for copies of blocks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._clock = WallClock(self._read_clock())

    def on(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        return torch.cuda.stream(self._steps)

    def beside(self) -> AbstractContextManager[object]:
        """See `DeviceStream`."""
        return torch.cuda.stream(self._copies)

    def mark(self) -> Mark:
        """See `DeviceStream`."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        return _CudaMark(event)

    def shared(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """See `DeviceStream`."""
        return torch.zeros(shape, dtype=dtype).pin_memory()

    def wall_ns(self, begin: int, end: int) -> tuple[int, int]:
        """See `DeviceStream`."""
        self._clock.heard(end, time.time_ns())
        return self._clock.at(begin), self._clock.at(end)

    def _read_clock(self) -> int:
        """ns from the device's clock to the wall clock, while nothing runs."""
        found = torch.zeros(1, dtype=torch.int64, device=self.device)
        best, offset = 1 << 62, 0
        for _ in range(_READINGS):
            torch.cuda.synchronize(self.device)
            before = time.time_ns()
            stamp(found, found.data_ptr())
            torch.cuda.synchronize(self.device)
            after = time.time_ns()
            if after - before < best:
                best, offset = after - before, (before + after) // 2 - int(found)
        return offset


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """See `Mark`."""
        self._event.synchronize()
