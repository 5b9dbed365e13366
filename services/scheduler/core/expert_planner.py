"""Which expert goes where: plans a layer from the loads of a window of steps. Pure."""

from dataclasses import dataclass

import numpy as np

from deepmesh.experts import Places

from .expert_packing import pack, pack_lightest, replicate
from .expert_places import Array, arrivals, copy_costs, rank_loads, relabelled, settled
from .expert_points import Points
from .expert_refine import Refinement

FAR = 1.3  # times the bound: a placement that is worse is not worth mending
GOOD_ENOUGH = 1.008  # times the bound: mended so well, nothing else is tried
STARTS = 3  # fresh placements that are refined, at most
CLOSE = 1.05  # times the peak of the best fresh placement: a worse one is not refined
COPIES_PACKED = 200  # of all placements packed one way, where these are several


@dataclass(frozen=True)
class Plan:
    """A placement of one layer, and what it is expected to bring."""

    places: Places
    peak: float  # the busiest rank's load, in mean loads
    peak_before: float  # that of the placement so far
    moves: int  # experts that ranks have to fetch


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may do, and how hard it tries."""

    max_copies: int  # of all experts together
    ridge: float = 0.0  # see `copy_costs`
    move_cost: float = 0.0  # of one expert, in the peak that it has to gain
    hysteresis: float = 0.0  # a new placement must gain more than that beside its moves
    max_steps: int = 340  # ranks looked at
    good: float = 1.001  # times the bound: better is not looked for


def lower_bound(loads: Array, ranks: int, slots: int, max_copies: int) -> float:
    """No placement with equal shares has a smaller mean over the points of the busiest rank's
    rows, in mean rows: one for the mean loads, or the mean of those of the points.

    The hottest copy weighs at least `h`; then its rank has further slots to fill, too, as far as
    there are fewer empty ones, with the coldest experts at best.
    """
    scaled = loads * (ranks / np.maximum(loads.sum(1, keepdims=True), 1e-30))
    points = [_bound(row, ranks, slots, max_copies) for row in scaled]
    return max(_bound(scaled.mean(0), ranks, slots, max_copies), float(np.mean(points)))


def _bound(weights: Array, ranks: int, slots: int, max_copies: int) -> float:
    """See `lower_bound`; weights [experts], sum `ranks`."""
    least = least_share(weights, ranks, max_copies)
    cold = np.concatenate(([0.0], np.cumsum(np.sort(weights))))
    shares = np.unique(np.sort(weights)[::-1][:ranks, None] / np.arange(1, ranks + 1))
    best = np.inf
    for share in (least * (1 + 1e-6), *shares[shares > least].tolist()):
        needed = _copies_for(weights, share)
        if share >= best or needed > max_copies:
            break
        companions = min(max(0, slots - 1 - (ranks * slots - needed)), len(weights))
        best = min(best, share + float(cold[companions]) / (1 + max_copies - needed))
    return max(1.0, best)


def least_share(weights: Array, ranks: int, max_copies: int) -> float:
    """The least weight of the hottest copy, of experts that have at most one copy on a rank."""
    low, high = float(weights.max()) / ranks, float(weights.max())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _copies_for(weights, middle) <= max_copies else (middle, high)
    return low


def _copies_for(weights: Array, share: float) -> int:
    """Copies that are needed so that none is heavier than `share`."""
    return int(np.maximum(np.ceil(weights / share - 1e-9), 1).sum())


def plan_layer(points: Points, current: Places, options: PlanOptions) -> Plan:
    """The placement to be used from now on: the current one, unless another gains more than its
    moves cost.

    Args:
        points: typical steps of a window.
        current: where they are; its shape is the number of ranks, and of slots of each.
    """
    ranks, slots = current.shape
    kept = _refine(points, current, current, options, max_steps=0)
    if not points.loads.any():
        return Plan(current, kept.peak, kept.peak, 0)
    bound = 1.0
    if not options.ridge:
        mean = points.weights @ points.loads
        bound = max(1.0, least_share(mean * (ranks / mean.sum()), ranks, options.max_copies))
    good = options.good * bound
    steps = options.max_steps // (1 if len(points.weights) == 1 else 2)  # that take longer
    if kept.peak <= good:
        return Plan(current, kept.peak, kept.peak, 0)
    found: list[Refinement] = []
    if kept.peak < FAR * bound:
        found.append(_refine(points, current, current, options, max_steps=steps // 2, good=good))
    if not found or found[0].peak > GOOD_ENOUGH * bound:
        for places in _afresh(points, ranks, slots, options):
            start = relabelled(current, places, points.loads.shape[1])
            found.append(_refine(points, start, current, options, max_steps=steps, good=good))
            if found[-1].peak <= GOOD_ENOUGH * bound:
                break
    best = min(found, key=lambda refined: refined.score)
    if kept.score - best.score <= options.hysteresis:
        return Plan(current, kept.peak, kept.peak, 0)
    places = _closest(current, best.places, points.loads.shape[1])
    moves = int(arrivals(current, places, points.loads.shape[1]).sum())
    return Plan(places, best.peak, kept.peak, moves)


def _closest(current: Places, found: Places, num_experts: int) -> Places:
    """`found`, with ranks numbered and slots ordered so that few experts move."""
    same = (found, relabelled(current, found, num_experts))
    fewest = min(same, key=lambda places: int(arrivals(current, places, num_experts).sum()))
    return settled(current, fewest)


def _afresh(points: Points, ranks: int, slots: int, options: PlanOptions) -> list[Places]:
    """Packed without a look at what is there, as the public algorithm does, by the mean, and
    by all points; those that are about as good as the best, which is the first.

    Fewer copies than there may be are tried, too, where that takes no time: they need not be
    beside one another's. And where reading an expert takes time, each may be one more to read.
    """
    ridge, mean = options.ridge, points.weights @ points.loads
    most = min(options.max_copies, ranks * slots)
    found: list[tuple[float, int, Places]] = []
    for total in _totals(len(mean), most, ridge):
        copies = replicate(mean, ranks, total)
        costs = copy_costs(mean[None], copies, ridge)[0]
        lightest = pack_lightest(costs, copies, ranks, slots)
        copies = replicate(np.sqrt(points.weights @ points.loads**2), ranks, total)
        costs = copy_costs(points.loads, copies, ridge) * points.weights[:, None]
        for places in (pack(costs, copies, ranks, slots), lightest):
            peak = points.weights @ rank_loads(places, points.loads, ridge).max(1)
            found.append((float(peak), len(found), places))
    found.sort(key=lambda tried: tried[:2])
    return [places for peak, _, places in found[:STARTS] if peak <= CLOSE * found[0][0]]


def _totals(num_experts: int, most: int, ridge: float) -> list[int]:
    """Copies of all experts together that are tried, the most first."""
    fewer = range(most - 1, num_experts - 1, -1)[: max(0, COPIES_PACKED // most - 1)]
    found = {most, *fewer}
    if ridge:
        found |= {num_experts, (num_experts + most) // 2}
    return sorted(found, reverse=True)


def _refine(
    points: Points,
    start: Places,
    home: Places,
    options: PlanOptions,
    *,
    max_steps: int,
    good: float = 1.0,
) -> Refinement:
    search = Refinement(
        points,
        start,
        max_copies=options.max_copies,
        ridge=options.ridge,
        home=home,
        move_cost=options.move_cost,
    )
    search.run(max_steps, good)
    return search
