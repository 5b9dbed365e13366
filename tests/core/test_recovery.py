"""Peers that go and come back: tokens are repeated by position, engines start anew from K."""

from dataclasses import replace as swap

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import (
    Accepted,
    Ack,
    AckRow,
    ErrorCode,
    Failed,
    Finished,
    Load,
    Reset,
    Shutdown,
    StepStatus,
    TokenBatch,
)
from deepmesh.wire.packed import RESULT, ROW, unpack_ids
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import CONFIG, EXECUTOR, TOKENIZER, Driver


def received(driver: Driver, peer: str) -> list[object]:
    return [send.message for send in driver.sent if send.peer == peer]


def test_attach_replays_confirmed_tokens_from_any_position() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=12)
    for _ in range(6):
        driver.step()
    known = list(request.output)
    driver.attach(request, 2, "tokenizer-1")
    accepted, batch = received(driver, "tokenizer-1")
    assert isinstance(accepted, Accepted)
    assert isinstance(batch, TokenBatch)
    (row,) = batch.rows
    assert (row.pos, unpack_ids(row.ids).tolist()) == (2, known[2:])
    driver.run()
    assert isinstance(received(driver, "tokenizer-1")[-1], Finished)


def test_attach_to_a_request_that_waits_is_answered_too() -> None:
    driver = Driver()
    request = driver.ask(10)
    driver.attach(request, 0, "tokenizer-1")
    assert [type(m) for m in received(driver, "tokenizer-1")] == [Accepted]


def test_attach_to_an_unknown_request_fails_so_that_it_is_sent_again() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=1)
    driver.run()
    driver.ack(request, done=True)
    driver.attach(request, 0, "tokenizer-1")
    (failed,) = received(driver, "tokenizer-1")
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.UNKNOWN


def test_the_end_is_kept_until_it_is_acknowledged() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=5)
    driver.run()
    driver.attach(request, 3, "tokenizer-1")
    batch, end = received(driver, "tokenizer-1")
    assert isinstance(batch, TokenBatch)
    assert unpack_ids(batch.rows[0].ids).tolist() == request.output[3:]
    assert end == request.terminals[0]
    driver.mail(Ack([AckRow(request.rid, 5, done=True)]), "tokenizer-1")
    assert not driver.core.registry.ended


def test_an_end_that_nobody_acknowledges_is_forgotten_after_a_while() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=1)
    driver.run()
    driver.tick(seconds=59)
    assert driver.core.registry.ended
    driver.tick(seconds=2)
    assert not driver.core.registry.ended


def test_orphans_go_on_for_a_while_and_are_then_aborted() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=400)
    for _ in range(4):
        driver.step()
    driver.lose_tokenizer()
    driver.tick(seconds=9)
    steps = driver.core.stats().steps
    for _ in range(3):
        driver.step()
    assert driver.core.stats().steps > steps
    driver.tick(seconds=1.3)
    assert driver.core.stats().finished == 1
    driver.run()
    assert request.rid not in driver.core.registry.live
    assert driver.blocks(0)[3] == 0


def test_an_orphan_that_is_attached_lives_on() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.lose_tokenizer()
    driver.tick(seconds=5)
    driver.lost = False
    driver.attach(request, len(request.output), "tokenizer-1")
    driver.tick(seconds=6)
    driver.run()
    driver.assert_clean()


def test_a_link_that_comes_back_brings_what_was_lost_on_it() -> None:
    driver = Driver()
    running, ending = driver.ask(10, max_tokens=30), driver.ask(10, max_tokens=6)
    for _ in range(4):
        driver.step()
        driver.ack(running)
        driver.ack(ending)
    driver.lose_tokenizer()
    for _ in range(8):
        driver.step()
    assert not ending.terminals
    driver.regain_tokenizer()
    assert ending.terminals
    driver.run()
    driver.assert_clean()


def test_a_tokenizer_that_restarted_must_attach() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=400)
    driver.step()
    driver.lose_tokenizer()
    driver.regain_tokenizer(incarnation=b"another")
    driver.tick(seconds=10.3)
    assert driver.core.stats().finished == 1


def test_a_later_attempt_elsewhere_takes_the_request_over() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=12)
    for _ in range(6):
        driver.step()
    request.attempt = 2
    generate = replace(request.generate("tokenizer-1"), confirmed_ids=b"")
    driver.mail(generate)
    accepted, batch = received(driver, "tokenizer-1")
    assert isinstance(accepted, Accepted)
    assert isinstance(batch, TokenBatch)
    assert batch.rows[0].pos == 0
    driver.run()
    driver.assert_clean()


def test_a_continuation_goes_on_behind_its_confirmed_tokens() -> None:
    first = Driver()
    whole = first.ask(20, max_tokens=30)
    first.run()
    second = Driver()
    part = second.ask(whole.prompt, max_tokens=30)
    second.abort(part)
    again = swap(part, rid=b"c" * 16, output=whole.output[:11], terminals=[])
    second.requests = {again.rid: again}
    second.mail(again.generate(TOKENIZER))
    second.run()
    assert again.output == whole.output
    assert second.last(Finished).prompt_tokens == 20
    again.verify(97)


@pytest.mark.parametrize(("max_tokens", "stops"), [(5, frozenset[int]()), (50, "last")])
def test_a_continuation_that_is_complete_ends_at_once(
    max_tokens: int, stops: frozenset[int] | str
) -> None:
    driver = Driver()
    request = driver.ask(20, max_tokens=5)
    driver.run()
    stop_ids = frozenset([request.output[-1]]) if stops == "last" else frozenset[int]()
    again = swap(request, rid=b"c" * 16, max_tokens=max_tokens, stop_ids=stop_ids, terminals=[])
    driver.requests[again.rid] = again
    driver.mail(again.generate(TOKENIZER))
    assert again.terminals
    assert again.terminals[0].final_pos == 5
    driver.run()
    driver.assert_clean()


def test_a_lost_executor_costs_time_and_nothing_else() -> None:
    driver = Driver(replace(CONFIG, max_rows=3))
    for _ in range(5):
        driver.ask(30, max_tokens=20)
    for _ in range(9):
        driver.step()
    driver.tick()
    epoch = driver.core.group.engine_epoch
    driver.lose_executor()
    assert not driver.core.stats().ready
    driver.tick()
    assert not driver.steps
    driver.load()
    assert driver.last(Load).engine_epoch == epoch + 1
    driver.run()
    inits = [init for step in driver.all_steps for init in step.init if init.epoch == 1]
    assert inits
    assert {init.prompt_len for init in inits} == {30}
    driver.assert_clean()


def test_results_of_an_older_epoch_change_nothing() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=20)
    driver.tick()
    step = driver.steps[0]
    late = driver.device.body(step)
    driver.lose_executor()
    driver.load()
    driver.mail(late, EXECUTOR)
    driver.run()
    driver.assert_clean()


def test_duplicate_results_are_dropped() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=6)
    driver.tick()
    result = driver.body()
    driver.mail(result, EXECUTOR)
    driver.tail()
    driver.run()
    driver.assert_clean()


@pytest.mark.parametrize("fault", ["error", "rows", "tokens", "position", "vocabulary", "order"])
def test_a_result_that_cannot_be_right_starts_the_engine_anew(fault: str) -> None:
    driver = Driver()
    driver.ask(10, max_tokens=20)
    driver.tick()
    good = driver.device.body(driver.steps.popleft())
    rows = np.frombuffer(good.rows, RESULT).copy()
    rows["kv_len"] = 99
    driver.mail(
        {
            "error": replace(good, status=StepStatus.ERROR, error="device fault"),
            "rows": replace(good, rows=good.rows * 2),
            "tokens": replace(good, tokens=good.tokens * 2),
            "position": replace(good, rows=rows.tobytes()),
            "vocabulary": replace(good, tokens=b"\xff\xff\xff\x7f"),
            "order": replace(good, step_id=good.step_id + 1),
        }[fault],
        EXECUTOR,
    )
    assert driver.last(Reset).engine_epoch == driver.core.group.engine_epoch
    driver.run()
    driver.assert_clean()


@pytest.mark.parametrize("field", ["kv_len", "num_tokens"])
def test_a_decode_row_brings_a_token_for_each_position(field: str) -> None:
    driver = Driver()
    driver.ask(10, max_tokens=20)
    driver.tick()
    driver.body()
    driver.tail()
    good = driver.device.body(driver.steps.popleft())
    rows = np.frombuffer(good.rows, RESULT).copy()
    rows[field] -= 1
    tokens = b"" if field == "num_tokens" else good.tokens
    driver.mail(replace(good, rows=rows.tobytes(), tokens=tokens), EXECUTOR)
    assert len(driver.messages(Reset)) == 1
    driver.run()
    driver.assert_clean()


def test_a_chunk_in_the_middle_of_a_prompt_brings_no_token() -> None:
    driver = Driver()
    driver.ask(40, max_tokens=4)
    driver.tick()
    good = driver.device.body(driver.steps.popleft())
    rows = np.frombuffer(good.rows, RESULT).copy()
    rows["num_tokens"] = 1
    driver.mail(replace(good, rows=rows.tobytes(), tokens=b"\0\0\0\0"), EXECUTOR)
    assert len(driver.messages(Reset)) == 1
    driver.run()
    driver.assert_clean()


def test_a_request_in_two_failing_steps_is_failed_and_the_others_go_on() -> None:
    driver = Driver()
    others = [driver.ask(10, max_tokens=20) for _ in range(3)]
    suspect = driver.ask(10, max_tokens=20)
    others += [driver.ask(10, max_tokens=20) for _ in range(3)]
    for _ in range(200):
        driver.tick()
        if not driver.steps:
            break
        live = driver.core.registry.live.get(suspect.rid)
        if live and live.rid in np.frombuffer(driver.steps[0].rows, ROW)["rid"]:
            result = driver.device.body(driver.steps.popleft())
            driver.mail(replace(result, status=StepStatus.ERROR, error="boom"), EXECUTOR)
        else:
            driver.body()
            driver.tail()
    (failed,) = suspect.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.ENGINE_ERROR
    assert all(isinstance(other.terminals[0], Finished) for other in others)
    driver.assert_clean()


def test_progress_between_two_faults_forgives_the_first() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=20)
    for _ in range(2):
        for _ in range(4):
            driver.step()
        driver.tick()
        step = driver.steps.popleft()
        result = driver.device.body(step)
        driver.mail(replace(result, status=StepStatus.ERROR, error="boom"), EXECUTOR)
    driver.run()
    assert len(request.output) == 20
    driver.assert_clean()


def test_an_executor_that_hangs_is_taken_for_dead() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.tick()
    driver.tick(seconds=59)
    assert not driver.messages(Shutdown)
    driver.tick(seconds=2)
    assert [send.peer for send in driver.sent if isinstance(send.message, Shutdown)] == [EXECUTOR]
    driver.lose_executor()
    driver.load()
    driver.run()
    driver.assert_clean()


def test_once_steps_are_known_to_be_fast_a_hang_is_found_sooner() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=100)
    for _ in range(40):
        driver.step()
    driver.tick(seconds=CONFIG.hang_s - 0.5)
    assert not driver.messages(Shutdown)
    driver.tick(seconds=1)
    assert [send.peer for send in driver.sent if isinstance(send.message, Shutdown)] == [EXECUTOR]
    driver.lose_executor()
    driver.load()
    driver.run()
    driver.assert_clean()


def test_without_an_engine_the_deadline_ends_the_wait() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=20)
    driver.tick()
    driver.lose_executor()
    driver.tick(seconds=119)
    assert not request.terminals
    driver.tick(seconds=2)
    (failed,) = request.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.ENGINE_RESTARTED
    assert failed.retry_after_s > 0


def test_a_callers_deadline_ends_a_wait_but_not_a_running_request() -> None:
    driver = Driver(replace(CONFIG, max_rows=1))
    running, waiting = driver.ask(10, max_tokens=200), driver.ask(10)
    driver.tick()
    for request in (running, waiting):
        live = driver.core.registry.live[request.rid]
        live.generate = replace(live.generate, deadline_ns=driver.now + 1)
    driver.tick(seconds=1)
    (failed,) = waiting.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.DEADLINE
    assert not running.terminals


def test_a_client_that_takes_no_tokens_stops_its_own_request_only() -> None:
    driver = Driver(max_unacked=5)
    slow, quick = driver.ask(10, max_tokens=30), driver.ask(10, max_tokens=30)
    for _ in range(40):
        driver.step()
        driver.ack(quick)
    assert quick.terminals
    assert 5 <= len(slow.output) <= 5 + CONFIG.depth
    driver.ack(slow)
    for _ in range(40):
        driver.step()
        driver.ack(slow)
    driver.assert_clean()


def test_clients_that_take_no_tokens_do_not_keep_others_out() -> None:
    driver = Driver(replace(CONFIG, max_rows=2), max_unacked=5)
    slow = [driver.ask(10, max_tokens=30) for _ in range(2)]
    for _ in range(12):
        driver.step()
    waiting = driver.ask(10, max_tokens=4)
    for _ in range(12):
        driver.step()
        driver.ack(waiting)
    assert waiting.terminals
    for _ in range(60):
        driver.step()
        for request in slow:
            driver.ack(request)
    driver.assert_clean()


def test_an_orphan_that_was_given_up_is_run_anew_when_somebody_asks() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=60)
    for _ in range(4):
        driver.step()
    driver.lose_tokenizer()
    driver.tick(seconds=11)
    assert request.rid not in driver.core.registry.live
    driver.regain_tokenizer()
    driver.run()
    assert len(request.output) == 60
    driver.assert_clean()


def test_a_client_that_never_takes_its_tokens_is_failed_in_the_end() -> None:
    driver = Driver(max_unacked=5)
    slow = driver.ask(10, max_tokens=30)
    for _ in range(20):
        driver.step()
    driver.tick(seconds=121)
    (failed,) = slow.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.SLOW_CONSUMER


def park(driver: Driver) -> SimRequest:
    """A request far ahead of its client has given its place to another one."""
    slow = driver.ask(10, max_tokens=30)
    for _ in range(12):
        driver.step()
    assert len(slow.output) >= 5
    other = driver.ask(10, max_tokens=2)
    while not other.terminals:
        driver.step()
    assert not driver.is_resident(slow)
    return slow


def test_a_parked_request_whose_client_takes_nothing_is_failed_as_slow() -> None:
    driver = Driver(replace(CONFIG, max_rows=1, deadline_s=60), max_unacked=5)
    slow = park(driver)
    driver.tick(seconds=50)
    assert not slow.terminals
    driver.ack(slow, 1)  # not enough: it stays where it is
    driver.run()
    assert not driver.is_resident(slow)
    driver.tick(seconds=11)
    (failed,) = slow.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.SLOW_CONSUMER
    driver.assert_clean()


def test_a_client_that_takes_its_tokens_late_has_the_time_from_there_on() -> None:
    driver = Driver(replace(CONFIG, max_rows=1, deadline_s=60), max_unacked=5)
    slow = park(driver)
    driver.tick(seconds=55)
    hog = driver.ask(10, max_tokens=4)
    driver.tick()  # somebody else has the place
    driver.ack(slow)
    driver.tick(seconds=20)
    assert not slow.terminals
    while not slow.terminals:
        driver.step()
        driver.ack(slow)
        driver.ack(hog)
    assert len(slow.output) == 30
    driver.run()
    driver.assert_clean()
