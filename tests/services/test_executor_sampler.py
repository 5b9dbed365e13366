"""What a request's sampling parameters do to its tokens and log-probabilities."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
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
    mask: list[int] | None = None,
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
    return SampleRow(init, frozenset(stop_ids), np.asarray(tokens, np.int32), _words(mask))


def _words(allowed: list[int] | None) -> NDArray[np.int32] | None:
    if allowed is None:
        return None
    bits = np.zeros(64, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


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


def test_only_allowed_ids_are_sampled() -> None:
    allowed = greedy(allowed_token_ids=pack_ids([9, 20]), logit_bias=[(7, 50.0)])
    assert token(peaks(7, 8, 9), row(allowed, tokens=[3])) == 9


def test_bad_words_are_banned_where_they_would_be_completed() -> None:
    bad = greedy(bad_words=[pack_ids([7]), pack_ids([4, 5, 8])])
    logits = peaks(7, 8, 9)
    assert token(logits, row(bad, tokens=[3, 4, 5], prompt_len=1)) == 9
    assert token(logits, row(bad, tokens=[3, 5, 4], prompt_len=1)) == 8
    assert token(logits, row(bad, tokens=[4, 5], prompt_len=2)) == 8  # of the prompt, not ours


def test_a_mask_bans_what_it_does_not_allow_in_its_row_alone() -> None:
    logits = peaks(7, 8, 9).repeat(3, 1)
    rows = [row(greedy(), tokens=[3], mask=mask) for mask in ([9, 33], None, [8])]
    assert sample(logits, rows).tokens.tolist() == [9, 7, 8]


def test_a_request_that_bans_everything_is_marked() -> None:
    logits = peaks(7, 8).repeat(2, 1)
    nothing = greedy(allowed_token_ids=pack_ids([7]), bad_words=[pack_ids([7])])
    drawn = sample(logits, [row(nothing, tokens=[3], n_logprobs=2), row(greedy(), tokens=[3])])
    assert drawn.finite.tolist() == [False, True]
    assert drawn.tokens[1] == 7
    assert np.isfinite(drawn.top_logprobs[0]).all()


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


def test_no_filter_or_mask_makes_logprobs_infinite() -> None:
    """Of 20 best ids most are outside of top_p 0.3 or of a mask."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, VOCAB, generator=generator) * 3
    rows = [
        row(SamplingParams(top_p=0.3), tokens=[1], n_logprobs=20),
        row(SamplingParams(), tokens=[1], n_logprobs=20, mask=[4, 5]),
    ]
    drawn = sample(logits, rows)
    assert np.isfinite(drawn.logprobs).all()
    assert np.isfinite(np.stack(drawn.top_logprobs)).all()
    assert drawn.tokens[1] in (4, 5)


def test_a_tiny_temperature_is_greedy_whatever_else_is_asked() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(64, VOCAB, generator=generator) * 3
    extras = ({"top_p": 0.3}, {"top_k": 5, "min_p": 0.1}, {"frequency_penalty": 1.0}, {})
    by_temperature = [
        sample(
            logits,
            [
                row(SamplingParams(temperature=t, **extras[i % 4]), tokens=[1, 2, 2], seed=i)
                for i in range(64)
            ],
        ).tokens.tolist()
        for t in (0.0, 1e-6)
    ]
    assert by_temperature[0] == by_temperature[1]


# ---------------------------------------------------------------- distributions

SEEDS = 1000
# 99.9 % points of chi-square, by degrees of freedom
CRITICAL = (0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3)
HISTORY = [2, 3, 3, 5, 5, 5, 0]  # the first two are the prompt


def exact(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """The distribution that the parameters ask for, worked out in plain steps."""
    scores = logits.copy()
    for i in range(len(scores)):
        count = HISTORY[2:].count(i)
        if i in HISTORY:
            factor = params.repetition_penalty
            scores[i] = scores[i] / factor if scores[i] > 0 else scores[i] * factor
        scores[i] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    for i, amount in params.logit_bias:
        scores[i] += amount
    weights = np.exp((scores - scores.max()) / params.temperature)
    weights[weights < params.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0
    reached = np.cumsum(weights[order]) / weights.sum()
    weights[order[np.searchsorted(reached, params.top_p - 1e-9) + 1 :]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_p": 0.85},
        {"top_k": 4},
        {"min_p": 0.15},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 6},
        {"temperature": 1.5, "top_p": 0.95, "min_p": 0.05},
        {"frequency_penalty": 0.6},
        {"presence_penalty": 1.2, "temperature": 0.7},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6, "frequency_penalty": -0.4, "top_p": 0.9},
        {
            "temperature": 1.2,
            "top_k": 8,
            "top_p": 0.97,
            "min_p": 0.01,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.2,
            "logit_bias": [(1, 1.0), (4, -1.0)],
        },
    ],
    ids=lambda params: ",".join(params),
)
def test_tokens_of_a_thousand_seeds_follow_the_exact_distribution(params: dict) -> None:
    generator = torch.Generator().manual_seed(12)
    logits = torch.randn(1, 12, generator=generator) * 1.3
    settings = SamplingParams(**{"temperature": 1.0, **params})
    rows = [row(settings, tokens=HISTORY, prompt_len=2, seed=seed) for seed in range(SEEDS)]
    tokens = sample(logits.repeat(SEEDS, 1), rows).tokens
    expected = exact(logits[0].double().numpy(), settings) * SEEDS
    counts = np.bincount(tokens, minlength=12)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 5)  # too few for the test to hold: one class of their own
    observed = [
        *counts[expected >= 5],
        *([counts[rare].sum()] if expected[rare].sum() >= 5 else []),
    ]
    wanted = [
        *expected[expected >= 5],
        *([expected[rare].sum()] if expected[rare].sum() >= 5 else []),
    ]
    assert len(wanted) > 1
    statistic = ((np.array(observed) - wanted) ** 2 / wanted).sum()
    assert statistic < CRITICAL[len(wanted) - 1]
