"""Windows in a GPU's memory, through CUDA's handles for other processes of the host."""

import ctypes
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import cuda
from services.executor.handover_memory import whole_pages
from services.executor.kv_copy import Place
from services.executor.window import NAME

_CUDA = NAME + "cuda:"
_HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
_FACTOR = -0x61C8864680B583EB  # odd, its bits well mixed: 2^64 over the golden ratio


def place_sum(place: Tensor) -> int:
    """A checksum of bytes on any device: their 64-bit words times odd numbers by place, modulo
    2^64, folded to 32 bits. Integers: the order of the summation does not matter.

    Args:
        place: uint8 [any], beginning at a multiple of 8.
    """
    whole = len(place) // 8 * 8
    words = place[:whole].view(torch.int64)
    odd = 2 * torch.arange(len(words), dtype=torch.int64, device=place.device) + 1
    total = int((words * (odd * _FACTOR)).sum())
    for at, byte in enumerate(place[whole:].tolist()):
        total += (byte + 1) * (2 * (len(words) + at) + 1) * _FACTOR
    return _fold(total)


def host_sum(payload: NDArray[np.uint8]) -> int:
    """The same, of bytes on the host."""
    return place_sum(torch.from_numpy(payload))


def _fold(total: int) -> int:
    total &= (1 << 64) - 1
    return (total ^ total >> 32) & 0xFFFFFFFF


class _Memory:
    """Memory of a GPU by its address, as torch takes it; it is kept as long as a view of it is."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class CudaWindow:
    """Memory of the present device, zeroed."""

    def __init__(self, max_bytes: int) -> None:
        """
        Raises:
            CudaError: no memory.
        """
        self.num_bytes = whole_pages(max_bytes)
        library, own = cuda.load("comm", "exchange"), ctypes.c_void_p()
        cuda.check(library.window_allocate(ctypes.c_int64(self.num_bytes), ctypes.byref(own)))
        torch.cuda.synchronize()
        memory = _Memory(_number(own), self.num_bytes)
        weakref.finalize(memory, library.window_free, own)
        self._bytes = torch.as_tensor(memory, device="cuda")
        handle = ctypes.create_string_buffer(_HANDLE_BYTES)
        cuda.check(library.window_export(own, handle))
        self.name = _CUDA + handle.raw.hex()

    def grow(self, at: int, num_bytes: int) -> bool:
        """See `AreaMemory`: all of it is there."""
        return True

    def set_head(self, data: bytes) -> None:
        """See `AreaMemory`."""
        head = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._bytes[: len(data)].copy_(head)
        torch.cuda.synchronize()

    def place(self, at: int, num_bytes: int) -> Tensor:
        """See `AreaMemory`."""
        return self._bytes[at : at + num_bytes]

    def checksum(self, place: Place) -> int:
        """See `AreaMemory`."""
        return place_sum(_tensor(place))

    def take_out(self, at: int, num_bytes: int, checksum: int) -> bytes | None:
        """See `AreaMemory`."""
        payload: NDArray[np.uint8] = self.place(at, num_bytes).cpu().numpy()
        return payload.tobytes() if host_sum(payload) == checksum else None

    def close(self) -> None:
        """It is freed with the last view of it."""
        del self._bytes


class OpenCudaWindow:
    """Another process's `CudaWindow`, on this device or one that this device reaches."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """
        Raises:
            ValueError: not the name of one.
            CudaError: it cannot be reached, or is not there.
        """
        if not name.startswith(_CUDA):
            raise ValueError(f"{name.split(':')[1]} is not a window of a GPU")
        handle = bytes.fromhex(name.removeprefix(_CUDA))
        library, address = cuda.load("comm", "exchange"), ctypes.c_void_p()
        cuda.check(library.window_open(handle, ctypes.byref(address)))
        memory = _Memory(_number(address), num_bytes)
        weakref.finalize(memory, library.window_close, address)
        self._bytes = torch.as_tensor(memory, device="cuda")

    def head(self, num_bytes: int) -> bytes:
        """See `OpenWindow`."""
        return self._bytes[:num_bytes].cpu().numpy().tobytes()

    def place(self, at: int, num_bytes: int) -> Tensor:
        """See `OpenWindow`."""
        return self._bytes[at : at + num_bytes]

    def checksum(self, place: Place) -> int:
        """See `OpenWindow`."""
        return place_sum(_tensor(place))


def _tensor(place: Place) -> Tensor:
    assert isinstance(place, Tensor)
    return place


def _number(address: ctypes.c_void_p) -> int:
    assert address.value is not None
    return address.value
