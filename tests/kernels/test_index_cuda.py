"""Indexer on a GPU: scores and choices against the references, and their bits."""

import pytest
import torch
from torch import Tensor

from kernels.attention.index_scores_cuda import index_scores_decode
from kernels.attention.packed_rows import pack_keys, unpack_keys
from kernels.attention.select_cuda import candidate_blocks_decode, top_k_decode
from kernels.attention.select_ref import candidate_blocks_ref, top_k_indices_ref
from kernels.quant.rounding_ref import round_fp4_ue8m0_ref

pytestmark = pytest.mark.gpu


def paged(num_rows: int, max_blocks: int, num_blocks: int) -> Tensor:
    """Block tables of disjoint rows: [num_rows, max_blocks], int32."""
    return torch.randperm(num_blocks)[: num_rows * max_blocks].view(num_rows, max_blocks).int()


def released_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[num_tokens, n] of keys [num_tokens, n, 128]: sixteen heads by halves, then their sums."""
    products = (queries.float() @ keys.mT).bfloat16().relu() * weights.unsqueeze(2)
    heads = products.float().unflatten(1, (2, 16))
    for half in (8, 4, 2, 1):
        heads = heads[:, :, :half] + heads[:, :, half:]
    return heads[:, 0, 0] + heads[:, 1, 0]


@pytest.mark.parametrize("entries", [32, 64])
def test_scores_are_right_and_have_the_same_bits_alone(entries: int) -> None:
    torch.manual_seed(entries)
    tokens, max_blocks = 23, 40
    num_keys = max_blocks * entries
    table = paged(9, max_blocks, 400)
    pool = pack_keys(torch.randn(400 * entries, 128), entries)
    queries = round_fp4_ue8m0_ref(torch.randn(tokens, 32, 128), 32).bfloat16()
    weights = (torch.randn(tokens, 32) * 0.02).bfloat16()
    rows = torch.randint(0, 9, (tokens,)).int()
    visible = torch.randint(1, num_keys + 1, (tokens,)).int()
    visible[:4] = torch.tensor([num_keys, 1, 63, 65])

    def run(part: slice, skip: int = 0) -> Tensor:
        return index_scores_decode(
            queries[part].cuda(),
            weights[part].cuda(),
            pool.cuda(),
            table.cuda(),
            entries,
            rows[part].cuda(),
            visible[part].cuda(),
            num_keys,
            skip=skip,
        ).cpu()

    hidden = torch.arange(num_keys) >= visible.unsqueeze(1)
    out = run(slice(tokens)).masked_fill(hidden, -torch.inf)
    keys = unpack_keys(pool, entries).unflatten(0, (-1, entries))[table.long()].flatten(1, 2)
    want = released_scores(queries, weights, keys[rows.long()]).masked_fill(hidden, -torch.inf)
    assert float((out == want).float().mean()) > 0.999  # a product near a tie may differ
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)
    for start, end in ((0, 1), (1, 2), (5, 20), (22, 23)):
        part = run(slice(start, end)).masked_fill(hidden[start:end], -torch.inf)
        assert torch.equal(part, out[start:end])
    skipped = run(slice(tokens), skip=500).masked_fill(hidden, -torch.inf)
    far = visible > 500
    assert torch.equal(skipped[far], out[far])


def scores_with_ties(tokens: int, n: int) -> Tensor:
    """Few distinct values in some rows, zeros of both signs, and plain ones."""
    scores = torch.randn(tokens, n)
    scores[0] = torch.randint(-3, 4, (n,)).float()
    scores[1] = torch.where(torch.rand(n) < 0.5, 0.0, -0.0)
    scores[2] = -scores[2].abs()
    scores[3] = (scores[3] * 4).round() / 4
    return scores


@pytest.mark.parametrize(("n", "top_k"), [(700, 512), (9000, 512), (50_000, 512), (3000, 16)])
def test_choices_are_those_of_the_reference(n: int, top_k: int) -> None:
    torch.manual_seed(n)
    tokens, entries = 12, 32
    max_blocks = -(-n // entries)
    table = paged(5, max_blocks, 5 * max_blocks)
    table[2, 3] = -1
    scores = scores_with_ties(tokens, n)
    visible = torch.randint(top_k, n + 1, (tokens,)).int()
    visible[4:8] = torch.tensor([n, top_k, 1, 3 * top_k // 4])
    rows = torch.randint(0, 5, (tokens,)).int()
    masked = scores.masked_fill(torch.arange(n) >= visible.unsqueeze(1), -torch.inf)
    paging = table.cuda(), entries, rows.cuda()
    indices, slots = top_k_decode(scores.cuda(), visible.cuda(), top_k, *paging)
    want = top_k_indices_ref(masked, top_k, None)
    assert torch.equal(indices.cpu().long(), want)
    blocks = table[rows.long().unsqueeze(1), want.clamp_min(0) // entries].long()
    want_slots = blocks * entries + want % entries
    want_slots[(want < 0) | (blocks < 0)] = -1
    assert torch.equal(slots.cpu().long(), want_slots)
    alone, _ = top_k_decode(
        scores[3:4].cuda(), visible[3:4].cuda(), top_k, paging[0], entries, rows[3:4].cuda()
    )
    assert torch.equal(alone, indices[3:4])

    num_blocks = 70
    allowed = candidate_blocks_ref(masked, visible.long(), 8, num_blocks)
    bits = candidate_blocks_decode(scores.cuda(), visible.cuda(), 8, num_blocks)
    at = torch.arange(n)
    found = (bits.cpu()[:, at // 256] >> (at // 8 % 32) & 1).bool()
    seen = at < visible.unsqueeze(1)
    assert torch.equal(found & seen, allowed & seen)
    within, _ = top_k_decode(scores.cuda(), visible.cuda(), 16, *paging, allowed=bits)
    some = visible > 16
    want = top_k_indices_ref(masked, 16, allowed)
    assert torch.equal(within.cpu().long()[some], want[some])
