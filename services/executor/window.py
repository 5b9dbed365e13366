"""Windows: memory of a device that other processes of this host copy prompts out of.

On a CPU the device's memory is the host's. A window of a GPU is in `gpu/window.py`.
"""

import mmap
import os
from typing import Protocol

import numpy as np

from deepmesh.checksum import crc32
from services.executor.handover_memory import AreaMemory, whole_pages
from services.executor.kv_copy import Bytes, Place

NAME = "window:"  # how the name of one begins where else a file's path stands
_HOST = NAME + "host:"


class OpenWindow(Protocol):
    """The window of another process."""

    def head(self, num_bytes: int) -> bytes:
        """The first bytes: who knows them sees the same memory."""
        ...

    def place(self, at: int, num_bytes: int) -> Place:
        """Where a payload lies; it stays mapped for as long as somebody has this."""
        ...

    def checksum(self, place: Place) -> int:
        """Of what is there, as its owner computes it."""
        ...


class HostWindow:
    """Shared memory in the place of a device's, for processes of one user.

    It has no name in the file system, so nothing is left of it whichever way a process ends.
    """

    def __init__(self, max_bytes: int) -> None:
        """
        Raises:
            OSError: no memory.
        """
        self.num_bytes = whole_pages(max_bytes)
        self._file = os.memfd_create("deepmesh-window", os.MFD_CLOEXEC)
        os.posix_fallocate(self._file, 0, self.num_bytes)
        self._bytes: Bytes = np.frombuffer(mmap.mmap(self._file, self.num_bytes), np.uint8)
        self.name = f"{_HOST}{os.getpid()}:{self._file}"

    def grow(self, at: int, num_bytes: int) -> bool:
        """See `AreaMemory`: all of it is there."""
        return True

    def set_head(self, data: bytes) -> None:
        """See `AreaMemory`."""
        self._bytes[: len(data)] = np.frombuffer(data, np.uint8)

    def place(self, at: int, num_bytes: int) -> Bytes:
        """See `AreaMemory`."""
        return self._bytes[at : at + num_bytes]

    def checksum(self, place: Place) -> int:
        """See `AreaMemory`: CRC-32."""
        return _crc32(place)

    def take_out(self, at: int, num_bytes: int, checksum: int) -> bytes | None:
        """See `AreaMemory`."""
        payload = self.place(at, num_bytes).tobytes()
        return payload if crc32(payload) == checksum else None

    def close(self) -> None:
        """Who has it open keeps its memory until they close it, too."""
        del self._bytes
        os.close(self._file)


class OpenHostWindow:
    """Another process's `HostWindow`, to be read."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """
        Raises:
            OSError, ValueError: there is no such window, or it is smaller than that.
        """
        pid, file = (int(part) for part in name.removeprefix(_HOST).split(":"))
        fd = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < num_bytes:
                raise ValueError(f"{name} has less than {num_bytes} bytes")
            self._bytes: Bytes = np.frombuffer(
                mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ), np.uint8
            )
        finally:
            os.close(fd)

    def head(self, num_bytes: int) -> bytes:
        """See `OpenWindow`."""
        return self._bytes[:num_bytes].tobytes()

    def place(self, at: int, num_bytes: int) -> Bytes:
        """See `OpenWindow`."""
        return self._bytes[at : at + num_bytes]

    def checksum(self, place: Place) -> int:
        """See `OpenWindow`."""
        return _crc32(place)


def make_window(device: str, max_bytes: int) -> AreaMemory:
    """One of this process's device.

    Raises:
        OSError, RuntimeError: no memory for it.
    """
    if device != "cuda":
        return HostWindow(max_bytes)
    from services.executor.gpu.window import CudaWindow  # torch only where it is used

    return CudaWindow(max_bytes)


def open_window(name: str, num_bytes: int, device: str) -> OpenWindow:
    """One of another process, for this one's device.

    Raises:
        OSError, ValueError, RuntimeError: it cannot be opened from here.
    """
    if device != "cuda":
        return OpenHostWindow(name, num_bytes)
    from services.executor.gpu.window import OpenCudaWindow

    return OpenCudaWindow(name, num_bytes)


def _crc32(place: Place) -> int:
    assert isinstance(place, np.ndarray)
    return crc32(place.data)
