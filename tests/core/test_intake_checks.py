"""Each value of a Generate that is out of its range is refused, whoever sent it."""

import math

import pytest

from deepmesh.wire.messages import (
    Accepted,
    ErrorCode,
    Failed,
    Generate,
    Grammar,
    SamplingParams,
)
from deepmesh.wire.packed import pack_ids
from tests.core.driver import TOKENIZER, VOCAB, Driver

NAN, INF = math.nan, math.inf
BAD_FIELDS: list[tuple[str, dict[str, object]]] = [
    ("top_logprobs", {"n_logprobs": -2}),
    ("top_logprobs", {"n_logprobs": 21}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**63}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 5}),
    ("stop_token_ids", {"stop_ids": pack_ids([VOCAB])}),
    ("stop_token_ids", {"stop_ids": pack_ids([-1])}),
]
BAD_SAMPLING: list[tuple[str, object]] = [
    *(("temperature", value) for value in (-0.1, NAN, INF)),
    *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN)),
    *(("min_p", value) for value in (-0.1, 1.01, NAN)),
    ("top_k", -1),
    *(("presence_penalty", value) for value in (NAN, INF)),
    *(("frequency_penalty", value) for value in (NAN, -INF)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF)),
    ("logit_bias", [(1, NAN)]),
    ("logit_bias", [(1, INF)]),
    ("logit_bias", [(VOCAB, 1.0)]),
    ("logit_bias", [(-1, 1.0)]),
]


def ask(driver: Driver, **fields: object) -> None:
    values = {"prompt_len": 3, "max_tokens": 4, **fields}
    ids = pack_ids([1, 2, 3])
    driver.mail(Generate(b"r" * 16, 1, TOKENIZER, prompt_ids=ids, **values))  # type: ignore[arg-type]


def check_refused(driver: Driver, param: str) -> Failed:
    assert not driver.messages(Accepted)
    (failed,) = driver.messages(Failed)
    assert (failed.code, failed.param) == (ErrorCode.INVALID, param)
    assert param in failed.detail
    driver.tick()
    assert not driver.steps
    return failed


@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS)
def test_a_field_out_of_its_range_is_refused(param: str, fields: dict[str, object]) -> None:
    driver = Driver()
    ask(driver, **fields)
    check_refused(driver, param)


@pytest.mark.parametrize(("param", "value"), BAD_SAMPLING)
def test_a_sampling_parameter_out_of_its_range_is_refused(param: str, value: object) -> None:
    driver = Driver()
    ask(driver, sampling=SamplingParams(**{param: value}))  # type: ignore[arg-type]
    check_refused(driver, param)


def test_a_grammar_is_refused_while_nobody_can_keep_to_it() -> None:
    driver = Driver(has_masks=False)
    ask(driver, grammar=Grammar("regex", ".*"))
    assert "cannot keep to a grammar" in check_refused(driver, "grammar").detail


def test_a_grammar_waits_for_executors_to_say_whether_they_can_keep_to_it() -> None:
    for has_masks in (False, True):
        driver = Driver(load=False, has_masks=has_masks)
        ask(driver, grammar=Grammar("regex", ".*"))
        assert driver.messages(Accepted)
        driver.load()
        assert [failed.param for failed in driver.messages(Failed)] == ["grammar"] * (not has_masks)


def test_the_ends_of_every_range_are_accepted() -> None:
    ends = (
        SamplingParams(0.0, 0, 1.0, 0.0, -2.0, -2.0, 1e-6, [(0, -100.0), (VOCAB - 1, 100.0)]),
        SamplingParams(2.0, 2**31 - 1, 1e-6, 1.0, 2.0, 2.0, 10.0),
    )
    for sampling, n_logprobs, seed in zip(ends, (-1, 20), (0, 2**63 - 1), strict=True):
        driver = Driver()
        stops = pack_ids([0, VOCAB - 1])
        ask(
            driver,
            sampling=sampling,
            n_logprobs=n_logprobs,
            seed=seed,
            min_tokens=4,
            stop_ids=stops,
        )
        assert driver.messages(Accepted)
        assert not driver.messages(Failed)


def test_ids_are_checked_as_soon_as_the_vocabulary_is_known() -> None:
    driver = Driver(load=False)
    ask(driver, sampling=SamplingParams(logit_bias=[(VOCAB, 1.0)]))
    assert driver.messages(Accepted)
    driver.load()
    (failed,) = driver.messages(Failed)
    assert (failed.code, failed.param) == (ErrorCode.INVALID, "logit_bias")
