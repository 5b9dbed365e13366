"""What a kvstore has of a prompt is loaded while the prompt waits for a place."""

import pytest

from deepmesh.wire.messages import KvStatus, LoadBlocks, Pool
from services.scheduler.core.request import Phase
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import SECOND, words
from tests.core.store_driver import StoreDriver
from tests.core.test_store import PROMPT, warm


def later(driver: StoreDriver) -> None:
    """So much that the queue is looked at again."""
    driver.now += SECOND // 10
    driver.step()


def queued(**capacity: int | str) -> tuple[StoreDriver, SimRequest, SimRequest]:
    """A device with one slot, somebody in it, and somebody whose prompt a kvstore has."""
    driver = warm(auto=False, **{"num_slots": 1, **capacity})
    first = driver.ask(10, max_tokens=60)
    for _ in range(3):
        driver.step()
    second = driver.ask(PROMPT, max_tokens=2)
    later(driver)
    driver.answer()
    later(driver)
    return driver, first, second


def test_it_is_loaded_without_a_slot_and_hit_when_there_is_one() -> None:
    driver, first, second = queued()
    (load,) = driver.loads
    assert driver.phase(second) == Phase.NONE
    num_blocks = sum(len(move.blocks) for move in load.moves)
    assert sum(driver.pinned()) == num_blocks
    driver.end(load)
    assert sum(driver.pinned()) == 0
    driver.run()
    assert first.terminals
    assert second.cached_tokens == 48
    assert len(driver.messages(LoadBlocks)) == 1
    cache = driver.core.stats().cache
    assert (cache.prefetches, cache.prefetched_tokens) == (1, 48)
    assert cache.hit_tokens == (0, 48, 0, 0)  # where it came from, not where it was by then
    driver.settle()
    driver.assert_clean()


def test_who_gets_a_place_meanwhile_waits_for_the_load() -> None:
    driver, first, second = queued()
    (load,) = driver.loads
    driver.abort(first)
    for _ in range(4):
        driver.step()
    assert driver.phase(second) == Phase.NONE
    driver.end(load)
    driver.run()
    assert second.cached_tokens == 48
    assert len(driver.messages(LoadBlocks)) == 1
    driver.settle()
    driver.assert_clean()


def test_a_request_that_leaves_leaves_the_prefix_to_the_next_one() -> None:
    driver, first, second = queued()
    (load,) = driver.loads
    driver.abort(second)
    driver.end(load)
    driver.abort(first)
    third = driver.ask(PROMPT, max_tokens=2)
    driver.run()
    assert third.cached_tokens == 48
    assert len(driver.messages(LoadBlocks)) == 1
    driver.settle()
    driver.assert_clean()


@pytest.mark.parametrize("lost", [[0], [6], list(range(7))])
def test_what_comes_short_is_computed(lost: list[int]) -> None:
    driver, first, second = queued()
    (load,) = driver.loads
    driver.end(load, lost=lost)
    assert sum(driver.pinned()) == 0
    driver.abort(first)
    driver.auto = True
    driver.run()
    assert second.terminals
    assert driver.core.stats().cache.prefetched_tokens == 0
    driver.settle()
    driver.assert_clean()


def test_a_load_that_never_ends_holds_up_nobody_and_keeps_its_blocks() -> None:
    driver, first, second = queued()
    (load,) = driver.loads
    num_blocks = sum(len(move.blocks) for move in load.moves)
    driver.tick(seconds=2.1)
    assert driver.core.stats().quarantined_blocks == num_blocks
    driver.abort(first)
    driver.abort(second)
    other = driver.ask(PROMPT[:40] + words(30, seed=8), max_tokens=2)
    for _ in range(8):
        driver.step()
        while driver.lookups:
            driver.answer()
    assert other.terminals
    driver.end(load)  # late: they are its own
    assert driver.core.stats().quarantined_blocks == 0
    driver.settle()
    driver.assert_clean()


def test_nothing_is_evicted_for_it_that_somebody_came_back_to() -> None:
    driver = warm(auto=True, num_slots=1, num_state_blocks=3, num_window_blocks=30)
    for at in (1, 2):
        for _ in range(3):  # often enough to be worth more
            driver.ask(words(40, seed=at), max_tokens=1)
            driver.run()
    driver.auto = False
    driver.ask(10, max_tokens=60)
    for _ in range(3):
        driver.step()
    driver.ask(PROMPT, max_tokens=2)
    later(driver)
    driver.answer()
    assert driver.blocks(Pool.STATE)[:2] == (0, 2)
    later(driver)
    assert not driver.loads
    assert driver.blocks(Pool.STATE)[:2] == (0, 2)
    driver.auto = True
    driver.run()
    driver.settle()
    driver.assert_clean()


def test_only_a_few_are_under_way_at_once() -> None:
    contents = StoreDriver(num_state_blocks=32)
    prompts = [words(60, seed=20 + at) for at in range(5)]
    for prompt in prompts:
        contents.ask(prompt, max_tokens=1)
    contents.run()
    driver = StoreDriver(auto=False, contents=contents.contents, num_slots=1)
    driver.ask(10, max_tokens=80)
    for _ in range(3):
        driver.step()
    for prompt in prompts:
        driver.ask(prompt, max_tokens=1)
    for _ in range(10):
        later(driver)
        while driver.lookups:
            driver.answer()
    assert len(driver.loads) == 2
    driver.auto = True
    driver.settle()
    driver.run()
    assert driver.core.stats().cache.prefetches >= 2
    driver.settle()
    driver.assert_clean()


def test_a_lost_executor_ends_it_with_the_pools() -> None:
    driver, _, second = queued()
    (load,) = driver.loads
    driver.lose_executor()
    driver.load()
    assert sum(driver.pinned()) == 0
    driver.auto = True
    driver.settle()
    driver.run()
    assert second.terminals
    assert load.engine_epoch < driver.core.group.engine_epoch
    driver.settle()
    driver.assert_clean()


def test_a_load_that_fails_is_not_tried_again_for_the_same_request() -> None:
    driver, first, second = queued()
    driver.end(driver.loads[0], status=KvStatus.ERROR)
    for _ in range(5):
        later(driver)
    assert not driver.loads
    driver.abort(first)
    driver.auto = True
    driver.run()
    assert second.terminals
    driver.settle()
    driver.assert_clean()
