"""Logits of a device against an independent implementation, and against the CPU's rounding."""

import pytest

from bench.answers import FIXTURE_ERROR, SLACK, TINY, questions
from bench.logit_errors import bf16_errors, fixture_error


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_of_the_fixture_in_fp32(device: str) -> None:
    assert fixture_error(device) < FIXTURE_ERROR


@pytest.mark.gpu
def test_bf16_is_as_near_to_fp32_as_on_the_cpu() -> None:
    prompts = [one.prompt for one in questions(TINY, 1)][:6]
    ours, on_cpu = bf16_errors(TINY, "cuda", prompts, on_cpu=False)
    assert 0 < ours <= SLACK * on_cpu
