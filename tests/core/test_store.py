"""A prefix goes through a kvstore and back: every state of a store and a load, and their races."""

import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import (
    Drain,
    ErrorCode,
    Failed,
    Hits,
    KvKind,
    KvStatus,
    KvTier,
    LoadBlocks,
    Lookup,
    OpDone,
    PointEnd,
    Pool,
    Shutdown,
    StoreBlocks,
)
from services.scheduler.core import kv_stores
from services.scheduler.core.request import Phase
from services.scheduler.core.store_loads import LoadCosts
from services.scheduler.core.store_writes import MAX_MOVES, MAX_OPS
from tests.core.driver import CONFIG, EXECUTOR, words
from tests.core.store_driver import KVSTORE, StoreDriver

PROMPT = words(60)  # resumable at 48


def warm(prompt: list[int] = PROMPT, *, auto: bool = True, **capacity: int | str) -> StoreDriver:
    """A fresh scheduler and executor beside a kvstore that has the prompt."""
    first = StoreDriver()
    first.ask(prompt, max_tokens=2)
    first.run()
    return StoreDriver(auto=auto, contents=first.contents, **capacity)


def loading(**capacity: int | str) -> tuple[StoreDriver, LoadBlocks]:
    """A request that waits in its slot for the blocks of its prompt."""
    driver = warm(auto=False, **capacity)
    request = driver.ask(PROMPT, max_tokens=3)
    driver.tick()
    driver.answer()
    driver.tick()
    assert driver.is_loading(request)
    (load,) = driver.loads
    return driver, load


# ---------------------------------------------------------------- stores


def test_what_is_published_is_stored_behind_its_step() -> None:
    driver = StoreDriver(auto=False)
    driver.ask(PROMPT, max_tokens=1)
    driver.tick()
    driver.answer()
    driver.run()
    (store,) = driver.stores
    kinds = [move.kind for move in store.moves]
    assert kinds == [KvKind.BLOCK] * 6 + [KvKind.POINT]
    assert [pool for pool, _ in store.moves[-1].blocks] == [Pool.WINDOW] * 2 + [Pool.STATE]
    assert store.after_step == driver.all_steps[1].step_id  # 0..32, then 32..48
    driver.end(store)
    assert driver.core.stats().stored_blocks == 7
    driver.assert_clean()


def test_nothing_is_stored_twice() -> None:
    driver = StoreDriver()
    for tail in (words(20, seed=1), words(20, seed=2), words(20, seed=1)):
        driver.ask(PROMPT[:48] + tail, max_tokens=1)
        driver.run()
    moves = [(m.hash, m.kind) for op in driver.messages(StoreBlocks) for m in op.moves]
    assert len(moves) == len(set(moves))
    driver.assert_clean()


def test_a_prefix_in_flight_is_not_stored_by_another_request() -> None:
    driver = StoreDriver(auto=False, num_state_blocks=3)
    for turn in range(3):
        driver.ask(PROMPT + words(30, seed=turn), max_tokens=1)
        driver.tick()
        if driver.lookups:
            driver.answer()
        driver.run()
    moves = [(m.hash, m.kind) for op in driver.messages(StoreBlocks) for m in op.moves]
    assert len(moves) == len(set(moves)) > 0


def test_a_source_is_not_reused_before_its_store_has_ended() -> None:
    """The external writer fills whatever becomes free; the store then reads what it should."""
    driver = StoreDriver(auto=False, num_global_blocks=10)
    driver.ask(words(40, seed=5), max_tokens=1)
    driver.tick()
    driver.answer()
    driver.run()
    (store,) = driver.stores
    pinned = sum(len(move.blocks) for move in store.moves)
    assert sum(driver.pinned()) == pinned
    late = driver.ask(words(70, seed=6), max_tokens=1)  # it needs nine blocks of the ten
    driver.tick()
    driver.answer()
    driver.run()
    assert driver.phase(late) == Phase.NONE
    driver.end(store)
    assert sum(driver.pinned()) == 0
    driver.run()
    assert late.terminals
    for left in driver.stores:
        driver.end(left)
    driver.assert_clean()


def test_an_evicted_source_stays_pinned_until_its_store_has_ended() -> None:
    driver = StoreDriver(auto=False)
    driver.ask(PROMPT, max_tokens=1)
    driver.tick()
    driver.answer()
    driver.run()
    assert driver.core.engine is not None
    memory = driver.core.engine.memories[0]
    (point,) = memory.index.points.values()
    memory.index.drop_point(point.key, PointEnd.ROOM)
    driver.tick()
    assert driver.pinned()[1:] == (2, 1)
    assert driver.blocks(Pool.STATE)[0] == 31
    driver.end(driver.stores[0])
    assert driver.pinned() == (0, 0, 0)
    assert driver.blocks(Pool.STATE)[0] == 32


def test_stores_that_hang_bound_themselves_and_hold_up_nobody() -> None:
    driver = StoreDriver(auto=False, num_global_blocks=400, num_state_blocks=200)
    for turn in range(MAX_OPS + 4):
        request = driver.ask(words(60, seed=100 + turn), max_tokens=4)
        driver.tick()
        driver.answer()
        driver.run()
        assert request.terminals
    assert len(driver.stores) == MAX_OPS
    driver.tick(seconds=11)
    stats = driver.core.stats()
    assert stats.quarantined_blocks == sum(stats.pinned_blocks) > 0
    assert len(driver.stores) == MAX_OPS
    for store in driver.stores:
        driver.end(store)
    driver.tick()
    assert len(driver.stores) == MAX_OPS  # those that waited
    for store in driver.stores:
        driver.end(store)
    assert driver.core.stats().quarantined_blocks == 0
    driver.assert_clean()


def test_a_long_prompt_is_stored_in_parts_and_its_point_comes_last() -> None:
    driver = StoreDriver(num_global_blocks=600, num_window_blocks=600, max_model_len=4000)
    prompt = words(8 * MAX_MOVES * 2 + 100)
    driver.ask(prompt, max_tokens=1)
    driver.run()
    stores = driver.messages(StoreBlocks)
    assert len(stores) >= 3
    assert max(len(store.moves) for store in stores) <= MAX_MOVES + 1
    kinds = [move.kind for store in stores for move in store.moves]
    assert kinds.index(KvKind.POINT) == len(kinds) - 1
    driver.assert_clean()


def test_what_a_store_could_not_bring_is_stored_when_it_is_used_again() -> None:
    driver = StoreDriver(auto=False)
    driver.ask(PROMPT, max_tokens=1)
    driver.tick()
    driver.answer()
    driver.run()
    driver.end(driver.stores[0], status=KvStatus.FULL)
    assert driver.core.stats().stored_blocks == 0
    driver.ask(PROMPT, max_tokens=1)  # a local hit
    driver.run()
    driver.settle()
    assert driver.core.stats().stored_blocks == 7
    driver.assert_clean()


def test_a_kvstore_that_comes_back_empty_is_filled_by_what_is_used() -> None:
    driver = StoreDriver()
    driver.ask(PROMPT, max_tokens=1)
    driver.run()
    driver.kvstore_down()
    driver.kvstore_up()
    driver.ask(PROMPT, max_tokens=1)
    driver.run()
    assert len(driver.contents.items) == 7
    driver.assert_clean()


def test_no_more_is_remembered_of_a_kvstore_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "NEW_ITEMS", 0)
    driver = StoreDriver()
    driver.ask(PROMPT, max_tokens=1)
    driver.run()
    chain = [key for key, kind in driver.contents.items if kind == KvKind.BLOCK]
    stores = driver.core.stores

    def known() -> list[bool]:
        return [stores.is_known(KVSTORE, key, KvKind.BLOCK) for key in chain]

    driver.kvstore_holds(7)
    assert known() == [True] * 6
    driver.kvstore_holds(3)  # the newest: two blocks and the point
    assert known() == [False] * 4 + [True] * 2
    driver.kvstore_holds(0)
    assert known() == [False] * 6
    driver.kvstore_holds(7)
    driver.ask(PROMPT, max_tokens=1)  # and now it is heard of again
    driver.run()
    assert known() == [True] * 6
    driver.assert_clean()


def test_without_a_kvstore_nothing_is_asked_and_nothing_stored() -> None:
    driver = StoreDriver()
    driver.kvstore_down()
    driver.ask(PROMPT, max_tokens=1)
    driver.run()
    assert not driver.messages(Lookup)
    assert not driver.messages(StoreBlocks)
    driver.assert_clean()


# ---------------------------------------------------------------- lookups


def test_a_lookup_that_is_not_answered_costs_its_limit_and_no_more() -> None:
    driver = warm(auto=False)
    request = driver.ask(PROMPT, max_tokens=1)
    driver.tick()
    driver.tick(seconds=0.04)
    assert not driver.steps
    assert driver.core.idle_for() <= 0.05
    driver.tick(seconds=0.02)
    assert driver.is_resident(request)
    driver.answer()  # too late
    other = driver.ask(words(60, seed=9), max_tokens=1)
    driver.run()
    assert len(driver.messages(Lookup)) == 1  # it is left alone for a while
    assert (request.cached_tokens, other.cached_tokens) == (0, 0)
    driver.settle()
    driver.assert_clean()


def test_who_waits_for_a_lookup_holds_up_nobody() -> None:
    driver = StoreDriver(auto=False)
    first = driver.ask(PROMPT, max_tokens=1)
    short = driver.ask(10, max_tokens=1)  # shorter than a grid chunk: nothing to ask
    driver.tick()
    assert not driver.is_resident(first)
    assert driver.is_resident(short)
    driver.settle()
    driver.run()
    driver.settle()
    driver.assert_clean()


def test_a_request_is_asked_for_once() -> None:
    driver = StoreDriver(auto=False)
    driver.ask(PROMPT, max_tokens=5)
    for _ in range(5):
        driver.tick()
    assert len(driver.messages(Lookup)) == 1
    driver.settle()
    driver.run()
    assert len(driver.messages(Lookup)) == 1
    driver.settle()
    driver.assert_clean()


@pytest.mark.parametrize(("blocks", "point"), [(99, 99), (-1, -3), (5, 5), (2, 6), (6, 1)])
def test_an_answer_that_cannot_be_true_makes_nobody_resume_wrongly(blocks: int, point: int) -> None:
    driver = StoreDriver(auto=False)
    request = driver.ask(PROMPT, max_tokens=2)
    driver.tick()
    lookup = driver.lookups.popleft()
    driver.mail(Hits(lookup.lookup_id, blocks, point), KVSTORE)
    driver.tick()
    for load in driver.loads:
        driver.end(load)
    driver.run()
    assert request.cached_tokens == 0
    driver.settle()
    driver.assert_clean()


def test_a_lost_kvstore_answers_nothing_and_nobody_waits() -> None:
    driver = warm(auto=False)
    request = driver.ask(PROMPT, max_tokens=1)
    driver.tick()
    driver.kvstore_down()
    driver.run()
    assert request.terminals
    assert request.cached_tokens == 0
    driver.assert_clean()


# ---------------------------------------------------------------- loads


def test_a_warm_start_loads_the_prompt_and_computes_only_what_follows() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    assert not driver.steps
    driver.end(load)
    driver.tick()
    (init,) = driver.steps[0].init
    assert init.start == 48
    assert int(driver.rows(0)["q"][0]) == 12
    driver.run()
    assert request.cached_tokens == 48
    assert request.terminals[0].cached_tokens == 48
    stats = driver.core.stats()
    assert (stats.store_hit_tokens, stats.cached_prompt_tokens) == (48, 48)
    assert not driver.messages(StoreBlocks)  # it came from there
    driver.assert_clean()


def test_others_with_the_same_prompt_wait_for_the_load_and_hit_what_it_brought() -> None:
    driver = warm()
    requests = [driver.ask(PROMPT, max_tokens=2) for _ in range(3)]
    driver.run()
    assert [request.cached_tokens for request in requests] == [48, 48, 48]
    assert len(driver.messages(LoadBlocks)) == 1
    driver.assert_clean()


def test_only_what_the_device_lacks_is_loaded() -> None:
    first = StoreDriver()
    long = words(110)
    first.ask(long, max_tokens=1)
    first.ask(long[:40], max_tokens=1)
    first.run()
    driver = StoreDriver(contents=first.contents)
    driver.ask(long[:40], max_tokens=1)
    driver.run()
    request = driver.ask(long, max_tokens=1)
    driver.run()
    assert request.cached_tokens == 96
    load = driver.last(LoadBlocks)
    assert [move.kind for move in load.moves] == [KvKind.BLOCK] * 8 + [KvKind.POINT]
    assert driver.core.stats().store_hit_tokens == 32 + 64
    driver.assert_clean()


def test_less_than_a_grid_chunk_is_computed() -> None:
    driver = warm()
    request = driver.ask(PROMPT, max_tokens=1)
    driver.run()
    again = driver.ask(PROMPT[:60], max_tokens=1)
    driver.run()
    assert (request.cached_tokens, again.cached_tokens) == (48, 48)
    assert len(driver.messages(Lookup)) == 1  # the second cannot win a chunk
    driver.assert_clean()


def test_a_load_never_covers_the_last_token() -> None:
    driver = warm()
    request = driver.ask(PROMPT[:48], max_tokens=2)
    driver.run()
    assert request.cached_tokens == 0
    driver.assert_clean()


def test_the_next_turn_loads_what_the_last_one_generated() -> None:
    first = StoreDriver()
    turn = first.ask(20, max_tokens=40)
    first.run()
    prompt = turn.prompt + turn.output + words(10)
    driver = StoreDriver(contents=first.contents)
    request = driver.ask(prompt, max_tokens=2)
    driver.run()
    assert request.cached_tokens == 48
    driver.assert_clean()


def test_where_kernels_differ_by_class_an_output_is_not_loaded() -> None:
    first = StoreDriver(one_kernel_class=False)
    turn = first.ask(20, max_tokens=60)
    first.run()
    first.ask(turn.prompt + turn.output + words(10), max_tokens=1)
    first.run()  # computed as a prompt: a point beyond 80
    driver = StoreDriver(contents=first.contents, one_kernel_class=False)
    resumed = driver.ask(turn.prompt, max_tokens=60, output=turn.output[:50])
    driver.run()
    assert [load.moves[-1].kind for load in driver.messages(LoadBlocks)] == [KvKind.POINT]
    assert resumed.terminals[0].cached_tokens == 16
    driver.assert_clean()


def test_other_weights_and_other_salts_find_nothing() -> None:
    driver = warm(fingerprint="other weights")
    request = driver.ask(PROMPT, max_tokens=1)
    driver.run()
    assert request.cached_tokens == 0
    same = warm()
    salted = same.ask(PROMPT, max_tokens=1, salt=b"tenant")
    same.run()
    assert salted.cached_tokens == 0
    assert not same.messages(LoadBlocks)


def test_an_abort_while_loading_ends_the_request_and_keeps_the_blocks() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    driver.abort(request)
    assert request.terminals
    num_blocks = sum(len(move.blocks) for move in load.moves)
    assert sum(driver.pinned()) == num_blocks
    driver.run()
    assert sum(driver.pinned()) == num_blocks
    driver.end(load)
    assert sum(driver.pinned()) == 0
    driver.assert_clean()


def test_a_slot_that_a_loading_request_left_is_not_filled_for_the_next_one() -> None:
    driver, load = loading(num_slots=1)
    (request,) = driver.requests.values()
    driver.abort(request)
    other = driver.ask(words(60, seed=3), max_tokens=3)
    driver.tick()
    driver.answer()
    driver.tick()
    assert driver.is_resident(other)
    driver.end(load)
    driver.run()
    assert other.cached_tokens == 0
    driver.settle()
    driver.assert_clean()


def test_a_load_over_its_deadline_is_given_up_and_its_blocks_are_in_quarantine() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    driver.tick(seconds=1.9)
    assert driver.is_loading(request)
    driver.tick(seconds=0.2)
    assert driver.phase(request) != Phase.LOADING
    num_blocks = sum(len(move.blocks) for move in load.moves)
    assert driver.core.stats().quarantined_blocks == num_blocks
    driver.run()
    assert request.terminals
    assert request.cached_tokens == 0
    driver.end(load)  # it writes its own blocks: nobody else has them
    assert driver.core.stats().quarantined_blocks == 0
    driver.settle()
    driver.assert_clean()


def test_a_load_that_ends_late_fills_blocks_that_nobody_else_has() -> None:
    driver, load = loading(num_global_blocks=18)
    (request,) = driver.requests.values()
    driver.tick(seconds=2.1)
    driver.tick()
    driver.step()  # computes in other blocks meanwhile
    driver.end(load)
    driver.run()
    assert request.terminals
    driver.settle()
    driver.assert_clean()


@pytest.mark.parametrize("lost", [[0], [3], [6], [0, 1, 2, 3, 4, 5, 6]])
def test_a_short_load_is_computed_and_stored_again(lost: list[int]) -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    for at in lost:
        del driver.contents.items[load.moves[at].hash, load.moves[at].kind]
    done = driver.end(load)
    assert done.status == KvStatus.MISS
    driver.run()
    driver.settle()
    assert request.cached_tokens == 0
    assert len(driver.messages(LoadBlocks)) == 1
    assert len(driver.contents.items) == 7
    driver.assert_clean()


def test_an_answer_of_the_wrong_length_counts_as_failed() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    driver.ops.remove(load)
    driver.mail(OpDone(load.op_id, load.engine_epoch, KvStatus.OK, b"\1\1"), EXECUTOR)
    driver.run()
    assert request.cached_tokens == 0
    driver.settle()
    driver.assert_clean()


def test_repeated_late_and_foreign_answers_change_nothing() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    good = bytes([1]) * len(load.moves)
    for answer, peer in (
        (OpDone(load.op_id, load.engine_epoch - 1, KvStatus.OK, good), EXECUTOR),
        (OpDone(load.op_id + 1, load.engine_epoch, KvStatus.OK, good), EXECUTOR),
        (OpDone(load.op_id, load.engine_epoch, KvStatus.OK, good), "executor-0-9"),
    ):
        driver.mail(answer, peer)
        assert driver.is_loading(request)
    done = driver.end(load)
    driver.mail(done, EXECUTOR)
    driver.run()
    driver.mail(done, EXECUTOR)
    assert request.cached_tokens == 48
    driver.assert_clean()


def test_a_lost_executor_ends_the_load_and_the_pins_with_the_pools() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    driver.lose_executor()
    assert driver.phase(request) == Phase.NONE
    driver.load()
    good = bytes([1]) * len(load.moves)
    driver.mail(OpDone(load.op_id, load.engine_epoch, KvStatus.OK, good), EXECUTOR)
    assert sum(driver.pinned()) == 0
    driver.auto = True
    driver.settle()
    driver.run()
    assert request.cached_tokens == 48  # asked for and loaded again
    driver.assert_clean()


def test_a_lost_kvstore_makes_the_load_fail_and_the_request_compute() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    driver.kvstore_down()
    assert driver.is_loading(request)  # only the executor knows when its blocks are its own again
    driver.end(load, status=KvStatus.ERROR)
    driver.run()
    assert request.cached_tokens == 0
    driver.assert_clean()


def test_a_draining_scheduler_lets_a_loading_request_end() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    driver.mail(Drain(30.0))
    driver.end(load)
    driver.run()
    assert request.cached_tokens == 48
    assert driver.core.drained
    driver.assert_clean()


def test_a_drained_scheduler_waits_for_its_stores_but_not_for_ever() -> None:
    for ends in (True, False):
        driver = StoreDriver(auto=False)
        driver.ask(PROMPT, max_tokens=1)
        driver.tick()
        driver.answer()
        driver.mail(Drain(30.0))
        driver.run()
        assert driver.stores
        assert not driver.core.drained
        if ends:
            driver.end(driver.stores[0])
            driver.tick()
        else:
            driver.tick(seconds=2.1)
        assert driver.core.drained


def test_a_shutdown_fails_a_loading_request() -> None:
    driver, load = loading()
    (request,) = driver.requests.values()
    driver.mail(Shutdown())
    (end,) = request.terminals
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.OVERLOADED
    driver.end(load)
    assert sum(driver.pinned()) == 0


def test_a_loading_request_is_no_victim_and_leaves_room_for_what_runs() -> None:
    """B40: a load takes only what the prefills in flight do not need to come to their end."""
    first = StoreDriver()
    first.ask(PROMPT, max_tokens=2)
    first.run()
    driver = StoreDriver(
        auto=False, contents=first.contents, num_global_blocks=24, num_window_blocks=9
    )
    long = driver.ask(words(100, seed=4), max_tokens=20)
    driver.tick()
    driver.answer()
    driver.tick()
    request = driver.ask(PROMPT, max_tokens=2)
    while not driver.lookups:
        driver.step()
    driver.answer()
    for _ in range(60):
        driver.step()
    assert long.terminals  # whatever the load does
    assert driver.core.stats().preemptions == 0
    driver.auto = True
    driver.settle()
    driver.run()
    assert request.terminals
    driver.settle()
    driver.assert_clean()


def test_a_load_that_never_ends_does_not_lock_the_device_for_good() -> None:
    driver, load = loading(num_global_blocks=9)
    (request,) = driver.requests.values()
    driver.tick(seconds=2.1)  # six of nine blocks are in quarantine: it cannot run
    driver.tick()
    assert driver.core.group.engine_epoch > load.engine_epoch
    driver.auto = True
    driver.run()
    driver.settle()
    driver.run()
    assert request.terminals
    driver.assert_clean()


def test_a_lone_request_that_lacks_quarantined_blocks_gets_them_with_a_new_epoch() -> None:
    driver, load = loading(num_global_blocks=14)
    (gone,) = driver.requests.values()
    driver.abort(gone)
    request = driver.ask(20, max_tokens=90)  # fourteen blocks in the end, six are pinned
    driver.tick()
    driver.answer()
    driver.run()
    assert not request.terminals
    assert driver.core.group.engine_epoch == load.engine_epoch  # it may end yet
    driver.tick(seconds=11)  # its own stores are over their deadline, too
    assert driver.core.group.engine_epoch > load.engine_epoch
    driver.auto = True
    driver.run()
    assert request.terminals
    driver.assert_clean()


def test_a_preempted_request_loads_what_was_evicted_meanwhile() -> None:
    config = replace(CONFIG, max_rows=4)
    driver = StoreDriver(config, num_global_blocks=22, num_window_blocks=40)
    requests = [driver.ask(words(50, seed=20 + i), max_tokens=60) for i in range(3)]
    driver.run()
    assert driver.core.stats().preemptions > 0
    assert driver.core.stats().store_hit_tokens > 0
    assert all(request.terminals for request in requests)
    driver.settle()
    driver.assert_clean()


def test_loads_are_tried_until_they_are_much_slower_than_computing() -> None:
    unknown, known = LoadCosts(0), LoadCosts(1000)
    assert unknown.pays(16, 1_000_000)
    assert known.pays(16, 1_000_000)  # none was observed yet
    known.observe(5_000_000, 100)  # 50 us each
    assert known.pays(250, 20)  # four times as long
    assert not known.pays(16, 20)
    assert known.pays(16, 20, KvTier.DISK)  # another tier has rates of its own
    known.observe(50_000_000, 100, KvTier.DISK)
    assert not known.pays(250, 20, KvTier.DISK)
    assert any(known.pays(16, 20) for _ in range(60))  # and again after a while
