"""Drafts in the simulator: verify budgets, tiers, preemption, grammars and faults, at random."""

import itertools
from collections import Counter

import pytest

from services.scheduler.sim.soak import draw_world
from services.scheduler.sim.world import World

FEW = 10  # worlds of `make test`


def worlds_with_drafts(first: int, count: int, faults: int) -> list[World]:
    """Worlds of one or two ranks whose executors draft."""
    found = (draw_world(seed, faults=faults, ranks=1 + seed % 2) for seed in itertools.count(first))
    return list(itertools.islice((w for w in found if drafts(w)), count))


def drafts(world: World) -> bool:
    """Whether its executors draft."""
    return world.executors[0].device.capacity.draft_len > 0


def run_all(first: int, count: int, faults: int) -> Counter[str]:
    """Every world keeps to the oracle, shadow KV and audits; what happened in all of them."""
    seen: Counter[str] = Counter()
    for world in worlds_with_drafts(first, count, faults):
        world.run()
        world.verify()
        stats = world.core.stats()
        seen["verified"] += sum(stats.verified_drafts)
        seen["accepted"] += sum(stats.accepted_drafts)
        seen["skipped"] += stats.drafts.skipped_steps
        seen["preempted"] += stats.preemptions
        seen["null rows"] += stats.null_rows
        seen["trimmed"] += sum(each.device.trimmed_drafts for each in world.executors)
    return seen


def assert_all_seen(seen: Counter[str]) -> None:
    for what in ("verified", "accepted", "skipped", "preempted", "null rows", "trimmed"):
        assert seen[what] > 0, f"no run had any: {what}"
    assert seen["accepted"] < seen["verified"]


def test_random_runs_with_drafts_and_budgets_are_clean() -> None:
    assert_all_seen(run_all(3000, FEW, faults=0))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_random_runs_with_drafts_are_clean(part: int) -> None:
    """In ten parts; some of the worlds lose processes, links and messages as well."""
    calm = run_all(5000 + 100 * part, 15, faults=0)
    assert_all_seen(calm + run_all(7000 + 100 * part, 5, faults=3))
