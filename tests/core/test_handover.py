"""A prompt that another group computes: whole and right, or computed here; never half of it."""

import pytest
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    HandOff,
    HandOffDone,
    HandOffRefused,
    PrefillFor,
    StoreBlocks,
)
from deepmesh.wire.packed import unpack_ids
from services.scheduler.core.request import Phase
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import CONFIG
from tests.core.handover_driver import HandoverDriver, failed


def computed(driver: HandoverDriver) -> int:
    """Prompt tokens that the decode side has computed so far."""
    return sum(step.num_tokens for step in driver.decode.steps_ended() if step.kind == 0)


def phase(driver: HandoverDriver, request: SimRequest) -> int:
    live = driver.decode.core.registry.live[request.rid]
    engine = driver.decode.core.engine
    assert engine is not None
    return int(engine.residency.table.phase[live.slot]) if live.slot >= 0 else Phase.NONE


def test_all_but_the_last_chunk_of_a_prompt_comes_from_the_other_group() -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    driver.decode.tick()
    order = driver.decode.say(PrefillFor)
    assert isinstance(order, PrefillFor)
    assert unpack_ids(order.ids).tolist() == request.prompt[:65]
    driver.decode.said.append(order)
    driver.finish()
    assert computed(driver) == 6  # 64 are loaded, in blocks of 8 and a point
    stats = driver.decode.core.stats().handovers
    assert (stats.asked, stats.loaded, stats.failed, stats.tokens) == (1, 1, 0, 64)
    assert driver.prefill.core.stats().handovers.served == 1
    assert request.cached_tokens == 0  # somebody computed it for this request


@pytest.mark.parametrize("length", [1, 15, 16])
def test_a_prompt_without_a_whole_chunk_below_its_end_is_computed_here(length: int) -> None:
    driver = HandoverDriver()
    driver.ask(length)
    driver.decode.run()
    assert not driver.decode.said
    assert computed(driver) == length


def test_decoding_waits_for_all_of_it() -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    driver.loading(request)
    for _ in range(3):
        driver.decode.step()
    assert phase(driver, request) == Phase.LOADING
    assert not driver.decode.all_steps
    driver.finish()


@pytest.mark.parametrize("lost", [0, 3, 8])
def test_a_block_or_point_that_does_not_come_makes_all_of_it_void(lost: int) -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    assert len(driver.loading(request).moves) == 9
    driver.load(lost=frozenset({lost}))
    driver.finish()
    assert computed(driver) == 70
    assert driver.decode.core.stats().handovers.failed == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 48},
        {"num_items": 8},
        {"key": bytes(16)},
        {"rid": bytes(16)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_offer_of_something_else_is_not_taken(wrong: dict[str, int | bytes]) -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    driver.deliver(replace(driver.offered(request), **wrong))
    driver.finish()
    assert computed(driver) == 70


def test_a_doubled_offer_and_a_late_one_change_nothing() -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    offer = driver.offered(request)
    driver.deliver(offer)
    driver.deliver(offer)
    driver.finish()
    driver.deliver(offer)
    assert driver.decode.say(HandOffDone) == HandOffDone(offer.number, loaded=False)
    driver.finish()


@pytest.mark.parametrize("cause", ["refused", "cut", "late"])
def test_without_an_offer_the_prompt_is_computed_here(cause: str) -> None:
    driver = HandoverDriver(replace(CONFIG, handover_wait_s=1.0))
    driver.ask(70)
    driver.decode.tick()
    order = driver.decode.say(PrefillFor)
    assert isinstance(order, PrefillFor)
    match cause:
        case "refused":
            driver.deliver(HandOffRefused(order.number, "no"))
        case "cut":
            driver.cut()
        case _:
            driver.decode.tick(seconds=1.1)
    driver.finish()
    assert computed(driver) == 70


def test_a_copy_for_which_there_is_no_room_is_refused() -> None:
    driver = HandoverDriver()
    driver.ask(70)
    driver.decode.tick()
    driver.deliver(driver.decode.say(PrefillFor))
    driver.prefill.run()
    driver.copy(is_full=True)
    assert isinstance(driver.prefill.said[0], HandOffRefused)
    driver.finish()
    assert computed(driver) == 70


def test_time_alone_frees_no_block_that_a_pull_may_still_fill() -> None:
    driver = HandoverDriver(replace(CONFIG, store_load_s=1.0))
    request = driver.ask(70)
    op = driver.loading(request)
    driver.decode.tick(seconds=1.1)
    stats = driver.decode.core.stats()
    assert stats.quarantined_blocks == sum(len(move.blocks) for move in op.moves)
    driver.decode.ops.clear()  # it never says anything
    driver.decode.run()
    assert driver.decode.core.stats().quarantined_blocks == stats.quarantined_blocks
    driver.decode.ops.append(op)
    driver.load()  # it may still write: nobody else has its blocks
    assert driver.decode.core.stats().quarantined_blocks == 0
    driver.finish()


@pytest.mark.parametrize("state", ["asked", "computed", "copied", "offered", "loading"])
def test_a_client_may_go_at_any_time(state: str) -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    driver.decode.tick()
    if state != "asked":
        driver.deliver(driver.decode.say(PrefillFor))
        driver.prefill.run()
    if state not in ("asked", "computed"):
        driver.copy()
    if state in ("offered", "loading"):
        driver.deliver(driver.prefill.say(HandOff))
    if state == "loading":
        driver.decode.tick()
        assert phase(driver, request) == Phase.LOADING
    driver.decode.abort(request)
    driver.decode.tick()
    driver.finish()
    assert driver.decode.core.stats().handovers.loaded == 0


def test_an_offer_that_nobody_renews_ends_by_its_time() -> None:
    driver = HandoverDriver(replace(CONFIG, handover_ttl_s=1.0))
    request = driver.ask(70)
    driver.offered(request)
    driver.prefill.tick(seconds=0.9)
    assert driver.prefill.area.num_copies == 1
    driver.prefill.tick(seconds=0.2)
    assert driver.prefill.area.num_copies == 0
    assert driver.prefill.core.stats().handovers.expired == 1
    driver.finish()
    assert computed(driver) == 70


def test_the_decode_side_renews_what_it_still_waits_for() -> None:
    driver = HandoverDriver(replace(CONFIG, handover_ttl_s=1.0, store_load_s=60.0))
    request = driver.ask(70)
    driver.loading(request)
    for _ in range(10):
        driver.decode.tick(seconds=0.3)
        driver.talk()
        driver.prefill.tick(seconds=0.3)
    assert driver.prefill.area.num_copies == 1
    driver.finish()
    assert driver.decode.core.stats().handovers.loaded == 1


def test_copies_end_with_the_engine_that_made_them() -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    driver.loading(request)
    driver.prefill.area.clear()
    driver.prefill.lose_executor()
    driver.load()
    driver.prefill.load()
    driver.finish()
    assert computed(driver) == 70


def test_the_prefill_side_computes_again_what_its_engine_lost() -> None:
    driver = HandoverDriver()
    driver.ask(70)
    driver.decode.tick()
    driver.deliver(driver.decode.say(PrefillFor))
    driver.prefill.step()
    driver.prefill.ops.clear()
    driver.prefill.lose_executor()
    driver.prefill.load()
    driver.finish()
    assert driver.decode.core.stats().handovers.loaded == 1


def test_a_copy_reads_what_is_pinned_and_behind_its_steps() -> None:
    driver = HandoverDriver()
    driver.ask(70)
    driver.decode.tick()
    driver.deliver(driver.decode.say(PrefillFor))
    driver.prefill.run()
    op = driver.prefill.ops[0]
    assert isinstance(op, StoreBlocks)
    assert op.after_step == driver.prefill.all_steps[1].step_id  # 32 tokens in each
    assert sum(driver.prefill.core.stats().pinned_blocks) == 8 + 2 + 1
    driver.prefill.answer(op, failed(op))
    driver.prefill.tick()
    assert sum(driver.prefill.core.stats().pinned_blocks) == 0
    driver.finish()


def test_what_the_prefill_side_has_is_not_computed_again() -> None:
    driver = HandoverDriver()
    first = driver.ask(list(range(70)))
    driver.finish()
    flushed = driver.decode.core.engine
    assert flushed is not None
    for memory in flushed.memories:
        memory.index.flush()
    second = driver.ask([*range(64), 90, 91, 92])
    before = len(driver.prefill.all_steps)
    driver.finish()
    assert len(driver.prefill.all_steps) == before
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)


def test_a_draining_prefill_side_stays_until_its_offers_are_over() -> None:
    driver = HandoverDriver()
    request = driver.ask(70)
    offer = driver.offered(request)
    driver.prefill.core.intake.draining = True
    driver.prefill.tick()
    assert not driver.prefill.core.drained
    driver.deliver(offer)
    driver.finish()
    driver.prefill.tick()
    assert driver.decode.core.stats().handovers.loaded == 1


def test_several_prompts_with_one_beginning_are_computed_once() -> None:
    driver = HandoverDriver(SchedulerConfig(max_rows=8, step_tokens=64, chunk_tokens=32))
    beginning = list(range(64))
    for n in range(4):
        driver.ask([*beginning, 70 + n, 80, 81])
    driver.finish()
    prompts = sum(step.num_tokens for step in driver.prefill.steps_ended() if step.kind == 0)
    assert prompts <= 64 + 4
