"""What a request's sampling parameters do to its tokens and log-probabilities."""

import numpy as np
import pytest
import torch
from torch import Tensor

from deepmesh.wire.messages import SamplingParams, SlotInit
from deepmesh.wire.packed import pack_ids
from services.executor.sampler import SampleRow, sample

VOCAB = 50


def row(
    sampling: SamplingParams,
    *,
    tokens: list[int],
    prompt_len: int = 1,
    stop_ids: tuple[int, ...] = (),
    min_len: int = 0,
    n_logprobs: int = -1,
    seed: int = 1,
) -> SampleRow:
    init = SlotInit(
        slot=0,
        gen=1,
        rid=1,
        epoch=0,
        ids=pack_ids(tokens),
        prompt_len=prompt_len,
        max_len=100,
        min_len=min_len,
        sampling=sampling,
        seed=seed,
        n_logprobs=n_logprobs,
    )
    return SampleRow(init, frozenset(stop_ids), np.asarray(tokens, np.int32))


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)


def peaks(*ids: int) -> Tensor:
    """Logits falling from the first id to the last, in steps of 1."""
    logits = torch.full((1, VOCAB), -5.0)
    for rank, i in enumerate(ids):
        logits[0, i] = 5.0 - rank
    return logits


def token(logits: Tensor, request: SampleRow) -> int:
    return int(sample(logits, [request]).tokens[0])


def test_greedy_takes_the_best() -> None:
    assert token(peaks(7, 8), row(greedy(), tokens=[3])) == 7


def test_penalties_count_the_output_only() -> None:
    logits = peaks(7, 8, 9)
    both = {"presence_penalty": 0.8, "frequency_penalty": 0.3}
    assert token(logits, row(greedy(**both), tokens=[7, 7, 7], prompt_len=3)) == 7
    assert token(logits, row(greedy(**both), tokens=[3, 7], prompt_len=1)) == 8
    assert token(logits, row(greedy(frequency_penalty=0.6), tokens=[3, 7], prompt_len=1)) == 7
    assert token(logits, row(greedy(frequency_penalty=0.6), tokens=[3, 7, 7], prompt_len=1)) == 8


def test_the_repetition_penalty_counts_the_prompt_too() -> None:
    assert token(peaks(7, 8), row(greedy(repetition_penalty=1.5), tokens=[7])) == 8
    assert token(peaks(7, 8), row(greedy(repetition_penalty=1.5), tokens=[9])) == 7


def test_a_bias_can_force_and_ban_tokens() -> None:
    force = greedy(logit_bias=[(30, 100.0)])
    ban = greedy(logit_bias=[(7, -100.0), (8, -100.0)])
    assert token(peaks(7, 8, 9), row(force, tokens=[3])) == 30
    assert token(peaks(7, 8, 9), row(ban, tokens=[3])) == 9


def test_stop_ids_cannot_come_below_the_minimum_length() -> None:
    logits = peaks(7, 8)
    assert token(logits, row(greedy(), tokens=[1, 2], stop_ids=(7,), min_len=3)) == 8
    assert token(logits, row(greedy(), tokens=[1, 2, 3], stop_ids=(7,), min_len=3)) == 7


def test_logprobs_are_those_of_the_untouched_distribution() -> None:
    logits = peaks(7, 8, 9)
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias=[(9, 20.0)], top_k=1)
    drawn = sample(logits, [row(params, tokens=[1, 7], n_logprobs=3)])
    expected = logits.log_softmax(dim=1)[0]
    assert drawn.tokens.tolist() == [9]
    assert drawn.logprobs[0] == pytest.approx(float(expected[9]))
    assert drawn.top_ids[0].tolist() == [7, 8, 9]
    assert drawn.top_logprobs[0] == pytest.approx(expected[[7, 8, 9]].numpy())


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    logits = peaks(7, 8, 9).repeat(4, 1)
    rows = [row(greedy(), tokens=[1], n_logprobs=n) for n in (-1, 0, 2, 20)]
    drawn = sample(logits, rows)
    assert [len(ids) for ids in drawn.top_ids] == [0, 0, 2, 20]
    assert drawn.logprobs[0] == 0.0
    assert len(set(drawn.logprobs[1:].tolist())) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_mark_their_row_only(bad: float) -> None:
    logits = peaks(7, 8).repeat(3, 1)
    rows = [row(SamplingParams(top_p=0.9), tokens=[1], n_logprobs=2, seed=s) for s in range(3)]
    clean = sample(logits, rows)
    logits[1, 4] = bad
    drawn = sample(logits, rows)
    assert drawn.finite.tolist() == [True, False, True]
    for i in (0, 2):
        assert drawn.tokens[i] == clean.tokens[i]
        assert drawn.logprobs[i] == clean.logprobs[i]


def test_a_row_gives_the_same_bits_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, VOCAB, generator=generator) * 3
    rows = [
        row(
            SamplingParams(
                temperature=(0.0, 0.7, 1.3)[i % 3],
                top_k=(0, 10)[i % 2],
                top_p=(1.0, 0.8)[i % 2],
                frequency_penalty=(0.0, 0.5)[i // 2 % 2],
                logit_bias=[(i, 1.0)] if i % 4 == 0 else [],
            ),
            tokens=[i, 5, 5, 6],
            min_len=(0, 9)[i % 2],
            stop_ids=(1, 2),
            n_logprobs=i % 5 - 1,
            seed=i,
        )
        for i in range(12)
    ]
    together = sample(logits, rows)
    for i in range(12):
        alone = sample(logits[i : i + 1], rows[i : i + 1])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0].tobytes() == together.logprobs[i].tobytes()
        assert alone.top_logprobs[0].tobytes() == together.top_logprobs[i].tobytes()
