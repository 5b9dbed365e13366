"""What is sent again, and what a request that comes again begins with."""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import ErrorCode, Failed, TokenBatch, TokenRow
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import EXECUTOR, TOKENIZER, Driver, words


def with_logprobs(driver: Driver, output: list[int], steps: int, **fields: bytes) -> SimRequest:
    """A request that goes on behind `output`; the logprob of each new token is its position."""
    request = SimRequest(b"with-logprobs...", words(10), 40, seed=3, output=output)
    driver.requests[request.rid] = request
    driver.mail(replace(request.generate(TOKENIZER), n_logprobs=1, **fields))
    for _ in range(steps):
        driver.tick()
        step = driver.steps.popleft()
        result = driver.device.body(step)
        driver.tails.append(step)
        count = len(result.tokens) // 4
        values = (np.arange(count, dtype="<f4") + len(request.output)).tobytes()
        tops = {"top_ids": result.tokens, "top_logprobs": values}
        driver.mail(replace(result, logprobs=values, **tops), EXECUTOR)
        driver.tail()
    return request


def replayed(driver: Driver, request: SimRequest, from_pos: int) -> list[TokenRow]:
    driver.sent.clear()
    driver.attach(request, from_pos)
    return driver.last(TokenBatch).rows


def test_a_replay_ends_where_a_stop_string_cut_the_output_and_so_do_its_logprobs() -> None:
    driver = Driver()
    request = with_logprobs(driver, [], 6)
    driver.stop_at(request, 3)
    (row,) = replayed(driver, request, 1)
    assert len(row.ids) == len(row.top_ids) == 2 * 4
    for probs in (row.logprobs, row.top_logprobs):
        assert np.frombuffer(probs, "<f4").tolist() == [1, 2]


def test_a_replay_of_a_continuation_has_the_logprobs_that_are_known() -> None:
    driver = Driver()
    output = with_logprobs(Driver(), [], 4).output
    request = with_logprobs(driver, list(output), 3)
    below, above = replayed(driver, request, 0)
    assert (below.pos, len(below.ids), below.logprobs, below.top_ids) == (0, 4 * 4, b"", b"")
    assert (above.pos, above.ids) == (4, above.top_ids)
    assert np.frombuffer(above.logprobs, "<f4").tolist() == [4, 5, 6]
    (row,) = replayed(driver, request, 5)
    assert np.frombuffer(row.logprobs, "<f4").tolist() == [5, 6]


def test_a_continuation_that_brings_its_logprobs_is_replayed_with_all_of_them() -> None:
    """Its tokenizer may be lost next, and the one after it knows nothing of the first tokens."""
    driver, output = Driver(), with_logprobs(Driver(), [], 4).output
    values = np.arange(len(output), dtype="<f4").tobytes()
    probs = {"confirmed_logprobs": values, "confirmed_top_logprobs": values}
    request = with_logprobs(
        driver, list(output), 3, **probs, confirmed_top_ids=np.array(output, "<i4").tobytes()
    )
    (row,) = replayed(driver, request, 0)
    assert row.ids == row.top_ids
    for found in (row.logprobs, row.top_logprobs):
        assert np.frombuffer(found, "<f4").tolist() == list(range(7))


@pytest.mark.parametrize(
    "probs",
    [
        {"confirmed_logprobs": bytes(4)},
        {"confirmed_logprobs": bytes(8), "confirmed_top_ids": bytes(8)},
        {"confirmed_top_logprobs": bytes(8)},
    ],
)
def test_logprobs_that_do_not_fit_the_confirmed_tokens_are_refused(probs: dict[str, bytes]) -> None:
    driver = Driver()
    request = SimRequest(b"short of some...", words(10), 40, seed=3, output=[5, 6])
    driver.requests[request.rid] = request
    driver.mail(replace(request.generate(TOKENIZER), n_logprobs=1, **probs))
    refused = driver.last(Failed)
    assert (refused.code, refused.param) == (ErrorCode.INVALID, "logprobs")


def test_a_continuation_does_not_end_at_a_stop_id_that_came_too_early_to_count() -> None:
    for min_tokens, ends in ((1, True), (2, False)):
        driver = Driver()
        request = SimRequest(b"continued.......", words(10), 40, seed=3, min_tokens=min_tokens)
        request.stop_ids, request.output = frozenset({7}), [3, 7]
        driver.requests[request.rid] = request
        driver.mail(request.generate(TOKENIZER))
        assert bool(request.terminals) == ends


def test_an_abort_that_came_first_is_an_end_like_any_other() -> None:
    driver = Driver()
    request = SimRequest(b"aborted first...", words(10), 40, seed=3)
    driver.requests[request.rid] = request
    driver.abort(request)
    assert not driver.ended()
    driver.mail(request.generate(TOKENIZER))
    assert [report.outcome for report in driver.ended()] == ["abort"]
    driver.assert_clean()
