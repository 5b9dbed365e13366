"""Placements of experts: always valid, never worse than what was there, no idle moves."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepmesh.experts import EMPTY, Places, first_places, slots_of
from services.scheduler.core.expert_packing import pack, pack_lightest, replicate
from services.scheduler.core.expert_places import (
    arrivals,
    check_places,
    copies_of,
    copy_costs,
    imbalance,
    rank_loads,
    settled,
)
from services.scheduler.core.expert_planner import PlanOptions, lower_bound, plan_layer
from services.scheduler.core.expert_points import Points, trend, typical_steps
from services.scheduler.core.expert_refine import Refinement

Counts = NDArray[np.float64]


@st.composite
def groups(draw: st.DrawFn) -> tuple[Counts, int, int]:
    """Counted rows, ranks, and redundant copies: any numbers that fit."""
    num_experts = draw(st.integers(1, 40))
    ranks = draw(st.integers(1, num_experts))
    redundant = draw(st.integers(0, 2 * ranks))
    seed, records = draw(st.integers(0, 1 << 30)), draw(st.integers(1, 12))
    skew, rows = draw(st.floats(0, 2)), draw(st.sampled_from([0, 3, 200, 50_000]))
    random = np.random.default_rng(seed)
    shares = random.permutation(np.arange(1, num_experts + 1) ** -skew)
    counts = random.multinomial(rows, shares / shares.sum(), records).astype(np.float64)
    return counts, ranks, redundant


@settings(max_examples=60, deadline=None)
@given(groups(), st.sampled_from([0.0, 1.0, 64.0]), st.floats(0, 0.05))
def test_a_plan_is_valid_and_not_worse_than_what_was_there(
    group: tuple[Counts, int, int], ridge: float, move_cost: float
) -> None:
    counts, ranks, redundant = group
    num_experts = counts.shape[1]
    slots = slots_of(num_experts, ranks, redundant)
    options = PlanOptions(num_experts + redundant, ridge, move_cost, max_steps=90)
    places, points = first_places(num_experts, ranks, slots), typical_steps(counts, 4)
    for _ in range(2):
        before, plan = places, plan_layer(points, places, options)
        places = plan.places
        check_places(places, num_experts)
        assert places.shape == (ranks, slots)
        assert (places != EMPTY).sum() <= num_experts + redundant
        assert plan.moves == arrivals(before, places, num_experts).sum()
        peaks = [_peak(points, at, ridge) for at in (before, places)]
        assert peaks[1] + move_cost * plan.moves <= peaks[0] + 0.1 * max(peaks)  # SPREAD, at most
        if not ridge:
            assert peaks[1] >= lower_bound_of(points, places, options) - 1e-6
        stays = before == places
        moved = arrivals(before, places, num_experts)
        assert ((~stays & (places != EMPTY)).sum(1) <= moved).all(), "moved within its rank"


def _peak(points: Points, places: Places, ridge: float) -> float:
    by_rank = rank_loads(places, points.loads, ridge)
    unit = copy_costs(points.loads, np.ones(points.loads.shape[1], np.int64), ridge)
    mean = (points.weights @ unit.sum(1)) / len(places)
    return float(points.weights @ by_rank.max(1)) / mean if mean else 0.0


def lower_bound_of(points: Points, places: Places, options: PlanOptions) -> float:
    mean = (points.weights @ points.loads)[None]
    if not mean.any():
        return 0.0
    ranks, slots = places.shape
    return lower_bound(mean, ranks, slots, options.max_copies)


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(0, 1 << 30))
def test_refining_never_raises_the_score(group: tuple[Counts, int, int], seed: int) -> None:
    counts, ranks, redundant = group
    num_experts = counts.shape[1]
    slots, total = slots_of(num_experts, ranks, redundant), num_experts + redundant
    weights = np.random.default_rng(seed).random(num_experts)
    copies = replicate(weights, ranks, min(total, ranks * slots))
    start = pack(weights[None] / copies, copies, ranks, slots)
    check_places(start, num_experts)
    points = typical_steps(counts + 1e-9, 3)
    search = Refinement(points, start, max_copies=total, home=start, move_cost=0.01)
    last = search.score
    for _ in range(6):
        search.run(5)
        assert search.score <= last + 1e-12
        last = search.score
        check_places(search.places, num_experts)
        fresh = Refinement(points, search.places, max_copies=total, home=start, move_cost=0.01)
        assert fresh.score == pytest.approx(last, rel=1e-9), "the books do not fit the placement"


@settings(max_examples=60, deadline=None)
@given(groups())
def test_the_public_placement_is_mended_where_it_puts_two_copies_on_a_rank(
    group: tuple[Counts, int, int],
) -> None:
    counts, ranks, redundant = group
    num_experts, mean = counts.shape[1], counts.mean(0)
    slots = slots_of(num_experts, ranks, redundant)
    copies = replicate(mean, ranks, min(num_experts + redundant, ranks * slots))
    places = pack_lightest(mean / copies, copies, ranks, slots)
    check_places(places, num_experts)
    assert (copies_of(places, num_experts) <= copies).all()


def test_the_lightest_rank_gets_the_next_copy_unless_it_has_one() -> None:
    costs, copies = np.array([9.0, 5.0, 4.0, 1.0]), np.array([2, 1, 1, 2])
    assert pack_lightest(costs, copies, 2, 3).tolist() == [[0, 1, 3], [0, 2, 3]]
    twice = pack_lightest(np.array([1.0, 1.0]), np.array([2, 2]), 2, 3)
    assert twice.tolist() == [[0, 1, EMPTY], [0, 1, EMPTY]]


@settings(max_examples=40, deadline=None)
@given(groups())
@example((np.ones((1, 1)), 1, 0))
def test_what_stays_keeps_its_slot(group: tuple[Counts, int, int]) -> None:
    counts, ranks, redundant = group
    num_experts = counts.shape[1]
    slots = slots_of(num_experts, ranks, redundant)
    before = first_places(num_experts, ranks, slots)
    after = np.sort(before, axis=1)[:, ::-1].copy()  # the same experts, elsewhere on their ranks
    assert (settled(before, after) == before).all()
    assert not arrivals(before, after, num_experts).any()


def test_a_move_that_does_not_pay_is_not_made() -> None:
    loads = np.array([[30.0, 10.0, 10.0, 10.0]])
    points, start = Points(loads, np.ones(1)), np.array([[0, 1], [2, 3]], np.int32)
    full = plan_layer(points, start, PlanOptions(4))
    assert full.places.tolist() == start.tolist(), "40 against 20 is the best there is"
    wide = np.array([[0, 1, EMPTY], [2, 3, EMPTY]], np.int32)
    plan = plan_layer(points, wide, PlanOptions(5))
    assert (plan.moves, copies_of(plan.places, 4).tolist()) == (1, [1, 1, 1, 1])
    assert imbalance(plan.places, loads) < imbalance(wide, loads)
    for options in (PlanOptions(5, move_cost=0.5), PlanOptions(5, hysteresis=0.5)):
        assert plan_layer(points, wide, options).moves == 0


def test_experts_that_are_hot_together_are_kept_apart() -> None:
    """The mean says that all are alike."""
    day, night = [9.0, 9.0, 1.0, 1.0], [1.0, 1.0, 9.0, 9.0]
    counts = np.array([day, night] * 40) * 1000
    start = first_places(4, 2, 2)
    assert imbalance(start, counts) == pytest.approx(1.8)
    plan = plan_layer(typical_steps(counts, 4), start, PlanOptions(4))
    assert imbalance(plan.places, counts) == pytest.approx(1.0)
    blind = plan_layer(typical_steps(counts, 1), start, PlanOptions(4))
    assert blind.moves == 0


def test_decode_balances_experts_read_and_prefill_rows() -> None:
    """Two experts with many rows take as long as two with two, while reading is what takes time."""
    loads = np.array([[40.0, 40.0, 3.0, 3.0, 0.01, 0.01]])
    points, start = Points(loads, np.ones(1)), np.array([[0, 4, 5], [1, 2, 3]], np.int32)
    reads = plan_layer(points, start, PlanOptions(6, ridge=64.0)).places
    read = -np.expm1(-loads[0])
    sums = sorted(float(read[experts].sum()) for experts in reads)
    assert sums[1] - sums[0] < 0.1
    rows = plan_layer(points, np.array([[0, 1, 2], [3, 4, 5]], np.int32), PlanOptions(6)).places
    assert imbalance(rows, loads) < 1.01


def test_noise_is_not_planned_for_and_a_trend_is_followed() -> None:
    random = np.random.default_rng(3)
    shares = np.arange(1, 33) ** -0.8 / (np.arange(1, 33) ** -0.8).sum()
    even = random.multinomial(4000, shares, 64).astype(np.float64)
    assert len(typical_steps(even, 8).weights) == 1
    assert (trend(even) == 1.0).all()
    grows = np.linspace(0.5, 1.5, 64)[:, None] * np.where(np.arange(32) < 4, 1.0, 0.0) + 1.0
    drifted = np.stack([random.multinomial(4000, row / row.sum()) for row in shares * grows])
    factor = trend(drifted.astype(np.float64))
    assert factor[0, :4].min() > 1.15
    assert factor[0, 8:].max() < 1.0, "their share falls"
    assert factor[-1] == pytest.approx(np.ones(32), abs=0.05), "that is where they are now"
    assert len(typical_steps(drifted.astype(np.float64), 8).weights) == 1


def test_wrong_placements_are_named() -> None:
    for places, words in (
        ([[0, 1], [2, EMPTY]], "experts .3. are on no rank"),
        ([[0, 0], [1, 2]], "two copies|on no rank"),
        ([[0, 7], [1, 2]], "not within 0..3"),
        ([[0, 1, 1], [2, 3, EMPTY]], "two copies"),
    ):
        with pytest.raises(ValueError, match=words):
            check_places(np.array(places, np.int32), 4)
