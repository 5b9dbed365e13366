"""Where the experts of a layer lie, copies in the slots of the ranks, and the load that follows."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from deepmesh.experts import EMPTY, Places

Array = NDArray[np.float64]


def check_places(places: Places, num_experts: int) -> None:
    """
    Raises:
        ValueError: an expert is nowhere, twice on one rank, or none at all.
    """
    if places.min() < EMPTY or places.max() >= num_experts:
        raise ValueError(f"experts are not within 0..{num_experts - 1}")
    missing = np.flatnonzero(copies_of(places, num_experts) == 0)
    if len(missing):
        raise ValueError(f"experts {missing[:8].tolist()} are on no rank")
    rows = np.sort(places, axis=1)
    if ((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] != EMPTY)).any():
        raise ValueError("a rank has two copies of one expert")


def copies_of(places: Places, num_experts: int) -> NDArray[np.int64]:
    """Copies of each expert."""
    return np.bincount(places[places != EMPTY], minlength=num_experts)


def membership(places: Places, num_experts: int) -> NDArray[np.bool_]:
    """[ranks, num_experts + 1]: whether a rank holds an expert; in the last column nobody's."""
    found = np.zeros((len(places), num_experts + 1), np.bool_)
    found[np.arange(len(places))[:, None], places] = True
    found[:, EMPTY] = False
    return found


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
    """Experts that each rank has to fetch to get from `before` to `after`."""
    new = membership(after, num_experts) & ~membership(before, num_experts)
    return new.sum(1)


def relabelled(before: Places, after: Places, num_experts: int) -> Places:
    """`after` with its ranks numbered so that many experts stay where they are: which rank is
    which makes no difference to the load."""
    shared = membership(after, num_experts).astype(np.float32)
    shared = shared @ membership(before, num_experts).T.astype(np.float32)
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
