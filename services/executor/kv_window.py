"""The window of another executor's device: payloads go from device to device."""

from collections.abc import Sequence

from services.executor.kv_copy import Bytes, Place
from services.executor.window import OpenWindow


class MappedWindow:
    """What a load does with a mapped file, with a window. Payloads in it are copied by the device
    alone, and lie in one piece each."""

    def __init__(self, window: OpenWindow, num_bytes: int) -> None:
        self._window, self._num_bytes = window, num_bytes

    def head(self, num_bytes: int) -> bytes:
        """See `MappedFile`."""
        return self._window.head(num_bytes)

    def place(self, extents: Sequence[tuple[int, int]], num_bytes: int) -> "Place | None":
        """See `MappedFile`."""
        if len(extents) != 1:
            return None
        at, size = extents[0]
        fits = at >= 0 and 0 < size == num_bytes <= self._num_bytes - at
        return self._window.place(at, size) if fits else None

    def checksum(self, place: Place) -> int:
        """Of a payload where it lies, as its owner computed it."""
        return self._window.checksum(place)

    def write(self, extents: Sequence[tuple[int, int]], payload: Bytes) -> bool:
        """Nobody but its owner writes into a window."""
        return False

    def read(self, extents: Sequence[tuple[int, int]], out: Bytes) -> bool:
        """Nothing goes over the host."""
        return False

    def close(self) -> None:
        """It stays mapped until nobody looks at a payload in it any more."""
        del self._window
