"""How requests end: once, at the earliest place, with nothing behind it."""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import (
    Abort,
    DoneReason,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    StepStatus,
    TokenBatch,
)
from deepmesh.wire.packed import RESULT, pack_ids
from tests.core.driver import CONFIG, EXECUTOR, VOCAB, Driver


def reason(driver: Driver) -> FinishReason:
    return driver.last(Finished).reason


def probe(prompt: list[int], seed: int, count: int, *, grammar: bool = False) -> list[int]:
    """What the oracle will say."""
    from services.scheduler.sim.requests import SimRequest

    return SimRequest(b"", prompt, count, seed=seed, grammar=grammar).expected(VOCAB)[0]


def answer(driver: Driver, reason: DoneReason, row: int = 0) -> None:
    """Run the body of the oldest step, and let the device give this reason for one row."""
    step = driver.steps.popleft()
    result = driver.device.body(step)
    driver.tails.append(step)
    rows = np.frombuffer(result.rows, RESULT).copy()
    rows["done_reason"][row] = reason
    driver.mail(replace(result, rows=rows.tobytes()), EXECUTOR)
    driver.tail()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_id_ends_the_output_and_is_part_of_it(depth: int) -> None:
    driver = Driver(replace(CONFIG, depth=depth))
    prompt = [5, 6, 7]
    output = probe(prompt, 1, 20)
    at = next(i for i in range(3, 20) if output[i] not in output[:i])
    request = driver.ask(prompt, max_tokens=20, stop_ids=frozenset([output[at]]))
    driver.run()
    assert request.output == output[: at + 1]
    assert reason(driver) == FinishReason.STOP
    driver.assert_clean()


def test_a_stop_id_beats_the_length_at_the_same_place() -> None:
    driver = Driver()
    output = probe([5, 6, 7], 1, 4)
    request = driver.ask([5, 6, 7], max_tokens=4, stop_ids=frozenset([output[3]]))
    driver.run()
    assert (len(request.output), reason(driver)) == (4, FinishReason.STOP)


def test_a_stop_id_below_min_tokens_does_not_end_it() -> None:
    driver = Driver()
    output = probe([5, 6, 7], 1, 2)
    request = driver.ask(
        [5, 6, 7], max_tokens=6, min_tokens=3, stop_ids=frozenset([output[0], output[1]])
    )
    driver.run()
    assert len(request.output) >= 3
    driver.assert_clean()


def test_a_stop_string_cuts_the_output_and_what_runs_is_overrun() -> None:
    driver = Driver(replace(CONFIG, depth=3))
    request = driver.ask(10, max_tokens=50, stop_at=2)
    for _ in range(5):
        driver.tick()
        driver.body()
        driver.tail()
    seen = len(request.output)
    driver.stop_at(request, 2)
    assert driver.last(Finished).final_pos == 2
    driver.run()
    assert len(request.output) == seen
    driver.assert_clean()


@pytest.mark.parametrize("moment", ["waiting", "prefill", "both in flight", "decode", "ended"])
def test_abort_at_any_moment_answers_at_once_and_frees_everything(moment: str) -> None:
    driver = Driver(replace(CONFIG, max_rows=1))
    if moment == "waiting":
        other = driver.ask(10, max_tokens=5)
        driver.tick()
    request = driver.ask(50, max_tokens=40)
    if moment in ("prefill", "both in flight", "decode"):
        driver.tick()
    if moment == "prefill":
        driver.body()
        driver.tail()
    if moment == "decode":
        for _ in range(8):
            driver.step()
        driver.tick()
    if moment == "ended":
        driver.run()
    driver.abort(request)
    assert len(request.terminals) == 1
    assert request.terminals[0].final_pos == len(request.output)
    driver.run()
    if moment == "waiting":
        assert other.terminals
    driver.assert_clean()


def test_abort_of_a_request_that_waits_to_be_preempted() -> None:
    driver = Driver(replace(CONFIG, depth=3, prefix_cache=False), num_global_blocks=10)
    driver.ask(16, max_tokens=40)
    second = driver.ask(16, max_tokens=40)
    assert driver.core.engine is not None
    leaving = driver.core.engine.residency.table.leaving
    while not leaving.any():
        driver.tick()
        driver.body()
        driver.tail()
        driver.tick()
    driver.abort(second)
    assert second.terminals
    driver.run()
    driver.assert_clean()


def test_a_tokenizer_that_lost_a_request_to_another_cannot_end_it() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=4)
    driver.step()
    driver.attach(request, 0, "tokenizer-1")
    driver.abort(request)
    driver.stop_at(request, 1)
    driver.run()
    assert reason(driver) == FinishReason.LENGTH
    driver.ack(request, done=True)
    assert request.rid in driver.core.registry.ended
    driver.assert_clean()


def test_an_abort_from_a_tokenizer_that_does_not_know_the_request_is_meant() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=40)
    driver.step()
    driver.mail(Abort(request.rid), "tokenizer-1")
    assert reason(driver) == FinishReason.ABORT
    driver.run()
    driver.assert_clean()


def test_logits_that_are_not_finite_fail_that_request_alone() -> None:
    driver = Driver()
    bad, good = driver.ask(10, max_tokens=6), driver.ask(10, max_tokens=6)
    driver.tick()
    step = driver.steps.popleft()
    result = driver.device.body(step)
    driver.tails.append(step)
    rows = np.frombuffer(result.rows, RESULT).copy()
    rows["done_reason"][0], rows["num_tokens"][0] = DoneReason.ERROR, 0
    driver.mail(replace(result, rows=rows.tobytes(), tokens=result.tokens[4:]), EXECUTOR)
    (failed,) = bad.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.ENGINE_ERROR
    driver.run()
    assert good.terminals
    driver.assert_clean()


def test_missed_masks_make_null_rows_that_are_tried_again() -> None:
    driver = Driver(replace(CONFIG, depth=3))
    request = driver.ask(20, max_tokens=6, grammar=True)
    misses = iter([True, True, False, True, False, False, True])
    for _ in range(40):
        driver.tick()
        if driver.steps:
            step = driver.steps.popleft()
            driver.tails.append(step)
            result = driver.device.body(step, unmasked=lambda _: next(misses, False))
            driver.mail(result, EXECUTOR)
            driver.tail()
    assert driver.device.null_rows >= 4
    assert len(request.output) == 6
    driver.assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("draft_len", [0, 3])
def test_a_complete_grammar_ends_the_output_behind_its_last_token(
    depth: int, draft_len: int
) -> None:
    driver = Driver(replace(CONFIG, depth=depth), draft_len=draft_len)
    request = driver.ask(20, max_tokens=12, grammar=True, grammar_len=5)
    driver.run()
    assert (len(request.output), reason(driver)) == (5, FinishReason.GRAMMAR)
    assert driver.last(Finished).final_pos == 5
    driver.assert_clean()


def test_a_complete_grammar_beats_the_length_at_the_same_place() -> None:
    driver = Driver()
    request = driver.ask(20, max_tokens=5, grammar=True, grammar_len=5)
    driver.run()
    assert (len(request.output), reason(driver)) == (5, FinishReason.GRAMMAR)


def test_the_length_beats_a_grammar_that_would_be_complete_later() -> None:
    driver = Driver(draft_len=3)
    request = driver.ask(20, max_tokens=4, grammar=True, grammar_len=5)
    driver.run()
    assert (len(request.output), reason(driver)) == (4, FinishReason.LENGTH)


def test_a_stop_id_beats_a_complete_grammar_at_the_same_place() -> None:
    driver = Driver(replace(CONFIG, depth=1))
    output = probe([5, 6, 7], 1, 3, grammar=True)
    stop = frozenset([output[1]])
    request = driver.ask([5, 6, 7], max_tokens=9, grammar=True, stop_ids=stop)
    driver.tick()
    answer(driver, DoneReason.NONE)
    driver.tick()
    answer(driver, DoneReason.GRAMMAR)
    assert (request.output, reason(driver)) == (output[:2], FinishReason.STOP)


def test_a_grammar_that_is_complete_before_any_token_ends_the_output_empty() -> None:
    driver = Driver(replace(CONFIG, depth=1))
    request = driver.ask(8, max_tokens=9, grammar=True)
    driver.tick()
    step = driver.steps.popleft()
    result = driver.device.body(step)
    driver.tails.append(step)
    rows = np.frombuffer(result.rows, RESULT).copy()
    rows["done_reason"], rows["num_tokens"] = DoneReason.GRAMMAR, 0
    driver.mail(replace(result, rows=rows.tobytes(), tokens=b""), EXECUTOR)
    driver.tail()
    assert (request.output, reason(driver)) == ([], FinishReason.GRAMMAR)


def test_a_grammar_error_fails_that_request_alone() -> None:
    driver = Driver(replace(CONFIG, depth=1))
    bad = driver.ask(10, max_tokens=6, grammar=True)
    good = driver.ask(10, max_tokens=6)
    driver.tick()
    answer(driver, DoneReason.GRAMMAR_ERROR)
    (failed,) = bad.terminals
    assert isinstance(failed, Failed)
    assert (failed.code, failed.final_pos) == (ErrorCode.GRAMMAR, len(bad.output))
    driver.run()
    assert len(good.output) == 6
    driver.assert_clean()


def test_a_device_that_completes_a_grammar_where_there_is_none_is_not_believed() -> None:
    driver = Driver(replace(CONFIG, depth=1))
    request = driver.ask(10, max_tokens=6)
    driver.tick()
    answer(driver, DoneReason.GRAMMAR)
    (failed,) = request.terminals
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.INTERNAL


def test_tokens_behind_an_end_are_counted_as_overrun() -> None:
    driver = Driver(replace(CONFIG, depth=2))
    request = driver.ask(10, max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.tick()
    in_flight = len(driver.steps)
    driver.abort(request)
    for _ in range(in_flight):
        driver.body()  # they were on their way before the abort
        driver.tail()
    assert in_flight == 2
    assert driver.core.stats().overrun_tokens == in_flight
    driver.assert_clean()


def test_a_skipped_step_is_a_step_of_null_rows() -> None:
    driver = Driver(replace(CONFIG, depth=1))
    request = driver.ask(10, max_tokens=6)
    driver.tick()
    step = driver.steps.popleft()
    result = driver.device.body(replace(step, rows=b""))
    driver.tails.append(step)
    driver.mail(replace(result, status=StepStatus.SKIPPED), EXECUTOR)
    driver.tail()
    driver.run()
    assert request.terminals
    driver.assert_clean()


def test_log_probabilities_go_with_their_tokens() -> None:
    driver = Driver()
    plain = driver.ask(10, max_tokens=3)
    wanted = driver.ask(10, max_tokens=3)
    live = driver.core.registry.live[wanted.rid]
    live.generate = replace(live.generate, n_logprobs=2)
    driver.tick()
    position = 0
    while driver.steps:
        step = driver.steps.popleft()
        result = driver.device.body(step)
        driver.tails.append(step)
        rows = np.frombuffer(result.rows, RESULT)
        is_wanted = np.repeat(rows["rid"] == live.rid, rows["num_tokens"])
        values = np.arange(position, position + len(is_wanted), dtype=np.float32)
        position += len(is_wanted)
        top = np.repeat(values[is_wanted], 2)
        driver.mail(
            replace(
                result,
                logprobs=values.tobytes(),
                top_ids=pack_ids(top.astype(np.int32)),
                top_logprobs=top.tobytes(),
            ),
            EXECUTOR,
        )
        driver.tail()
        driver.tick()
    rows = [row for batch in driver.messages(TokenBatch) for row in batch.rows]
    of_plain = [row for row in rows if row.rid == plain.rid]
    of_wanted = [row for row in rows if row.rid == wanted.rid]
    assert all(row.logprobs == row.top_ids == b"" for row in of_plain)
    probs = np.frombuffer(b"".join(row.logprobs for row in of_wanted), np.float32)
    tops = np.frombuffer(b"".join(row.top_ids for row in of_wanted), np.int32)
    assert probs.tolist() == [1, 3, 5]
    assert tops.tolist() == [1, 1, 3, 3, 5, 5]
    driver.sent.clear()
    driver.attach(wanted, 1, "tokenizer-1")
    (row,) = driver.last(TokenBatch).rows
    assert np.frombuffer(row.logprobs, np.float32).tolist() == [3, 5]
    assert np.frombuffer(row.top_ids, np.int32).tolist() == [3, 3, 5, 5]


def test_the_report_of_an_end_has_the_times_of_its_stages() -> None:
    driver = Driver()
    driver.ask(40, max_tokens=3)
    driver.run()
    (report,) = driver.ended()
    stamps = [report.received_ns, report.admitted_ns, report.first_token_ns, report.ended_ns]
    assert stamps == sorted(stamps)
    assert stamps[0] < stamps[2] < stamps[3]
    assert (report.first_step, report.last_step) == (1, len(driver.all_steps))
    assert (report.outcome, report.output_tokens) == ("length", 3)
