"""Windows: memory of each rank that the other ranks write to. See `one_sided`."""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import cuda

HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
Swap = Callable[[bytes], list[bytes]]  # gives ours to every rank, returns all by rank


class Windows:
    """Addresses of all ranks' windows as this rank reaches them; zeroed before anybody writes."""

    def __init__(self, addresses: list[int], release: Callable[[], None]) -> None:
        self.addresses = addresses
        self._release = release

    def close(self) -> None:
        """Give the memory back: no rank may use a window of this group any more."""
        release, self._release = self._release, _nothing
        release()


def local_windows(num_bytes: int, devices: Sequence[str]) -> Windows:
    """For ranks that are threads or streams of one process, each with the device named.

    Raises:
        RuntimeError: two of the devices cannot reach each other's memory.
    """
    tensors = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for device in devices]
    for tensor in tensors:
        for other in {other.device: other for other in tensors}.values():
            if other.device != tensor.device:
                if not torch.cuda.can_device_access_peer(tensor.device, other.device):
                    raise RuntimeError(f"{tensor.device} cannot reach {other.device}")
                tensor[:1].copy_(other[:1])  # opens the way
    if tensors[0].is_cuda:
        for tensor in tensors:  # zeroed, whichever stream writes first
            torch.cuda.synchronize(tensor.device)
    return Windows([tensor.data_ptr() for tensor in tensors], tensors.clear)


class OwnWindow(Protocol):
    """A window that outlives the groups that it serves, one after the other."""

    address: int

    def clear(self) -> None:
        """Zero it; nobody may write meanwhile."""
        ...

    def meet(self, rank: int, swap: Swap) -> list[int]:
        """Addresses of all ranks' windows as this rank reaches them, ours among them; those of the
        group before are given up.

        Raises:
            CudaError, OSError: another rank's window cannot be reached.
        """
        ...

    def close(self) -> None:
        """Give the memory back: no rank may use it any more."""
        ...


class IpcWindow:
    """Of a GPU, for processes of one host, on one device or several that reach each other."""

    def __init__(self, num_bytes: int) -> None:
        """
        Raises:
            CudaError: no memory.
        """
        self._library, own = cuda.load("comm", "exchange"), ctypes.c_void_p()
        self._num_bytes = num_bytes
        cuda.check(self._library.window_allocate(ctypes.c_int64(num_bytes), ctypes.byref(own)))
        torch.cuda.synchronize()
        self.address = _number(own)
        self._opened: list[int] = []

    def clear(self) -> None:
        """See `OwnWindow`."""
        at, size = ctypes.c_void_p(self.address), ctypes.c_int64(self._num_bytes)
        cuda.check(self._library.window_clear(at, size))
        torch.cuda.synchronize()

    def meet(self, rank: int, swap: Swap) -> list[int]:
        """See `OwnWindow`."""
        self._leave()
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        cuda.check(self._library.window_export(ctypes.c_void_p(self.address), handle))
        addresses: list[int] = []
        for other, theirs in enumerate(swap(handle.raw)):
            address = ctypes.c_void_p(self.address)
            if other != rank:
                address = ctypes.c_void_p()
                cuda.check(self._library.window_open(theirs, ctypes.byref(address)))
                self._opened.append(_number(address))
            addresses.append(_number(address))
        return addresses

    def _leave(self) -> None:
        for address in self._opened:
            self._library.window_close(ctypes.c_void_p(address))  # whose process may be gone
        self._opened.clear()

    def close(self) -> None:
        """See `OwnWindow`."""
        self._leave()
        cuda.check(self._library.window_free(ctypes.c_void_p(self.address)))


class HostWindow:
    """Shared memory in the place of a device's, for processes of one user on one host; it has no
    name, so that nothing is left of it whichever way a process ends."""

    def __init__(self, num_bytes: int) -> None:
        """
        Raises:
            OSError: no memory.
        """
        self._file = os.memfd_create("deepmesh-window")
        os.ftruncate(self._file, num_bytes)
        self._num_bytes = num_bytes
        self._own = mmap.mmap(self._file, num_bytes)
        self.address = _address_of(self._own)
        self._opened: list[mmap.mmap] = []

    def clear(self) -> None:
        """See `OwnWindow`."""
        ctypes.memset(self.address, 0, self._num_bytes)

    def meet(self, rank: int, swap: Swap) -> list[int]:
        """See `OwnWindow`."""
        self._opened.clear()
        name = f"/proc/{os.getpid()}/fd/{self._file}".encode().ljust(HANDLE_BYTES, b"\0")
        addresses: list[int] = []
        for other, theirs in enumerate(swap(name)):
            if other == rank:
                addresses.append(self.address)
                continue
            with open(theirs.rstrip(b"\0"), "r+b") as file:
                self._opened.append(mmap.mmap(file.fileno(), self._num_bytes))
            addresses.append(_address_of(self._opened[-1]))
        return addresses

    def close(self) -> None:
        """See `OwnWindow`."""
        self._opened.clear()
        os.close(self._file)


def ipc_windows(num_bytes: int, rank: int, swap: Swap) -> Windows:
    """Windows of processes of one host that form one group; see `IpcWindow`."""
    own = IpcWindow(num_bytes)
    return Windows(own.meet(rank, swap), own.close)


def symmetric_windows(num_bytes: int, group: dist.ProcessGroup) -> Windows:
    """The same through torch's symmetric memory: one device a rank. Without multicast, which can
    take the GPUs of a host out of service.
    """
    from torch.distributed import _symmetric_memory as symmetric

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when memory is first mapped
    device = torch.device("cuda", torch.cuda.current_device())
    kept: list[Tensor] = [symmetric.empty(num_bytes, dtype=torch.uint8, device=device).zero_()]
    meeting = symmetric.rendezvous(kept[0], group)
    torch.cuda.synchronize()
    meeting.barrier()
    return Windows(list(meeting.buffer_ptrs), kept.clear)


def _number(address: ctypes.c_void_p) -> int:
    assert address.value is not None
    return address.value


def _address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _nothing() -> None:
    pass
