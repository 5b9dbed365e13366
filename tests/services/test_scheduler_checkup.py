"""Looking at the invariants in production: when, at what cost, and what comes of a failure."""

import logging

import pytest
from msgspec.structs import replace

from services.scheduler.checkup import EVERY_STEPS, Checkup
from tests.core.driver import CONFIG, Driver


class Hand:
    """A clock that the test turns; every look at it takes a little."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.now, self.cost_s = 100.0, cost_s

    def __call__(self) -> float:
        self.now += self.cost_s
        return self.now


def break_it(driver: Driver) -> None:
    """A block that nobody holds is counted as held."""
    assert driver.core.engine is not None
    driver.core.engine.memories[0].pools[0].held[-1] += 1


def test_a_failure_at_idle_is_logged_and_counted_once_and_not_repaired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver()
    checkup = Checkup(driver.core, Hand())
    driver.ask(20)
    driver.run()
    checkup.look()
    assert checkup.num_failed == 0
    driver.ask(20)
    driver.run()
    break_it(driver)
    for _ in range(3):
        checkup.look()  # nothing happens in between
    assert checkup.num_failed == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "audit failed" in record.getMessage()
    assert "I7" in record.getMessage()
    assert driver.core.engine is not None
    assert driver.core.engine.memories[0].pools[0].held[-1] == 1


def test_under_load_it_looks_every_so_many_steps() -> None:
    driver = Driver()
    checkup = Checkup(driver.core, Hand())
    driver.ask(20, max_tokens=400)
    driver.step()
    break_it(driver)
    looked_at: list[int] = []
    while driver.core.registry.live:
        driver.core.group.group_step += 1  # as many steps, without running them
        failed = checkup.num_failed
        checkup.look()
        if checkup.num_failed > failed:
            looked_at.append(driver.core.group.group_step)
        if len(looked_at) == 3:
            break
    assert [b - a for a, b in zip([0, *looked_at], looked_at, strict=False)] == [EVERY_STEPS] * 3


def test_many_residents_are_looked_at_only_at_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.checkup.MAX_RESIDENTS", 1)
    driver = Driver()
    checkup = Checkup(driver.core, Hand())
    for _ in range(2):
        driver.ask(20)
    driver.step()
    break_it(driver)
    driver.core.group.group_step += EVERY_STEPS
    checkup.look()
    assert checkup.num_failed == 0
    driver.core.engine.memories[0].pools[0].held[-1] -= 1  # type: ignore[union-attr]
    driver.run()
    break_it(driver)
    checkup.look()
    assert checkup.num_failed == 1


def test_it_takes_no_more_than_its_share_of_the_time() -> None:
    driver = Driver()
    hand = Hand(cost_s=0.01)
    checkup = Checkup(driver.core, hand)
    looks, began = 0, hand.now
    for _ in range(30):
        driver.ask(5, max_tokens=2)
        driver.run()
        seen = checkup._seen
        checkup.look()
        looks += checkup._seen != seen
    assert 0 < looks <= 1 + (hand.now - began)
    hand.now += 10
    driver.ask(5, max_tokens=2)
    driver.run()
    seen = checkup._seen
    checkup.look()
    assert checkup._seen != seen


def test_where_every_event_is_audited_it_does_nothing() -> None:
    driver = Driver(replace(CONFIG, audit=True))
    checkup = Checkup(driver.core, Hand())
    driver.ask(20)
    driver.run()
    break_it(driver)
    checkup.look()
    assert checkup.num_failed == 0
