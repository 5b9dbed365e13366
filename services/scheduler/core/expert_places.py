"""Where the experts of a layer lie, copies in the slots of the ranks, and the load that follows."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from deepmesh.experts import EMPTY, Places

Array = NDArray[np.float64]


def check_places(places: Places, num_experts: int) -> None:
    """
    Raises:
        ValueError: an expert is nowhere, or more often than there are ranks, or none at all.
    """
    if places.min() < EMPTY or places.max() >= num_experts:
        raise ValueError(f"experts are not within 0..{num_experts - 1}")
    missing = np.flatnonzero(copies_of(places, num_experts) == 0)
    if len(missing):
        raise ValueError(f"experts {missing[:8].tolist()} are on no rank")
    many = np.flatnonzero(copies_of(places, num_experts) > len(places))
    if len(many):
        raise ValueError(f"experts {many[:8].tolist()} have more copies than there are ranks")


def copies_of(places: Places, num_experts: int) -> NDArray[np.int64]:
    """Copies of each expert."""
    return np.bincount(places[places != EMPTY], minlength=num_experts)


def held_copies(places: Places, num_experts: int) -> Array:
    """[ranks, num_experts + 1]: copies of an expert on a rank; in the last column nobody's."""
    found = np.zeros((len(places), num_experts + 1))
    np.add.at(found, (np.arange(len(places))[:, None], places), 1.0)
    found[:, EMPTY] = 0.0
    return found


def without_idle(places: Places, num_experts: int) -> Places:
    """`places` without the further copies of experts that are on one rank only."""
    held, kept = held_copies(places, num_experts)[:, :-1], places.copy()
    for expert in np.flatnonzero((held.sum(0) > 1) & ((held > 0).sum(0) == 1)).tolist():
        kept.flat[np.flatnonzero(places == expert)[1:]] = EMPTY
    return kept


def copy_costs(loads: Array, copies: NDArray[np.int64], ridge: float) -> Array:
    """What each copy costs its rank, [points, experts], in rows; copies share rows equally.

    Args:
        loads: [points, experts]: mean rows of each expert in a step.
        ridge: rows of an expert beyond which arithmetic takes longer than reading its weights: a
            step reads an expert once if any row comes, and takes as long as `ridge` rows at least.
            0: rows alone count.
    """
    rows = loads / copies
    return rows if not ridge else np.maximum(rows, ridge * -np.expm1(-rows))


def rank_loads(places: Places, loads: Array, ridge: float = 0.0) -> Array:
    """[points, ranks]: the cost of a step on each rank, see `copy_costs`."""
    costs = copy_costs(loads, copies_of(places, loads.shape[1]), ridge)
    padded = np.concatenate((costs, np.zeros((len(costs), 1))), 1)
    return padded[:, places].sum(2)


def imbalance(places: Places, loads: Array, ridge: float = 0.0) -> float:
    """`moe_lb` over these points: the sum of the busiest rank's load over that of the mean."""
    by_rank = rank_loads(places, loads, ridge)
    mean = by_rank.mean(1).sum()
    return float(by_rank.max(1).sum() / mean) if mean else 1.0


def arrivals(before: Places, after: Places, num_experts: int) -> NDArray[np.int64]:
    """Copies that each rank has to fetch to get from `before` to `after`."""
    more = held_copies(after, num_experts) - held_copies(before, num_experts)
    return np.maximum(more, 0).sum(1).astype(np.int64)


def relabelled(before: Places, after: Places, num_experts: int) -> Places:
    """`after` with its ranks numbered so that many experts stay where they are: which rank is
    which makes no difference to the load."""
    shared = held_copies(after, num_experts) @ held_copies(before, num_experts).T
    placed = np.empty_like(after)
    for _ in range(len(after)):
        new, old = np.unravel_index(int(shared.argmax()), shared.shape)
        placed[old] = after[new]
        shared[new, :] = shared[:, old] = -1.0
    return placed


def settled(before: Places, after: Places) -> Places:
    """`after` with the slots of each rank in an order in which what stays does not move."""
    placed: list[list[int]] = []
    old_rows: list[list[int]] = before.tolist()
    new_rows: list[list[int]] = after.tolist()
    for old, new in zip(old_rows, new_rows, strict=True):
        comes = Counter(expert for expert in new if expert != EMPTY)
        stays = [False] * len(old)
        for slot, expert in enumerate(old):
            stays[slot] = comes[expert] > 0
            comes[expert] -= stays[slot]
        fill = iter([*comes.elements(), *[EMPTY] * len(old)])
        placed.append([old[slot] if stay else next(fill) for slot, stay in enumerate(stays)])
    return np.array(placed, np.int32).reshape(after.shape)
