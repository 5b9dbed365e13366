"""Attention references against naive loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from kernels.attention.compress import pool_pairs
from kernels.attention.index_scores import index_scores
from kernels.attention.pools import RowFormat, RowPool
from kernels.attention.rope import TABLE_POSITIONS, RopeTable, frequencies, rotate
from kernels.attention.select import candidate_blocks, top_k_indices
from kernels.attention.sparse import sparse_attention


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


NEVER = -math.inf
KEYS = 256


def scores_of(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, bf16: bool = False
) -> Tensor:
    """A table of `KEYS` keys for each row of `keys` [num_rows, KEYS, dim], in blocks of 64."""
    num_rows = keys.shape[0]
    table = BlockTable(torch.arange(num_rows * KEYS // 64).view(num_rows, -1), 64, -1)
    rows = torch.arange(queries.shape[0]) % num_rows
    pool = keys.flatten(0, 1).contiguous()
    return index_scores(queries, weights, pool, table, rows, visible, KEYS, bf16=bf16)


def test_rotation_is_a_complex_product() -> None:
    x, position = torch.randn(3, 2, 24), torch.tensor([0, 5, 9000])
    table = RopeTable(frequencies(8, 10000.0))
    found = rotate(x, *table.at(position))
    assert torch.equal(found[..., :16], x[..., :16])
    for token, p in enumerate(position.tolist()):
        for k in range(4):
            angle = float(torch.tensor(float(p)) * frequencies(8, 10000.0)[k])
            pair = complex(*x[token, 1, 16 + 2 * k : 18 + 2 * k].tolist())
            turned = pair * complex(math.cos(angle), math.sin(angle))
            assert found[token, 1, 16 + 2 * k] == pytest.approx(turned.real, abs=1e-5)
            assert found[token, 1, 17 + 2 * k] == pytest.approx(turned.imag, abs=1e-5)


def test_rotating_back() -> None:
    x, table = torch.randn(4, 64), RopeTable(frequencies(64, 160000.0))
    angles = table.at(torch.tensor([1, 2, 3, 70000]))
    back = rotate(rotate(x, *angles), *angles, inverse=True)
    assert (back - x).abs().max() < 1e-5


def test_yarn_of_the_released_model() -> None:
    """Pairs below 15 turn as without YaRN, from 25 on sixteen times slower."""
    plain = frequencies(64, 160000.0)
    yarn = frequencies(64, 160000.0, factor=16, original_positions=65536)
    assert torch.equal(yarn[:16], plain[:16])
    assert torch.allclose(yarn[25:], plain[25:] / 16)
    assert (yarn[16:25] < plain[16:25]).all()
    assert (yarn[16:25] > plain[16:25] / 16).all()


def test_a_grown_table_keeps_its_bits() -> None:
    freqs = frequencies(16, 10000.0)
    grown, whole = RopeTable(freqs), RopeTable(freqs)
    first = grown.at(torch.arange(10))
    whole.at(torch.tensor([3 * TABLE_POSITIONS]))
    grown.at(torch.tensor([3 * TABLE_POSITIONS]))
    assert torch.equal(first[0], whole.at(torch.arange(10))[0])
    many = torch.arange(2 * TABLE_POSITIONS)
    assert torch.equal(grown.at(many)[1], whole.at(many)[1])


def test_pairs_are_a_softmax_over_two() -> None:
    values, gates = torch.randn(5, 2, 32), torch.randn(5, 2, 32) * 30
    wanted = (gates.softmax(1) * values).sum(1)
    assert (pool_pairs(values, gates) - wanted).abs().max() < 1e-5


def test_index_scores_of_a_loop() -> None:
    queries, weights = torch.randn(3, 5, 32), torch.randn(3, 5)  # an odd number of heads
    keys, visible = torch.randn(3, KEYS, 32), torch.tensor([0, 1, 200])
    found = scores_of(queries, weights, keys, visible)
    for token in range(3):
        for j in (0, 1, 150, 199, 200, 255):
            wanted = sum(
                max(0.0, float(queries[token, h] @ keys[token, j])) * float(weights[token, h])
                for h in range(5)
            )
            if j >= visible[token]:
                assert found[token, j] == NEVER
            else:
                assert found[token, j] == pytest.approx(wanted, abs=1e-4)


def test_hidden_keys_may_hold_anything() -> None:
    keys = torch.randn(1, KEYS, 32)
    args = torch.randn(2, 4, 32), torch.randn(2, 4)
    clean = scores_of(*args, keys, torch.tensor([10, 20]))
    keys[0, 20:] = float("nan")
    assert torch.equal(scores_of(*args, keys, torch.tensor([10, 20])), clean)


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, NEVER]), min_size=1, max_size=40),
    st.integers(1, 45),
)
@settings(max_examples=150, deadline=None)
def test_top_k_with_ties(scores: list[float], top_k: int) -> None:
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    wanted = sorted(j for j in order[:top_k] if scores[j] > NEVER)
    found = top_k_indices(torch.tensor([scores]), top_k)[0].tolist()
    assert found == wanted + [-1] * (top_k - len(wanted))


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 6),
)
@settings(max_examples=150, deadline=None)
def test_candidates_of_a_loop(scores: list[float], size: int, count: int) -> None:
    visible = len(scores)
    padded = [*scores, *[NEVER] * 7]  # entries that are not visible yet
    blocks = [padded[a : a + size] for a in range(0, len(padded), size)]
    newest = (visible - 1) // size
    worth = [math.inf if b == newest else max(block) for b, block in enumerate(blocks)]
    order = sorted(range(len(blocks)), key=lambda b: (-worth[b], b))
    kept = {b for b in order[:count] if worth[b] > NEVER}
    found = candidate_blocks(torch.tensor([padded]), torch.tensor([visible]), size, count)
    assert found[0].tolist() == [j // size in kept for j in range(len(padded))]


@pytest.mark.parametrize("with_compressed", [False, True])
def test_attention_of_a_loop(with_compressed: bool) -> None:
    heads, dim = 3, 32
    queries, sinks = torch.randn(4, heads, dim), torch.randn(heads)
    window, compressed = torch.randn(20, dim), torch.randn(9, dim)
    window[-1] = compressed[-1] = 0.0
    window_slots = torch.tensor([[0, 5, 7], [19, 19, 3], [19, 19, 19], [2, 2, 2]])
    chosen = torch.tensor([[1, 8], [8, 8], [8, 8], [0, 7]])
    found = sparse_attention(
        queries,
        window,
        window_slots,
        compressed if with_compressed else None,
        chosen if with_compressed else None,
        sinks,
        bf16=False,
    )
    for token in range(4):
        rows = [window[s] for s in window_slots[token].tolist() if s != 19]
        if with_compressed:
            rows += [compressed[s] for s in chosen[token].tolist() if s != 8]
        for head in range(heads):
            weights = [math.exp(float(queries[token, head] @ row) * dim**-0.5) for row in rows]
            total = sum(weights) + math.exp(float(sinks[head]))
            wanted = sum((w * row for w, row in zip(weights, rows, strict=True)), torch.zeros(dim))
            assert (found[token, head] - wanted / total).abs().max() < 1e-5


def test_attention_with_large_scores_stays_finite() -> None:
    window = torch.full((3, 32), 50.0)
    window[-1] = 0.0
    found = sparse_attention(
        torch.full((1, 1, 32), 50.0),
        window,
        torch.tensor([[0, 1]]),
        None,
        None,
        torch.tensor([-1e4]),
        bf16=True,
    )
    assert torch.allclose(found, torch.full((1, 1, 32), 50.0))


def test_attention_rounds_probabilities_only_when_asked() -> None:
    window = torch.randn(9, 32)
    window[-1] = 0.0
    args = (torch.randn(2, 2, 32), window, torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]), None, None)
    exact = sparse_attention(*args, torch.zeros(2), bf16=False)
    rounded = sparse_attention(*args, torch.zeros(2), bf16=True)
    assert 0 < (exact - rounded).abs().max() < 0.02


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_token_without_any_row_gives_zeros(packed: bool, bf16: bool) -> None:
    """And leaves the one beside it as it is alone."""
    window: Tensor | RowPool = torch.randn(5, 64)
    if packed:
        rows = torch.randint(0, 120, (5, RowFormat.FP8.row_bytes(64)), dtype=torch.uint8)
        window = RowPool(rows, RowFormat.FP8, 64)
    queries = torch.randn(2, 16, 64).bfloat16().float()
    slots = torch.tensor([[4, 4], [0, 1]])
    sinks = torch.zeros(16)
    found = sparse_attention(queries, window, slots, None, None, sinks, bf16=bf16)
    alone = sparse_attention(queries[1:], window, slots[1:], None, None, sinks, bf16=bf16)
    assert found[0].eq(0).all()
    assert torch.equal(found[1:], alone)
