"""Slots of routed experts: what scheduler and executors have to agree on."""

import numpy as np
from numpy.typing import NDArray

EMPTY = -1
Places = NDArray[np.int32]  # of a layer, [ranks, slots]: the expert in each slot, or EMPTY


def slots_of(num_experts: int, ranks: int, redundant: int) -> int:
    """Slots of a rank that hold all experts and `redundant` further copies."""
    return -(-(num_experts + redundant) // ranks)


def first_places(num_experts: int, ranks: int, slots: int) -> Places:
    """Before anything is known: each expert once, in order, sizes of ranks differ by at most one;
    further slots hold nothing."""
    places = np.full((ranks, slots), EMPTY, np.int32)
    for rank in range(ranks):
        start, end = rank * num_experts // ranks, (rank + 1) * num_experts // ranks
        places[rank, : end - start] = np.arange(start, end)
    return places


def pack_places(places: Places) -> bytes:
    """As the wire has them."""
    return places.astype("<i4").tobytes()


def unpack_places(data: bytes, ranks: int) -> Places:
    """
    Raises:
        ValueError: they are not those of so many ranks.
    """
    return np.frombuffer(data, "<i4").astype(np.int32).reshape(ranks, -1)
