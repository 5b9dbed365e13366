"""The simulator's 63-bit hash, for one value and for arrays."""

import numpy as np
from numpy.typing import NDArray

ROOT = 0x5EED
_MASK = (1 << 63) - 1
_WORD = (1 << 64) - 1
_GOLD, _ADD = 0x9E3779B97F4A7C15, 0x632BE59BD9B4E019
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(state: int, value: int) -> int:
    """One step of the hash (the finaliser of splitmix64)."""
    x = (state * _GOLD + value + _ADD) & _WORD
    x = ((x ^ (x >> 30)) * _FIRST) & _WORD
    x = ((x ^ (x >> 27)) * _SECOND) & _WORD
    return (x ^ (x >> 31)) & _MASK


def mix_many(
    states: NDArray[np.int64], values: NDArray[np.uint64] | NDArray[np.int64]
) -> NDArray[np.int64]:
    """`mix` of each pair; values are taken modulo 2**64."""
    x = states.astype(np.uint64) * np.uint64(_GOLD) + values.astype(np.uint64) + np.uint64(_ADD)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(_MASK)).astype(np.int64)
