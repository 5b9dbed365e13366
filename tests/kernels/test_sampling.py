"""Sampling kernels against their references, and what users of sampling rely on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling.gumbel_noise import gumbel_noise
from kernels.sampling.gumbel_noise_ref import gumbel_noise_ref
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.penalties_ref import apply_penalties_ref
from kernels.sampling.philox import PURPOSE_SAMPLE, philox_bits
from kernels.sampling.philox_ref import philox_bits_ref, philox_block
from kernels.sampling.sample_tokens import Draws, sample_tokens
from kernels.sampling.sample_tokens_ref import sample_tokens_ref
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.token_logprobs_ref import token_logprobs_ref

VOCAB = 700


def draws(rows: int, **values: object) -> Draws:
    """Plain sampling at temperature 1, with some fields replaced for all rows or by row."""
    plain = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 7,
        "sub_index": 0,
        "position": list(range(rows)),
    }
    floats = {"temperature", "top_p", "min_p"}
    return Draws(
        **{
            name: torch.tensor(value, dtype=torch.float32 if name in floats else torch.int64)
            .expand(rows)
            .clone()
            for name, value in (plain | values).items()
        }
    )


def some_logits(rows: int, *, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def mixed_draws(rows: int) -> Draws:
    return draws(
        rows,
        temperature=[(0.0, 0.3, 1.0, 2.0)[i % 4] for i in range(rows)],
        top_k=[(0, 1, 5, 2000)[i // 2 % 4] for i in range(rows)],
        top_p=[(1.0, 0.9, 0.05, 0.9999)[i // 3 % 4] for i in range(rows)],
        min_p=[(0.0, 0.05, 1.0)[i // 5 % 3] for i in range(rows)],
        seed=[2**63 - 1 - i for i in range(rows)],
    )


def test_philox_repeats_the_published_known_answers() -> None:
    ones = 2**64 - 1
    assert philox_block((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )
    assert philox_block((ones, ones, ones, ones), (ones, ones)) == (
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    )


@pytest.mark.parametrize("num", [0, 1, 2, 7, 64])
def test_bits_are_those_of_the_reference(num: int) -> None:
    for seed, position in ((0, 0), (2**63 - 1, 5), (123, 2**20)):
        bits = philox_bits(seed, 3, position=position, purpose=PURPOSE_SAMPLE, num=num)
        expected = philox_bits_ref(seed, 3, position=position, purpose=PURPOSE_SAMPLE, num=num)
        assert bits.tolist() == expected


def test_noise_is_that_of_the_reference_and_finite() -> None:
    noise = gumbel_noise(11, 1, position=9, purpose=0, num=3000)
    assert torch.equal(noise, gumbel_noise_ref(11, 1, position=9, purpose=0, num=3000))
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.1


def test_every_part_of_the_key_changes_the_noise() -> None:
    base = {"position": 4, "purpose": 0, "num": 8}
    noises = [
        gumbel_noise(1, 0, **base),
        gumbel_noise(2, 0, **base),
        gumbel_noise(1, 1, **base),
        gumbel_noise(1, 0, **base | {"position": 5}),
        gumbel_noise(1, 0, **base | {"purpose": 1}),
    ]
    assert len({tuple(noise.tolist()) for noise in noises}) == len(noises)


def test_ids_are_those_of_the_reference_for_mixed_parameters() -> None:
    logits, rows = some_logits(24), mixed_draws(24)
    assert sample_tokens(logits, rows).tolist() == sample_tokens_ref(logits, rows).tolist()


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    logits, rows = some_logits(24, seed=1), mixed_draws(24)
    together = sample_tokens(logits, rows)
    _, _, together_top = token_logprobs(logits, together, 20)
    for i in range(24):
        alone = sample_tokens(logits[i : i + 1], Draws(*(v[i : i + 1] for v in rows)))
        assert int(alone) == int(together[i])
        _, _, top = token_logprobs(logits[i : i + 1], alone, 20)
        assert torch.equal(top[0], together_top[i])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    shuffled = sample_tokens(logits[order], Draws(*(v[order] for v in rows)))
    assert torch.equal(shuffled, together[order])


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [17, 40, 699]] = 5.0
    logits[2] = -0.0
    logits[2, 3] = 0.0
    greedy = sample_tokens(logits, draws(3, temperature=0.0))
    assert greedy.tolist() == [17, 17, 0]
    top_two = {
        int(sample_tokens(logits[:1], draws(1, top_k=2, temperature=9.0, position=[p])))
        for p in range(64)
    }
    assert top_two == {17, 40}
    _, top_ids, _ = token_logprobs(logits, greedy, 4)
    assert top_ids.tolist() == [[17, 40, 699, 0], [17, 40, 699, 0], [0, 1, 2, 3]]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = some_logits(64, seed=2)
    cold = sample_tokens(logits, draws(64, temperature=1e-6))
    assert torch.equal(cold, sample_tokens(logits, draws(64, temperature=0.0)))
    assert torch.equal(cold, logits.argmax(dim=1))


def test_a_banned_id_is_never_drawn() -> None:
    logits = torch.zeros(200, 4)
    logits[:, 1] = float("-inf")
    ids = sample_tokens(logits, draws(200, temperature=50.0, top_p=0.999))
    assert set(ids.tolist()) == {0, 2, 3}


def chi_square(ids: Tensor, probabilities: np.ndarray) -> float:
    counts = np.bincount(ids.numpy(), minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    expected = probabilities[kept] * len(ids)
    return float(((counts[kept] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"temperature": 2.0}, 8),
        ({"top_k": 3}, 3),
        ({"top_p": 0.8}, None),
        ({"min_p": 0.2}, None),
        ({"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.02}, None),
    ],
)
def test_draws_follow_the_distribution(values: dict[str, float], kept: int | None) -> None:
    num = 3000
    logits = some_logits(1, vocab=8, seed=4, scale=1.2)
    weights = (logits[0].double() / values.get("temperature", 1.0)).softmax(0).numpy()
    order = np.argsort(-weights)
    keep = weights >= values.get("min_p", 0.0) * weights.max()
    rank = np.empty(8, dtype=int)
    rank[order] = np.arange(8)
    keep &= rank < values.get("top_k", 8)
    left = np.where(keep, weights, 0)
    before = np.cumsum(left[order]) - left[order]
    keep[order] &= before < values.get("top_p", 1.0) * left.sum()
    expected = np.where(keep, weights, 0) / weights[keep].sum()
    assert kept is None or keep.sum() == kept
    ids = sample_tokens(logits.expand(num, 8), draws(num, **values))
    # 99.9 % point of chi-square with 7 degrees of freedom; seeds are fixed
    assert chi_square(ids, expected) < 24.3


def test_successive_positions_and_seeds_are_uncorrelated() -> None:
    logits = torch.zeros(4096, 2)
    by_position = sample_tokens(logits, draws(4096)).numpy()
    by_seed = sample_tokens(logits, draws(4096, seed=list(range(4096)), position=1)).numpy()
    for bits in (by_position, by_seed):
        pairs = np.bincount(bits[:-1] * 2 + bits[1:], minlength=4) - 4095 / 4
        assert float((pairs**2 / (4095 / 4)).sum()) < 16.3  # 99.9 %, 3 degrees of freedom


def test_penalties_are_those_of_the_reference() -> None:
    logits = some_logits(3, vocab=11)
    generator = torch.Generator().manual_seed(5)
    values = {
        "output_counts": torch.randint(0, 3, (3, 11), generator=generator, dtype=torch.int32),
        "in_prompt": torch.rand(3, 11, generator=generator) < 0.3,
        "presence": torch.tensor([0.0, 0.5, -1.0]),
        "frequency": torch.tensor([0.0, 0.25, 2.0]),
        "repetition": torch.tensor([1.0, 1.3, 0.7]),
    }
    assert torch.equal(apply_penalties(logits, **values), apply_penalties_ref(logits, **values))


def test_neutral_penalties_change_nothing() -> None:
    logits = some_logits(1, vocab=11)
    counts = torch.ones(1, 11, dtype=torch.int32)
    after = apply_penalties(
        logits,
        output_counts=counts,
        in_prompt=counts > 0,
        presence=torch.zeros(1),
        frequency=torch.zeros(1),
        repetition=torch.ones(1),
    )
    assert torch.equal(after, logits)


def test_logprobs_are_those_of_the_reference() -> None:
    logits = some_logits(5, seed=6)
    ids = torch.tensor([0, 5, 699, 3, 3])
    for num_top in (0, 1, 20):
        got = token_logprobs(logits, ids, num_top)
        expected = token_logprobs_ref(logits, ids, num_top)
        assert torch.equal(got[1], expected[1])
        torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(got[2], expected[2], atol=1e-5, rtol=0)


def test_wrong_shapes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="logits"):
        sample_tokens(torch.zeros(4), draws(4))
    with pytest.raises(ValueError, match=r"draws\.temperature"):
        sample_tokens(torch.zeros(2, 4), draws(3))
    with pytest.raises(ValueError, match="num_top"):
        token_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), 5)
    with pytest.raises(ValueError, match="output_counts"):
        apply_penalties(
            torch.zeros(1, 4),
            output_counts=torch.zeros(1, 3, dtype=torch.int32),
            in_prompt=torch.zeros(1, 4, dtype=torch.bool),
            presence=torch.zeros(1),
            frequency=torch.zeros(1),
            repetition=torch.ones(1),
        )
