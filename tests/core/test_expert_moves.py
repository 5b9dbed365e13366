"""Placements of experts: agreed on before the first step, moved layer by layer behind numbers."""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.experts import first_places, unpack_places
from deepmesh.wire.messages import ExpertsPlaced, PlaceExperts, Reset, Shutdown, SubmitStep
from deepmesh.wire.packed import ROW
from services.scheduler.core.events import (
    Event,
    ExecutorDown,
    ExecutorUp,
    Mail,
    Send,
    StepEnded,
    Tick,
)
from services.scheduler.core.expert_orders import ExpertsPlanned, PlanExperts, plan_experts
from services.scheduler.core.expert_places import check_places
from tests.core.ranks import CONFIG, ROOMY, Ranks, answer

LAYERS, EXPERTS, REDUNDANT = 2, 8, 2
RECORD = 2  # steps
MOVING = replace(
    CONFIG, experts_interval_s=1.0, experts_record_steps=RECORD, experts_window=8, depth=2
)
SECOND = 1_000_000_000


class Moving(Ranks):
    """Ranks with experts; orders wait until the test answers, unless `answers`."""

    def __init__(self, ranks: int = 2, config: SchedulerConfig = MOVING) -> None:
        self.orders: list[PlaceExperts] = []  # one of each, whatever the number of ranks
        self.plans: list[PlanExperts] = []
        self.resets = self.shutdowns = 0
        self.reports: list[StepEnded] = []
        self.answers, self.now = True, 1
        self.numbers: list[int] = []  # placements in force, step by step
        self.loads = np.ones((LAYERS, EXPERTS), np.uint32)
        capacity = replace(ROOMY, experts=(LAYERS, EXPERTS, REDUNDANT))
        super().__init__([capacity] * ranks, config)

    def feed(self, event: Event) -> None:
        """As the base does; orders and plans are kept."""
        ranks, orders = len(self.capacities), list[PlaceExperts]()
        steps: list[SubmitStep] = []
        for action in self.core.handle(event, self.now):
            match action:
                case Send(message=SubmitStep() as step):
                    steps.append(step)
                case Send(message=PlaceExperts() as order):
                    orders.append(order)
                case Send(message=Reset()):
                    self.resets += 1
                case Send(message=Shutdown()):
                    self.shutdowns += 1
                case PlanExperts():
                    self.plans.append(action)
                case StepEnded():
                    self.reports.append(action)
                case _:
                    pass
        self.waiting.extend(steps[at : at + ranks] for at in range(0, len(steps), ranks))
        self.numbers += [step.descriptor.placement for step in steps[::ranks]]
        for order in orders[::ranks]:
            self.orders.append(order)
            if self.answers:
                self.placed(order)

    def placed(self, order: PlaceExperts, ranks: range | None = None, error: str = "") -> None:
        """These ranks have their experts, or all."""
        for rank in ranks or range(len(self.capacities)):
            answer = ExpertsPlaced(order.engine_epoch, rank, order.number, error)
            self.feed(Mail(f"e-0-{rank}", answer))

    def pass_time(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)

    def answer_step(self) -> None:
        """The oldest step runs; ranks report the loads that the test has set."""
        for rank, step in enumerate(self.waiting.popleft()):
            rows = np.frombuffer(step.rows, ROW)
            result = answer(step, rank, rows[rows["rid"] > 0])
            is_record = step.group_step % RECORD == 0
            result = replace(
                result,
                expert_rows=np.array([30, 10] if rank else [10, 10], "<u4").tobytes(),
                expert_loads=self.loads.astype("<u4").tobytes() if is_record else b"",
            )
            self.feed(Mail(f"e-0-{rank}", result))

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.feed(Tick())
            assert self.waiting, "no step was planned"
            self.answer_step()


def decoding(mesh: Moving) -> Moving:
    for number in range(2):
        mesh.ask([number + 1] * 20, max_tokens=400)
    return mesh


def plan_of(mesh: Moving) -> PlanExperts:
    """Records are made until a plan is asked for."""
    mesh.loads[:] = 1
    mesh.loads[:, 0] = 90
    mesh.pass_time(2)
    for _ in range(20):
        mesh.run_steps(1)
        mesh.feed(Tick())
        if mesh.plans:
            return mesh.plans[-1]
    raise AssertionError("no plan was asked for")


def test_no_step_runs_before_all_ranks_have_the_placement() -> None:
    mesh = decoding(_silent(3))
    mesh.feed(Tick())
    assert not mesh.waiting
    order = mesh.orders[0]
    first = first_places(EXPERTS, 3, 4)
    assert [layer for layer, _ in order.layers] == [0, 1]
    assert all((unpack_places(data, 3) == first).all() for _, data in order.layers)
    mesh.placed(order, range(0, 2))
    mesh.feed(Tick())
    assert not mesh.waiting
    mesh.placed(order, range(2, 3))
    mesh.run_steps(3)
    assert set(mesh.numbers) == {order.number}


def _silent(ranks: int) -> Moving:
    """Nobody answers orders by itself."""

    class Silent(Moving):
        def placed(self, order: PlaceExperts, ranks: range | None = None, error: str = "") -> None:
            if ranks is not None:
                super().placed(order, ranks, error)

    return Silent(ranks)


def test_a_group_that_is_not_balanced_is_never_asked() -> None:
    mesh = decoding(Moving(2, CONFIG))
    mesh.run_steps(4)
    assert mesh.orders == []
    assert set(mesh.numbers) == {0}


def test_layers_move_one_after_the_other_while_steps_go_on() -> None:
    mesh = decoding(Moving())
    (first,) = mesh.orders
    plan = plan_of(mesh)
    assert plan.counts.shape[1:] == (LAYERS, EXPERTS)
    assert plan.counts[-1, 0, 0] == 2 * 90, "both ranks' rows"
    assert (plan.steps == RECORD).all()
    mesh.answers = False
    mesh.feed(plan_experts(plan))
    moved: list[int] = []
    for number in range(1, 1 + LAYERS):
        order = mesh.orders[number]
        ((layer, data),) = order.layers
        moved.append(layer)
        check_places(unpack_places(data, 2), EXPERTS)
        before = mesh.numbers[-1]
        mesh.run_steps(3)  # nobody waits for it
        assert mesh.numbers[-1] == before == order.base
        mesh.placed(order, range(0, 1))
        mesh.run_steps(1)
        assert mesh.numbers[-1] == before, "one rank has not got its experts"
        mesh.placed(order, range(1, 2))
        mesh.run_steps(1)
        assert mesh.numbers[-1] == order.number
    assert sorted(moved) == [0, 1]
    stats = mesh.core.stats().experts
    assert stats.placements == LAYERS
    assert stats.moves >= LAYERS
    assert first.number < mesh.orders[1].number < mesh.orders[2].number
    assert mesh.reports[-1].placement in {order.number for order in mesh.orders}


def test_a_group_without_work_takes_the_rest_of_a_plan_with_its_next_step() -> None:
    mesh = Moving()
    mesh.ask([1] * 20, max_tokens=60)
    plan = plan_of(mesh)
    mesh.run()
    mesh.feed(plan_experts(plan))
    for _ in range(4):
        mesh.feed(Tick())
    assert len(mesh.orders) == 1 + LAYERS
    assert [order.base for order in mesh.orders[1:]] == [o.number for o in mesh.orders[:-1]]
    mesh.ask([2] * 20)
    mesh.run_steps(1)
    assert mesh.numbers[-1] == mesh.orders[-1].number


def test_a_new_engine_epoch_begins_where_the_one_before_was() -> None:
    mesh = decoding(Moving())
    plan = plan_of(mesh)
    mesh.feed(plan_experts(plan))
    mesh.run_steps(4)
    changed = {layer: data for order in mesh.orders for layer, data in order.layers}
    in_force = mesh.numbers[-1]
    mesh.waiting.clear()
    mesh.feed(ExecutorDown("e-0-1", 1))
    mesh.feed(ExecutorUp("e-0-1", 1))
    epoch = mesh.core.group.engine_epoch
    capacity = replace(mesh.capacities[1], rank=1, engine_epoch=epoch)
    mesh.answers = False
    mesh.feed(Mail("e-0-1", capacity))
    order = mesh.orders[-1]
    assert (order.engine_epoch, dict(order.layers), order.base) == (epoch, changed, 0)
    assert order.number > in_force
    mesh.feed(Tick())
    assert not mesh.waiting
    old = replace(order, engine_epoch=epoch - 1)
    mesh.placed(old)
    mesh.feed(Tick())
    assert not mesh.waiting, "an answer of the epoch before"
    mesh.placed(order)
    mesh.run_steps(2)
    assert mesh.numbers[-1] == order.number


def test_a_rank_that_cannot_fetch_ends_the_plan_and_not_the_group() -> None:
    mesh = decoding(Moving())
    plan = plan_of(mesh)
    mesh.answers = False
    mesh.feed(plan_experts(plan))
    order, before = mesh.orders[-1], mesh.numbers[-1]
    mesh.placed(order, range(0, 1))
    mesh.placed(order, range(1, 2), error="the disk is gone")
    mesh.run_steps(4)
    assert mesh.numbers[-1] == before
    assert len(mesh.orders) == 2
    assert not mesh.shutdowns


@pytest.mark.parametrize("error", ["the disk is gone", ""])
def test_a_rank_that_cannot_begin_is_replaced(error: str) -> None:
    mesh = _silent(2)
    mesh.placed(mesh.orders[0], range(0, 1))
    if error:
        mesh.placed(mesh.orders[0], range(1, 2), error=error)
    else:
        mesh.pass_time(300)
        mesh.feed(Tick())
    assert mesh.shutdowns == 1


def test_a_plan_that_comes_too_late_changes_nothing() -> None:
    mesh = decoding(Moving())
    plan = plan_of(mesh)
    mesh.feed(ExpertsPlanned(plan.number - 1, [(0, plan.places[0])]))
    assert len(mesh.orders) == 1
    mesh.waiting.clear()
    mesh.feed(ExecutorDown("e-0-1", 1))
    mesh.feed(plan_experts(plan))
    assert len(mesh.orders) == 1


def test_the_balance_of_each_step_is_counted() -> None:
    mesh = decoding(Moving())
    mesh.run_steps(5)
    stats = mesh.core.stats().experts
    assert (stats.busiest_rows, stats.mean_rows) == (5 * 40, 5 * 30.0)
    assert stats.steps == [5, 0, 0, 0, 5, 0, 0, 0], "10 and 10; 30 and 10: 1.5"
    assert sum(stats.loads) == 2 * LAYERS * EXPERTS
