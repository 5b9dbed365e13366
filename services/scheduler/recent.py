"""The last values by a number that only grows, in memory that does not grow."""

from array import array

_NONE = (1 << 64) - 1


class Recent:
    """Values of as many bytes each, of the last numbers; an older number's is overwritten.

    All of the memory is taken at once: a table that fills for an hour looks like a leak for as
    long, and costs five times as much in objects.
    """

    def __init__(self, size: int, num_bytes: int) -> None:
        """`size`: numbers that are kept, if they follow one another; `num_bytes` of a value."""
        self._numbers = array("Q", [_NONE]) * size
        self._values = bytearray(size * num_bytes)
        self._size, self._width = size, num_bytes

    def put(self, number: int, value: bytes) -> None:
        """Keep a value; one of another length is left out."""
        if len(value) == self._width:
            place = number % self._size
            self._numbers[place] = number
            self._values[place * self._width : (place + 1) * self._width] = value

    def get(self, number: int) -> bytes | None:
        """Its value, unless it is too long ago."""
        place = number % self._size
        if self._numbers[place] != number:
            return None
        return bytes(self._values[place * self._width : (place + 1) * self._width])
