"""Native calls recorded once and run by one call: what a step of the model is made of.

Nothing of Python or torch lies between two calls of a program: that was two thirds of the time of
a small decode step (docs/decisions/0008-step-programs.md).
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels import native

MAX_WORDS = 28  # arguments of an operation
FAMILIES = (
    "step",
    "quant",
    "moe",
    "mhc",
    "engram",
    "attention",
    "sampling",
)  # of operations recorded
_HEAD = 4  # words of a call before its arguments
_MASK = (1 << 64) - 1

_A, _N = native.ADDRESS, native.COUNT
_run = native.lazy("step", "run_calls", (_A, _N))
_time = native.lazy("step", "time_calls", (_A, _N, _A))


@dataclass(frozen=True)
class Reference:
    """Stands for the 8-byte value that lies at an address when the program runs."""

    address: int


Argument = int | float | Tensor | Reference | None


def can_record() -> bool:
    """Whether all families of native kernels are there."""
    return all(native.library(family) is not None for family in FAMILIES)


class Program:
    """A list of calls. The memory that they name must stay where it is; tensors are kept."""

    def __init__(self) -> None:
        self._calls: list[list[int]] = []
        self._names: list[str] = []
        self._parts: list[tuple[int, int] | Callable[[], None]] = []  # first and end, or a pause
        self._first = 0
        self._kept: list[Tensor] = []
        self._table: NDArray[np.uint64] = np.zeros((0, _HEAD + MAX_WORDS), np.uint64)

    def call(
        self, family: str, name: str, *arguments: Argument, when: Reference | None = None
    ) -> None:
        """Record a call of a CALLABLE operation; `when`: only where that value is not zero.

        Tensors are passed by address. Whole numbers and reals must fit the operation's types.
        """
        address, arity = native.entry(family, name)
        if len(arguments) != arity:
            raise TypeError(f"{name}: takes {arity} arguments, not {len(arguments)}")
        by_reference, words = 0, list[int]()
        for index, argument in enumerate(arguments):
            if isinstance(argument, Reference):
                by_reference |= 1 << index
            words.append(self._word(argument))
        head = [address, 0 if when is None else when.address, by_reference, len(words)]
        self._calls.append(head + words + [0] * (MAX_WORDS - len(words)))
        self._names.append(name)

    def _word(self, argument: Argument) -> int:
        match argument:
            case None:
                return 0
            case Reference():
                return argument.address
            case Tensor():
                self._kept.append(argument)
                return argument.data_ptr()
            case float():
                return struct.unpack("<I", struct.pack("<f", argument))[0]
            case _:
                return int(argument) & _MASK

    def pause(self, work: Callable[[], None]) -> None:
        """Record a piece of Python between the calls before and after it."""
        self._close()
        self._parts.append(work)

    def _close(self) -> None:
        if len(self._calls) > self._first:
            self._parts.append((self._first, len(self._calls)))
            self._first = len(self._calls)
            self._table = np.array(self._calls, np.uint64)

    def run(self) -> None:
        """Do everything in the order recorded."""
        self._close()
        start, size = self._table.ctypes.data, self._table.strides[0]
        for part in self._parts:
            if isinstance(part, tuple):
                _run(start + part[0] * size, part[1] - part[0])
            else:
                part()

    def timed(self, repetitions: int) -> list[tuple[str, float]]:
        """Run so often; microseconds of CPU of each call in this thread, pauses left out."""
        self._close()
        spent = np.zeros(len(self._calls), np.int64)
        start, size = self._table.ctypes.data, self._table.strides[0]
        for _ in range(repetitions):
            for part in self._parts:
                if isinstance(part, tuple):
                    first, end = part
                    at = spent.ctypes.data + 8 * first
                    _time(start + first * size, end - first, at)
                else:
                    part()
        return list(zip(self._names, (spent / 1e3 / repetitions).tolist(), strict=True))
