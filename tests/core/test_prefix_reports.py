"""What routers learn of resumable points: all of them, and then every change."""

import random

import numpy as np

from deepmesh.prefix_hash import HASH_BYTES, extend_chain, root_hash
from deepmesh.wire.messages import FlushCache, PrefixEvents
from services.scheduler.core import prefix_reports
from services.scheduler.core.events import RouterDown, RouterUp
from tests.core.driver import Driver, words

PERIOD_S = prefix_reports.PERIOD_NS / 1e9


class Ear:
    """A router that keeps what it is told."""

    def __init__(self, driver: Driver, name: str = "router-0") -> None:
        self.points: set[bytes] = set()
        self.name = name
        self._driver = driver
        self._seen = len(driver.sent)

    def listen(self) -> list[PrefixEvents]:
        """What came since the last call."""
        sent = self._driver.sent
        mail = [s.message for s in sent[self._seen :] if s.peer == self.name]
        self._seen = len(sent)
        events = [message for message in mail if isinstance(message, PrefixEvents)]
        for event in events:
            self.points = set() if event.first else self.points
            self.points |= set(hashes(event.added))
            self.points -= set(hashes(event.dropped))
        return events


def hashes(packed: bytes) -> list[bytes]:
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def findable(driver: Driver) -> set[bytes]:
    assert driver.core.engine is not None
    keys = driver.core.engine.memories[0].index.points
    return {key for key in keys if len(key) == HASH_BYTES}


def test_a_router_that_comes_is_told_all_and_then_what_changes() -> None:
    driver = Driver()
    driver.ask(60, max_tokens=2)
    driver.run()
    ear = Ear(driver)
    driver.feed(RouterUp("router-0"))
    driver.tick()
    (event,) = ear.listen()
    assert (event.first, event.fingerprint) == (True, "weights")
    assert (event.block_size, event.chunk_align) == (8, 16)
    assert ear.points == findable(driver) != set()

    driver.ask(40, max_tokens=2)
    driver.run()
    driver.tick(seconds=PERIOD_S)
    events = ear.listen()
    assert events
    assert not any(event.first for event in events)
    assert ear.points == findable(driver)


def test_a_point_has_the_name_that_the_prompt_s_hashes_give() -> None:
    driver = Driver()
    ear = Ear(driver)
    driver.feed(RouterUp("router-0"))
    prompt = words(60)
    driver.ask(prompt, max_tokens=2, salt=b"tenant")
    driver.run()
    driver.tick(seconds=PERIOD_S)
    (first, *_) = ear.listen()
    chain: list[bytes] = []
    root = root_hash(b"tenant", first.fingerprint)
    extend_chain(chain, root, np.array(prompt, np.int32), first.block_size, 48)
    assert chain[-1] in ear.points


def test_nothing_is_noted_or_sent_without_a_router() -> None:
    driver = Driver()
    driver.ask(60, max_tokens=2)
    driver.run()
    assert driver.core.engine is not None
    index = driver.core.engine.memories[0].index
    assert not index.touched
    driver.feed(RouterUp("router-0"))
    driver.tick()
    driver.feed(RouterDown("router-0"))
    driver.ask(60, max_tokens=2)
    driver.run()
    count = len(driver.messages(PrefixEvents))
    driver.ask(60, max_tokens=2)
    driver.run()
    driver.tick(seconds=1)
    assert len(driver.messages(PrefixEvents)) == count
    assert not index.touched


def test_changes_are_reported_together_and_soon() -> None:
    driver = Driver()
    driver.feed(RouterUp("router-0"))
    ear = Ear(driver)
    for _ in range(6):
        driver.ask(60, max_tokens=1)
    driver.run()
    took_s = (driver.now - 1_000_000_000) / 1e9
    assert len(ear.listen()) <= 2 + took_s / PERIOD_S
    if driver.core.prefixes.is_waiting:
        assert driver.core.idle_for() <= PERIOD_S  # the loop wakes up for it
    driver.tick(seconds=PERIOD_S)
    ear.listen()
    assert ear.points == findable(driver)


def test_a_new_engine_begins_with_nothing() -> None:
    driver = Driver()
    driver.feed(RouterUp("router-0"))
    ear = Ear(driver)
    driver.ask(60, max_tokens=2)
    driver.run()
    driver.tick(seconds=PERIOD_S)
    ear.listen()
    assert ear.points
    driver.lose_executor()
    driver.load()
    driver.tick(seconds=PERIOD_S)
    assert [event.first for event in ear.listen()] == [True]
    assert ear.points == set()


def test_one_that_links_anew_is_told_all_anew_and_others_are_not() -> None:
    driver = Driver()
    driver.feed(RouterUp("router-0"))
    driver.feed(RouterUp("router-1"))
    first, second = Ear(driver), Ear(driver, "router-1")
    driver.ask(60, max_tokens=2)
    driver.run()
    driver.tick(seconds=PERIOD_S)
    first.listen()
    second.listen()
    driver.feed(RouterDown("router-1"))
    driver.feed(RouterUp("router-1"))
    second.points = set()
    driver.tick(seconds=PERIOD_S)
    assert not first.listen()
    assert [event.first for event in second.listen()] == [True]
    assert first.points == second.points == findable(driver)


def test_a_long_report_comes_in_parts() -> None:
    driver = Driver()
    for _ in range(6):
        driver.ask(60, max_tokens=1)
        driver.run()
    few = prefix_reports.MAX_HASHES
    prefix_reports.MAX_HASHES = 2
    try:
        ear = Ear(driver)
        driver.feed(RouterUp("router-0"))
        driver.tick()
        events = ear.listen()
    finally:
        prefix_reports.MAX_HASHES = few
    assert len(events) > 1
    assert [event.first for event in events] == [True] + [False] * (len(events) - 1)
    assert all(len(event.added) <= 2 * HASH_BYTES for event in events)
    assert ear.points == findable(driver)


def test_whatever_comes_and_goes_the_router_knows_it_a_report_later() -> None:
    """Small pools, so that points are evicted, superseded and flushed all the time."""
    draw = random.Random(7)
    driver = Driver(num_global_blocks=24, num_window_blocks=16, num_state_blocks=8)
    driver.feed(RouterUp("router-0"))
    ear = Ear(driver)
    driver.tick()
    dropped = 0
    for _ in range(60):
        prompt = words(draw.choice([40, 60, 100]), seed=draw.randrange(6))
        driver.ask(prompt, max_tokens=draw.choice([1, 20]))
        driver.run()
        if draw.random() < 0.1:
            driver.mail(FlushCache())
        driver.tick(seconds=PERIOD_S)
        dropped += sum(len(event.dropped) for event in ear.listen())
        assert ear.points == findable(driver)
    assert dropped
