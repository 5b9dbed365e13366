"""What `bench eplb` compares with: two ways to place experts that look less closely."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.experts import EMPTY, Places
from services.scheduler.core.expert_packing import pack, replicate
from services.scheduler.core.expert_places import copy_costs

Array = NDArray[np.float64]


def public_2025(counts: Array, ranks: int, slots: int, max_copies: int) -> Places:
    """Copies one by one to the largest share of the mean load; then heaviest first to the rank
    with the least load that has a slot, wherever the other copies of the expert are."""
    mean = counts.mean(0)
    copies = replicate(mean, max_copies, max_copies)
    shares = np.repeat(mean / copies, copies)
    owners = np.repeat(np.arange(len(mean)), copies)
    places = np.full((ranks, slots), EMPTY, np.int32)
    loads, used = np.zeros(ranks), np.zeros(ranks, np.int64)
    for item in np.argsort(-shares, kind="stable").tolist():
        rank = int(np.where(used < slots, loads, np.inf).argmin())
        places[rank, used[rank]] = owners[item]
        loads[rank] += shares[item]
        used[rank] += 1
    return places


def time_greedy(counts: Array, ranks: int, slots: int, max_copies: int) -> Places:
    """The same, but each copy goes to where the sum over all steps of the busiest rank's load
    grows least, and no rank gets two copies of an expert."""
    copies = replicate(counts.mean(0), ranks, max_copies)
    return pack(copy_costs(counts, copies, 0.0), copies, ranks, slots)
