"""Where one long prompt's chunk is cut into a part for each rank: at equal sums of work."""

import numpy as np
from numpy.typing import NDArray


def cut(
    work: NDArray[np.int64] | NDArray[np.float64], start: int, ranks: int, *, least: int, align: int
) -> list[int]:
    """Positions that bound the parts of a chunk that begins at `start`: `ranks` + 1 of them.

    Cuts lie where the work before them is nearest to its share.

    Args:
        work: of each token of the chunk.
        least: tokens that each part must have (the window, which its neighbour needs).
        align: positions between which the chunk may be cut are multiples of this.
    Raises:
        ValueError: the chunk is too short for so many parts.
    """
    end = start + len(work)
    before = np.concatenate((np.zeros(1, work.dtype), np.cumsum(work)))
    bounds = [start]
    for rank in range(1, ranks):
        wanted = before[-1] * rank / ranks
        places = np.arange(start // align * align + align, end, align)
        places = places[(places >= bounds[-1] + least) & (places <= end - least * (ranks - rank))]
        if not len(places):
            raise ValueError(f"{len(work)} tokens are too few for {ranks} parts of {least}")
        bounds.append(int(places[np.abs(before[places - start] - wanted).argmin()]))
    return [*bounds, end]
