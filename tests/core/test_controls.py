"""Pause, resume and drain are fields of a group step, in force behind it on all ranks."""

import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import (
    Drain,
    Failed,
    FinishReason,
    GroupFlag,
    Pause,
    Resume,
    RowMode,
    Shutdown,
    StepKind,
)
from services.scheduler.core.controls import DRAIN_WAIT_NS
from tests.core.driver import CONFIG, SECOND, Driver

OPERATOR = "operator"


def flags(driver: Driver) -> list[int]:
    return [step.descriptor.flags for step in driver.all_steps]


def settle(driver: Driver) -> None:
    """Everything that was submitted runs to its end, and nothing more comes."""
    driver.run(30)
    assert not driver.steps
    assert not driver.tails


def paused(driver: Driver) -> bool:
    return driver.core.stats().paused


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_more_step_says_so_to_all_ranks_and_nothing_follows_until_it_is_resumed(
    depth: int,
) -> None:
    driver = Driver(replace(CONFIG, depth=depth))
    request = driver.ask(20, max_tokens=12)
    for _ in range(4):
        driver.step()
    driver.mail(Pause(), OPERATOR)
    settle(driver)
    assert paused(driver)
    assert flags(driver)[-1] == GroupFlag.PAUSE
    assert sum(flags(driver)) == GroupFlag.PAUSE
    steps, output = len(driver.all_steps), len(request.output)
    assert 0 < output < 12
    driver.tick(seconds=5)
    assert len(driver.all_steps) == steps
    driver.mail(Resume(), OPERATOR)
    assert not paused(driver)
    driver.run()
    numbers = [step.group_step for step in driver.all_steps]
    assert numbers == list(range(1, len(numbers) + 1))
    driver.assert_clean()


def test_an_idle_group_is_paused_by_a_step_of_dummies() -> None:
    driver = Driver()
    driver.mail(Pause(), OPERATOR)
    driver.tick()
    (step,) = driver.steps
    assert (step.descriptor.kind, step.descriptor.flags) == (StepKind.DUMMY, GroupFlag.PAUSE)
    assert driver.rows()["mode"].tolist() == [RowMode.DUMMY]
    assert not paused(driver)  # its result is not there yet
    settle(driver)
    assert paused(driver)


def test_pause_and_resume_are_idempotent() -> None:
    driver = Driver()
    driver.ask(20, max_tokens=6)
    driver.mail(Resume(), OPERATOR)
    for _ in range(3):
        driver.mail(Pause(), OPERATOR)
        driver.tick()
    settle(driver)
    driver.mail(Pause(), OPERATOR)
    settle(driver)
    assert sum(flags(driver)) == GroupFlag.PAUSE
    for _ in range(2):
        driver.mail(Resume(), OPERATOR)
    driver.run()
    driver.assert_clean()


def test_a_pause_that_was_not_told_yet_is_taken_back() -> None:
    driver = Driver()
    driver.ask(20, max_tokens=6)
    driver.tick()  # as many steps as depth allows: the pause waits for its turn
    driver.mail(Pause(), OPERATOR)
    driver.mail(Resume(), OPERATOR)
    driver.run()
    assert set(flags(driver)) == {0}
    driver.assert_clean()


def test_requests_are_accepted_and_wait_and_aborts_work() -> None:
    driver = Driver()
    running = driver.ask(20, max_tokens=60)
    other = driver.ask(20, max_tokens=60)
    for _ in range(4):
        driver.step()
    driver.mail(Pause(), OPERATOR)
    settle(driver)
    queued, gone = driver.ask(10, max_tokens=4), driver.ask(10, max_tokens=4)
    driver.abort(running)
    driver.abort(gone)
    settle(driver)
    assert running.terminals[0].reason == FinishReason.ABORT  # type: ignore[union-attr]
    assert gone.terminals
    assert not queued.terminals
    assert not other.terminals
    driver.mail(Resume(), OPERATOR)
    driver.run()
    driver.assert_clean()


def test_a_pause_costs_nobody_his_deadline() -> None:
    driver = Driver(replace(CONFIG, deadline_s=10))
    request = driver.ask(20, max_tokens=60)
    for _ in range(4):
        driver.step()
    driver.tick(seconds=8)
    driver.mail(Pause(), OPERATOR)
    settle(driver)
    queued = driver.ask(10, max_tokens=4)
    driver.tick(seconds=60)
    driver.mail(Resume(), OPERATOR)
    driver.run()
    for each in (request, queued):
        assert not isinstance(each.terminals[0], Failed)
    driver.assert_clean()


def test_time_before_and_behind_the_pause_counts_on() -> None:
    driver = Driver(replace(CONFIG, deadline_s=10), load=False)
    request = driver.ask(20, max_tokens=60)
    driver.tick(seconds=6)
    driver.mail(Pause(), OPERATOR)
    driver.tick(seconds=60)
    driver.mail(Resume(), OPERATOR)
    driver.tick(seconds=3)
    assert not request.terminals
    driver.tick(seconds=2)
    assert isinstance(request.terminals[0], Failed)


def test_a_pause_outlives_its_engine() -> None:
    driver = Driver()
    driver.ask(20, max_tokens=12)
    for _ in range(4):
        driver.step()
    driver.mail(Pause(), OPERATOR)
    driver.tick()
    driver.lose_executor()
    driver.load()
    settle(driver)
    assert paused(driver)
    driver.lose_executor()
    assert paused(driver)
    driver.load()
    settle(driver)
    assert paused(driver)
    driver.mail(Resume(), OPERATOR)
    driver.run()
    driver.assert_clean()


def test_a_group_that_is_not_loaded_yet_holds_at_once() -> None:
    driver = Driver(load=False)
    driver.mail(Pause(), OPERATOR)
    assert paused(driver)
    driver.load()
    driver.ask(20, max_tokens=4)
    driver.tick()
    assert not driver.all_steps
    driver.mail(Resume(), OPERATOR)
    driver.run()
    driver.assert_clean()


def test_the_last_step_of_a_drain_says_so_before_the_replica_is_drained() -> None:
    driver = Driver()
    driver.ask(20, max_tokens=6)
    driver.step()
    driver.mail(Drain(), "")
    while not flags(driver)[-1]:
        driver.step()
        assert not driver.core.drained
    driver.tick()
    assert flags(driver)[-1] == GroupFlag.DRAIN
    settle(driver)
    assert driver.core.drained
    assert sum(flags(driver)) == GroupFlag.DRAIN
    driver.assert_clean()


def test_a_drain_ends_a_pause_when_nothing_is_left() -> None:
    driver = Driver()
    request = driver.ask(20, max_tokens=60)
    driver.step()
    driver.mail(Pause(), OPERATOR)
    settle(driver)
    driver.mail(Drain(deadline_s=5), "")
    settle(driver)
    assert not driver.core.drained  # it may be resumed before the deadline
    driver.tick(seconds=6)
    assert request.terminals
    settle(driver)
    assert driver.core.drained
    assert flags(driver)[-1] == GroupFlag.DRAIN


def test_executors_that_are_gone_or_silent_are_not_waited_for() -> None:
    gone = Driver()
    gone.lose_executor()
    gone.mail(Shutdown(), "")
    gone.tick()
    assert gone.core.drained
    silent = Driver()
    silent.ask(20, max_tokens=60)
    silent.tick()
    silent.mail(Shutdown(), "")
    silent.tick()
    assert not silent.core.drained
    silent.now += DRAIN_WAIT_NS - SECOND
    silent.tick()
    assert not silent.core.drained
    silent.tick(seconds=1)
    assert silent.core.drained
