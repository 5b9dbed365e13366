"""Which resumable points are kept, which leave first, and what is told of them."""

import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import FlushCache, KvTier, PointEnd, PointSource
from deepmesh.wire.packed import pack_ids
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import TOKENIZER, Driver, words
from tests.core.store_driver import StoreDriver
from tests.core.test_store import PROMPT, warm


def ask_marked(driver: Driver, prompt: list[int], *marks: int, max_tokens: int = 1) -> SimRequest:
    """A prompt whose tokenizer says where its shared beginning ends."""
    rid = len(driver.requests).to_bytes(16, "big")
    request = driver.requests[rid] = SimRequest(rid, prompt, max_tokens)
    driver.mail(replace(request.generate(TOKENIZER), marks=pack_ids(list(marks))))
    driver.run()
    return request


def positions(driver: Driver) -> list[int]:
    assert driver.core.engine is not None
    points = driver.core.engine.memories[0].index.points.values()
    return sorted(point.position for point in points)


def chat(driver: Driver, prompt: list[int]) -> SimRequest:
    request = driver.ask(prompt, max_tokens=4)
    driver.run()
    return request


def test_the_end_of_the_system_prompt_is_kept_by_the_first_request() -> None:
    driver = Driver()
    system = words(52)
    ask_marked(driver, system + words(30, seed=1), 52)
    assert positions(driver) == [48, 80]
    second = ask_marked(driver, system + words(30, seed=2), 52)
    assert second.cached_tokens == 48
    kept = driver.core.stats().cache.kept_points
    assert kept[PointSource.MARK] == 1
    assert kept[PointSource.PROMPT] == 2
    driver.assert_clean()


@pytest.mark.parametrize("marks", [(0,), (15,), (-5,), (10_000,), (78, 79, 80), tuple(range(99))])
def test_marks_that_make_no_sense_keep_nothing_more(marks: tuple[int, ...]) -> None:
    driver = Driver()
    request = ask_marked(driver, words(90), *marks)
    assert request.terminals
    assert set(positions(driver)) <= {64, 80}
    driver.assert_clean()


def test_a_scan_evicts_no_conversation() -> None:
    """Prompts that nobody comes back to push out each other, however many they are."""
    driver = Driver(num_state_blocks=10, num_window_blocks=200, num_global_blocks=400)
    system = words(48, seed=9)
    talks = [system + words(40, seed=100 + at) for at in range(2)]
    for turn in range(3):
        for at, talk in enumerate(talks):
            request = chat(driver, talk)
            assert turn == 0 or request.cached_tokens >= 80
            talks[at] = talk + request.output + words(20, seed=turn)
    for at in range(40):
        chat(driver, system + words(40, seed=1000 + at))
    for talk in talks:
        assert chat(driver, talk).cached_tokens >= 112
    assert chat(driver, system + words(40, seed=5)).cached_tokens == 48
    driver.assert_clean()


def test_a_conversation_that_goes_on_leaves_its_former_point_behind() -> None:
    driver = Driver(num_state_blocks=5, num_window_blocks=200, num_global_blocks=400)
    talk = words(40, seed=1)
    for turn in range(8):
        request = chat(driver, talk)
        assert turn == 0 or request.cached_tokens > 0
        talk = talk + request.output + words(20, seed=turn)
    assert driver.core.engine is not None
    states = driver.core.engine.memories[0].states
    assert int(states.shielded.sum()) == 1
    driver.assert_clean()


def test_what_is_shielded_leaves_room_for_what_is_new() -> None:
    driver = Driver(num_state_blocks=12, num_window_blocks=200, num_global_blocks=400)
    for at in range(14):  # each is resumed often enough
        for _ in range(3):
            chat(driver, words(40, seed=at))
    new = words(40, seed=500)
    chat(driver, new)
    assert chat(driver, new).cached_tokens == 32
    assert driver.core.engine is not None
    states = driver.core.engine.memories[0].states
    assert int(states.shielded.sum()) <= 9
    driver.assert_clean()


def test_points_that_leave_are_counted_by_reason() -> None:
    driver = Driver(num_state_blocks=4, num_window_blocks=200)
    for at in range(6):
        chat(driver, words(40, seed=at))
    ended = driver.core.stats().cache.ended_points
    assert ended[PointEnd.ROOM] >= 2
    cache = driver.core.stats().cache
    driver.mail(FlushCache())
    after = driver.core.stats().cache
    assert (cache.points > 0, after.points) == (True, 0)
    assert after.ended_points[PointEnd.FLUSHED] == cache.points
    assert sum(after.kept_points) == sum(after.ended_points)
    driver.assert_clean()


def test_hits_are_counted_by_tier_and_beside_what_was_possible() -> None:
    driver = warm()
    driver.ask(PROMPT, max_tokens=1)  # of the kvstore
    driver.run()
    driver.ask(PROMPT, max_tokens=1)  # of the device
    driver.run()
    cache = driver.core.stats().cache
    assert cache.hit_tokens == (48, 48, 0, 0)
    assert cache.possible_tokens == 48  # this scheduler saw it once before
    assert cache.kept_points[PointSource.LOADED] == 1
    driver.assert_clean()


def test_the_tier_is_the_slowest_that_was_needed() -> None:
    driver = warm(auto=False)
    driver.ask(PROMPT, max_tokens=1)
    driver.tick()
    hits = driver.contents.lookup(driver.lookups.popleft())
    driver.mail(replace(hits, tier=KvTier.DISK), "kvstore-0")
    driver.tick()
    driver.settle()
    driver.run()
    assert driver.core.stats().cache.hit_tokens == (0, 0, 48, 0)
    driver.settle()
    driver.assert_clean()


def test_what_was_possible_outlives_the_engine_and_evictions() -> None:
    driver = Driver(num_state_blocks=2)
    chat(driver, PROMPT)
    chat(driver, words(200, seed=3))
    driver.lose_executor()
    driver.load()
    assert chat(driver, PROMPT).cached_tokens == 0
    cache = driver.core.stats().cache
    assert cache.possible_tokens == 48
    assert cache.hit_tokens[0] == 0
    driver.assert_clean()


def test_stores_beside_scans_stay_clean() -> None:
    driver = StoreDriver(num_state_blocks=6)
    for at in range(12):
        chat(driver, PROMPT[:32] + words(40, seed=at))
    driver.assert_clean()
