"""The scheduler's time does not move when somebody sets the wall clock."""

from dataclasses import fields

import pytest

from deepmesh.wire.messages import StepKind
from services.scheduler.core.events import HandedOver, RequestEnded, StepEnded
from services.scheduler.steady_clock import TIMES, SteadyClock

DAY_NS = 86_400 * 10**9


class Clocks:
    """Both clocks of a machine."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 10**18, 10**12

    def pass_time(self, ns: int) -> None:
        self.wall += ns
        self.monotonic += ns


@pytest.mark.parametrize("set_by", [DAY_NS, -DAY_NS])
def test_setting_the_wall_clock_moves_reports_and_nothing_else(set_by: int) -> None:
    clocks = Clocks()
    clock = SteadyClock(lambda: clocks.wall, lambda: clocks.monotonic)
    clocks.pass_time(5)
    assert clock.now_ns() == clocks.wall
    step = StepEnded(
        7, StepKind.DECODE, 1, 1, planned_ns=100, applied_ns=300, begin_ns=150, end_ns=200
    )
    assert clock.on_wall(step) is step
    clocks.wall += set_by
    clocks.pass_time(10)
    assert clock.now_ns() == 10**18 + 15
    assert clock.stepped_ns() == set_by
    shifted = clock.on_wall(step)
    assert (shifted.planned_ns, shifted.applied_ns) == (100 + set_by, 300 + set_by)
    assert (shifted.begin_ns, shifted.end_ns) == (150, 200)  # the executor's own words
    assert shifted.ready_ns == 0  # never


def test_two_clocks_that_are_read_one_after_the_other_are_no_step() -> None:
    clocks = Clocks()
    clock = SteadyClock(lambda: clocks.wall, lambda: clocks.monotonic)
    clocks.wall += 20_000_000
    assert clock.stepped_ns() == 0


def test_every_time_of_a_report_is_known() -> None:
    executors_own = {"begin_ns", "end_ns"}
    for kind in (StepEnded, RequestEnded, HandedOver):
        named = {each.name for each in fields(kind) if each.name.endswith("_ns")}
        assert named - executors_own == set(TIMES[kind])
