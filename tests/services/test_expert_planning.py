"""Plans of expert placements are made by a process beside the scheduler's."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from deepmesh.experts import first_places
from services.scheduler.core.expert_orders import PlanExperts, plan_experts
from services.scheduler.core.expert_planner import PlanOptions
from services.scheduler.expert_planning import ExpertPlanning


class Planning(ExpertPlanning):
    """Says when there is something to take."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        super().__init__(self.woken.release)


@pytest.fixture
def planning() -> Iterator[Planning]:
    planning = Planning()
    yield planning
    planning.close()


def order(number: int, *, max_copies: int = 10) -> PlanExperts:
    draw = np.random.default_rng(number)
    shares = np.arange(1, 9) ** -1.0 / (np.arange(1, 9) ** -1.0).sum()
    counts = np.stack([draw.multinomial(5000, draw.permutation(shares), 6) for _ in range(3)], 1)
    places = [first_places(8, 2, 5) for _ in range(3)]
    steps = np.full(6, 64, np.int64)
    return PlanExperts(number, counts, steps, places, PlanOptions(max_copies, ridge=16.0))


def test_the_process_plans_what_the_function_does(planning: Planning) -> None:
    asked = order(5)
    planning.start(asked)
    assert planning.woken.acquire(timeout=60)
    found, wanted = planning.take(), plan_experts(asked)
    assert found is not None
    assert found.number == 5
    assert [layer for layer, _ in found.layers] == [layer for layer, _ in wanted.layers]
    assert len(wanted.layers) >= 2
    for (_, ours), (_, theirs) in zip(found.layers, wanted.layers, strict=True):
        assert (ours == theirs).all()
    assert planning.take() is None, "once"


def test_a_plan_that_fails_is_an_empty_one(planning: Planning) -> None:
    wrong = order(6)
    wrong.counts.setflags(write=True)
    planning.start(PlanExperts(6, wrong.counts[:, :2], wrong.steps, wrong.places, wrong.options))
    assert planning.woken.acquire(timeout=60)
    found = planning.take()
    assert found is not None
    assert (found.number, found.layers) == (6, [])


def test_closing_ends_the_process(planning: Planning) -> None:
    planning.start(order(7))
    planning.close()
    found = planning.take()
    assert found is not None, "whoever asked is told that nothing comes"
    assert found.number == 7
    planning.start(order(8))
    assert planning.woken.acquire(timeout=60)
    assert planning.woken.acquire(timeout=60)
    found = planning.take()
    assert found is not None
    assert (found.number, len(found.layers) > 0) == (8, True)
