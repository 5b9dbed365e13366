"""What is refused, at once and with the field named; what is recognised; what waits."""

import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Drain,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Shutdown,
    TokenBatch,
)
from deepmesh.wire.packed import pack_ids
from tests.core.driver import CONFIG, SECOND, TOKENIZER, VOCAB, Driver


def refusal(driver: Driver, prompt: list[int], **fields: object) -> Failed:
    values = {"max_tokens": 4, "prompt_len": len(prompt), **fields}
    driver.mail(
        Generate(b"r" * 16, 1, TOKENIZER, prompt_ids=pack_ids(prompt), **values)  # type: ignore[arg-type]
    )
    assert not driver.messages(Accepted)
    return driver.last(Failed)


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "param", "text"),
    [
        ([1] * 512, {}, ErrorCode.TOO_LONG, "prompt", "512 tokens"),
        ([1] * 600, {}, ErrorCode.TOO_LONG, "prompt", "600 tokens"),
        ([1] * 500, {"max_tokens": 13}, ErrorCode.INVALID, "max_tokens", "room for 12"),
        ([1], {"max_tokens": 0}, ErrorCode.INVALID, "max_tokens", "at least 1"),
        ([], {}, ErrorCode.INVALID, "prompt", "does not fit"),
        ([1, 2], {"prompt_len": 3}, ErrorCode.INVALID, "prompt", "prompt length 3"),
        ([1, VOCAB], {}, ErrorCode.INVALID, "prompt", f"0..{VOCAB - 1}"),
        ([1, -1], {}, ErrorCode.INVALID, "prompt", f"0..{VOCAB - 1}"),
        ([1], {"stop_ids": pack_ids([VOCAB])}, ErrorCode.INVALID, "stop_token_ids", "stop"),
        ([1], {"stop_ids": b"abc"}, ErrorCode.INVALID, "stop_token_ids", "int32"),
        ([1], {"confirmed_ids": b"abc"}, ErrorCode.INVALID, "prompt", "int32"),
    ],
)
def test_bad_requests_are_refused_with_the_field_named(
    prompt: list[int], fields: dict[str, object], code: ErrorCode, param: str, text: str
) -> None:
    driver = Driver()
    failed = refusal(driver, prompt, **fields)
    assert (failed.code, failed.param) == (code, param)
    assert text in failed.detail
    assert driver.core.stats().failed == 1
    driver.tick()
    assert not driver.steps


def test_a_request_that_no_pool_can_ever_hold_is_refused_at_once() -> None:
    driver = Driver(num_global_blocks=10)
    failed = refusal(driver, [1] * 60, max_tokens=30)
    assert failed.code == ErrorCode.TOO_LONG
    assert "12 global KV blocks, the pool has 10" in failed.detail
    fits = driver.ask(60, max_tokens=20)
    driver.run()
    assert fits.terminals


def test_the_longest_request_that_fits_alone_completes() -> None:
    driver = Driver(num_global_blocks=10, num_window_blocks=5, num_state_blocks=1)
    driver.ask(40, max_tokens=40)
    driver.run()
    driver.assert_clean()


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    driver = Driver(replace(CONFIG, max_waiting=3))
    for _ in range(3):
        driver.ask(10)
    late = driver.ask(10)
    (failed,) = late.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.OVERLOADED
    assert failed.retry_after_s >= 1
    driver.run()


def test_the_same_attempt_again_is_accepted_again_and_runs_once() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=4)
    driver.mail(request.generate(TOKENIZER))
    driver.tick()
    driver.mail(request.generate(TOKENIZER))
    driver.run()
    assert len(driver.messages(Accepted)) == 3
    assert len(driver.ended()) == 1
    driver.assert_clean()


def test_the_latest_tokenizer_that_asks_for_a_request_has_it() -> None:
    """Attempts are counted by each tokenizer for itself: a restarted one begins at 1 again."""
    driver = Driver()
    request = driver.ask(10, max_tokens=8)
    request.attempt = 3
    driver.mail(request.generate(TOKENIZER))
    for _ in range(4):
        driver.step()
    known = list(request.output)
    request.attempt = 1
    driver.mail(replace(request.generate("tokenizer-1"), confirmed_ids=b""), "tokenizer-1")
    driver.run()
    mail = [send.message for send in driver.sent if send.peer == "tokenizer-1"]
    assert isinstance(mail[0], Accepted)
    assert isinstance(mail[1], TokenBatch)
    assert mail[1].rows[0].ids == pack_ids(known)
    assert isinstance(mail[-1], Finished)
    driver.assert_clean()


def test_a_request_that_ended_is_replayed_not_run_again() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=4)
    driver.run()
    steps = len(driver.all_steps)
    generate = request.generate("tokenizer-1")
    driver.mail(replace(generate, confirmed_ids=b"", attempt=2))
    driver.tick()
    assert len(driver.all_steps) == steps
    mail = [send.message for send in driver.sent if send.peer == "tokenizer-1"]
    assert [type(message) for message in mail] == [TokenBatch, Finished]
    assert mail[0].rows[0].ids == pack_ids(request.output)  # type: ignore[union-attr]


def test_an_abort_that_overtakes_its_request_wins() -> None:
    driver = Driver()
    rid = b"q" * 16
    driver.mail(Abort(rid, 1))
    driver.mail(Generate(rid, 1, TOKENIZER, pack_ids([1, 2]), 2))
    assert driver.last(Finished) == Finished(rid, FinishReason.ABORT, 0)
    driver.tick()
    assert not driver.steps


def test_a_later_attempt_or_a_later_time_is_not_the_aborted_one() -> None:
    driver = Driver()
    driver.mail(Abort(b"q" * 16, 1))
    driver.mail(Generate(b"q" * 16, 2, TOKENIZER, pack_ids([1, 2]), 2))
    assert len(driver.messages(Accepted)) == 1
    driver.mail(Abort(b"p" * 16))
    driver.tick(seconds=11)
    driver.mail(Generate(b"p" * 16, 7, TOKENIZER, pack_ids([1, 2]), 2))
    assert len(driver.messages(Accepted)) == 2


def test_requests_wait_for_an_engine_that_loads() -> None:
    driver = Driver(load=False)
    request, wrong = driver.ask(10, max_tokens=4), driver.ask(600)
    driver.tick()
    assert not driver.core.stats().ready
    driver.load()
    (failed,) = wrong.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.TOO_LONG
    driver.requests.pop(wrong.rid)
    driver.run()
    assert request.terminals
    assert driver.core.stats().ready
    driver.assert_clean()


def test_draining_refuses_new_requests_and_finishes_the_rest() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=4)
    driver.tick()
    driver.mail(Drain(), "")
    late = driver.ask(10)
    (failed,) = late.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.OVERLOADED
    assert not driver.core.stats().ready
    assert not driver.core.drained
    driver.run()
    assert driver.core.drained
    driver.requests.pop(late.rid)
    assert request.terminals
    driver.assert_clean()


def test_a_drain_that_takes_too_long_ends_the_rest_as_overloaded() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=400)
    driver.tick()
    driver.mail(Drain(deadline_s=3), "")
    driver.tick(seconds=2)
    assert not request.terminals
    driver.tick(seconds=2)
    (failed,) = request.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.OVERLOADED
    driver.run()
    assert driver.core.drained


def test_shutdown_ends_everything_at_once() -> None:
    driver = Driver()
    running, waiting = driver.ask(10, max_tokens=400), driver.ask(10)
    driver.step()
    driver.mail(Shutdown(), "")
    assert running.terminals
    assert waiting.terminals
    driver.run()
    driver.assert_clean()


def test_stats_tell_load_room_and_counters() -> None:
    driver = Driver(replace(CONFIG, max_rows=1))
    driver.ask(20, max_tokens=4)
    driver.ask(30, max_tokens=4)
    driver.tick()
    stats = driver.core.stats()
    assert (stats.name, stats.model, stats.fingerprint) == ("scheduler-0", "tiny", "weights")
    assert (stats.ready, stats.max_model_len) == (True, 512)
    assert (stats.running, stats.waiting) == (1, 1)
    assert (stats.waiting_tokens, stats.inflight_tokens) == (50, 20)
    assert stats.total_blocks == (64, 64, 32)
    assert stats.free_blocks[0] == 61
    driver.run()
    driver.now += SECOND
    stats = driver.core.stats()
    assert (stats.prompt_tokens, stats.output_tokens, stats.finished) == (50, 8, 2)
    assert (stats.waiting_tokens, stats.inflight_tokens, stats.failed) == (0, 0, 0)
