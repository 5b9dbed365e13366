"""Groups of 128 ranks: no rank that is slow, dead or idle stops the others.

With 16 rows each in `make long`; with 128, for 1,000 steps, by hand: `make large` (minutes each).
"""

from collections.abc import Callable
from functools import partial

import pytest

from services.scheduler.sim.capacity import read_table
from services.scheduler.sim.clock import MS, SECOND
from services.scheduler.sim.simulate import Outcome, Scenario, simulate
from services.scheduler.sim.traffic import arrivals
from services.scheduler.sim.world import World

RANKS = 128
COSTS = read_table().step_costs(RANKS)  # of the H200's table of kernels
SIZES = pytest.mark.parametrize(
    ("rows", "steps"),
    [
        pytest.param(16, 300, marks=[pytest.mark.long, pytest.mark.timeout(300)]),
        pytest.param(128, 1000, marks=[pytest.mark.large, pytest.mark.timeout(3600)]),
    ],
)


def run(rows: int, steps: int, utilisation: float, prepare: Callable[[World], None]) -> Outcome:
    scenario = Scenario(RANKS, rows, 5, steps=steps, costs=COSTS)
    requests = arrivals(
        "decode", seed=5, ranks=RANKS, rows=rows, costs=COSTS, utilisation=utilisation
    )
    outcome = simulate(scenario, requests, prepare=prepare)
    assert outcome.ok, outcome.errors[:1]
    assert outcome.audit_failures == 0
    assert len(outcome.record.spans) >= steps
    return outcome


def slow_down(rank: int, factor: float, world: World) -> None:
    world.executors[rank].slower = factor


def kill(rank: int, world: World) -> None:
    """Once in full swing, again while it is loading, and once more later."""
    for moment in (2 * SECOND, 2 * SECOND + 40 * MS, 8 * SECOND):
        world.clock.at(moment, partial(world.kill_executor, rank, 30 * MS))


@SIZES
def test_a_slow_rank_slows_every_step_and_stops_none(rows: int, steps: int) -> None:
    outcome = run(rows, steps, 0.6, partial(slow_down, 77, 3.0))
    busy = outcome.record.spans[-steps // 2].busy_ns
    assert max(busy) == busy[77]
    assert busy[77] > 2 * sorted(busy)[RANKS // 2]


@SIZES
def test_a_rank_that_dies_comes_back_and_every_request_ends_with_the_oracles_tokens(
    rows: int, steps: int
) -> None:
    worlds: list[World] = []

    def prepare(world: World) -> None:
        kill(120, world)
        worlds.append(world)

    run(rows, steps, 0.4, prepare)
    assert worlds[0].num_failed == 0
    assert worlds[0].core.group.engine_epoch >= 3


@SIZES
def test_ranks_without_requests_run_dummies(rows: int, steps: int) -> None:
    outcome = run(rows, steps, 0.5 / rows, lambda world: None)
    padded = [span.descriptor.padded_rows for span in outcome.record.spans]
    assert sorted(padded)[len(padded) // 2] <= 4  # most ranks have nothing most of the time
    assert outcome.figures["requests"] > RANKS // 4
