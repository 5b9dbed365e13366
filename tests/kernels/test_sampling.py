"""Sampling kernels against their references, and what users of sampling rely on."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.sampling.finite_rows import finite_rows
from kernels.sampling.gumbel_noise import gumbel_noise
from kernels.sampling.gumbel_noise_ref import gumbel_noise_ref
from kernels.sampling.masks import apply_masks
from kernels.sampling.masks_ref import apply_masks_ref
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.penalties_ref import apply_penalties_ref
from kernels.sampling.philox import PURPOSE_SAMPLE, philox_bits
from kernels.sampling.philox_ref import philox_bits_ref, philox_block
from kernels.sampling.sample_tokens import Draws, sample_tokens
from kernels.sampling.sample_tokens_ref import sample_tokens_ref
from kernels.sampling.sample_tokens_torch import sample_tokens_torch
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.token_logprobs_ref import token_logprobs_ref
from kernels.sampling.token_ranks import token_ranks
from kernels.sampling.token_ranks_ref import token_ranks_ref

VOCAB = 700
LEVELS = ("avx512", "avx2", "scalar")
# 99.9 % points of chi-square, by degrees of freedom
CRITICAL = (0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def best_kernels() -> Iterator[None]:
    yield
    native.use()


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
    assert chi_square(ids, expected) < CRITICAL[7]  # seeds are fixed


def test_successive_positions_and_seeds_are_uncorrelated() -> None:
    logits = torch.zeros(4096, 2)
    by_position = sample_tokens(logits, draws(4096)).numpy()
    by_seed = sample_tokens(logits, draws(4096, seed=list(range(4096)), position=1)).numpy()
    for bits in (by_position, by_seed):
        pairs = np.bincount(bits[:-1] * 2 + bits[1:], minlength=4) - 4095 / 4
        assert float((pairs**2 / (4095 / 4)).sum()) < 16.3  # 99.9 %, 3 degrees of freedom


def some_penalties(rows: int, vocab: int) -> dict[str, object]:
    draw = np.random.default_rng(5)
    return {
        "tokens": [draw.integers(0, vocab, 3 + 5 * i).astype(np.int32) for i in range(rows)],
        "prompt_lens": [2 * i for i in range(rows)],
        "presence": torch.tensor([(0.0, 0.5, -1.0)[i % 3] for i in range(rows)]),
        "frequency": torch.tensor([(0.0, 0.25, 2.0)[i // 2 % 3] for i in range(rows)]),
        "repetition": torch.tensor([(1.0, 1.3, 0.7)[i // 3 % 3] for i in range(rows)]),
    }


def test_penalties_are_those_of_the_reference() -> None:
    values = some_penalties(9, 11)
    logits, expected = some_logits(9, vocab=11), some_logits(9, vocab=11)
    apply_penalties(logits, **values)
    apply_penalties_ref(expected, **values)
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, some_logits(9, vocab=11))


def test_neutral_penalties_change_nothing() -> None:
    logits = some_logits(1, vocab=11)
    apply_penalties(
        logits,
        tokens=[np.arange(11, dtype=np.int32)],
        prompt_lens=[5],
        presence=torch.zeros(1),
        frequency=torch.zeros(1),
        repetition=torch.ones(1),
    )
    assert torch.equal(logits, some_logits(1, vocab=11))


@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 700])
def test_masks_are_those_of_the_reference(vocab: int) -> None:
    words = -(-vocab // 32) + 1
    masks = torch.randint(-(2**31), 2**31, (6, words), dtype=torch.int32)
    logits, expected = some_logits(6, vocab=vocab), some_logits(6, vocab=vocab)
    apply_masks(logits, masks)
    apply_masks_ref(expected, masks)
    assert torch.equal(logits, expected)
    assert int(masks[0, 0]) & 1 == int(logits[0, 0] > float("-inf"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 15, 16, 698, 699])
def test_a_row_with_a_number_that_is_none_is_found(bad: float, at: int) -> None:
    logits = some_logits(3)
    logits[1, at] = bad
    assert finite_rows(logits).tolist() == [True, False, True]


def test_logprobs_are_those_of_the_reference() -> None:
    logits = some_logits(5, seed=6)
    ids = torch.tensor([0, 5, 699, 3, 3])
    for num_top in (0, 1, 20):
        got = token_logprobs(logits, ids, num_top)
        expected = token_logprobs_ref(logits, ids, num_top)
        assert torch.equal(got[1], expected[1])
        torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(got[2], expected[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("level", [*LEVELS, native.REFERENCE])
@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 700])
def test_ranks_are_those_of_the_reference(vocab: int, level: str) -> None:
    if level not in (*native.supported_levels(), native.REFERENCE):
        pytest.skip(f"this CPU has no {level}")
    native.use(level)
    logits = some_logits(12, vocab=vocab)
    logits[4:8] = logits[4:8].round()  # ties everywhere, 0 and -0 among them
    ids = torch.tensor([(0, vocab - 1, vocab // 2, vocab // 3)[i % 4] for i in range(12)])
    assert token_ranks(logits, ids).tolist() == token_ranks_ref(logits, ids).tolist()


def test_wrong_shapes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="logits"):
        sample_tokens(torch.zeros(4), draws(4))
    with pytest.raises(ValueError, match=r"draws\.temperature"):
        sample_tokens(torch.zeros(2, 4), draws(3))
    with pytest.raises(ValueError, match="num_top"):
        token_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), 5)
    with pytest.raises(ValueError, match="tokens"):
        apply_penalties(
            torch.zeros(1, 4),
            tokens=[],
            prompt_lens=[],
            presence=torch.zeros(1),
            frequency=torch.zeros(1),
            repetition=torch.ones(1),
        )
    with pytest.raises(ValueError, match="masks"):
        apply_masks(torch.zeros(1, 40), torch.zeros(1, 1, dtype=torch.int32))


# ---------------------------------------------------------------- native kernels


def everything(vocab: int, rows: int = 24) -> list[Tensor]:
    logits, values = some_logits(rows, vocab=vocab, seed=9), some_penalties(rows, vocab)
    ids = sample_tokens(logits, mixed_draws(rows))
    found = [ids, *token_logprobs(logits, ids, min(20, vocab)), finite_rows(logits)]
    found.append(token_ranks(logits, ids))
    apply_penalties(logits, **values)
    return [*found, logits, sample_tokens(logits, mixed_draws(rows))]


@pytest.mark.parametrize("vocab", [1, 7, 16, 4096, 129_280])
def test_all_instruction_levels_give_the_same_bits(vocab: int) -> None:
    native.use("scalar")
    expected = everything(vocab)
    for level in set(LEVELS) & set(native.supported_levels()):
        native.use(level)
        for ours, theirs in zip(everything(vocab), expected, strict=True):
            assert torch.equal(ours, theirs), level


@pytest.mark.parametrize("vocab", [3, 700, 4096, 129_280])
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_ids_are_those_of_torch_for_any_vocabulary(vocab: int, scale: float) -> None:
    logits = some_logits(32, vocab=vocab, seed=8, scale=scale)
    logits[:, : vocab // 3] = float("-inf")
    logits[5] = logits[5].round()  # ties everywhere
    logits[6] = 1.5
    rows = mixed_draws(32)
    assert sample_tokens(logits, rows).tolist() == sample_tokens_torch(logits, rows).tolist()


def test_ids_do_not_depend_on_the_number_of_threads() -> None:
    logits, rows = some_logits(24, vocab=4096), mixed_draws(24)
    alone = sample_tokens(logits, rows)
    torch.set_num_threads(3)
    try:
        assert torch.equal(sample_tokens(logits, rows), alone)
    finally:
        torch.set_num_threads(1)


def test_a_row_that_bans_everything_gives_id_0() -> None:
    logits = torch.full((3, VOCAB), float("-inf"))
    rows = draws(3, temperature=[0.0, 1.0, 1.0], top_p=[1.0, 1.0, 0.5])
    assert sample_tokens(logits, rows).tolist() == [0, 0, 0]
