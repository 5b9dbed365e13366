"""Indexer scores of many tokens on a GPU: against the kernel for few and the reference; bits."""

import pytest
import torch
from torch import Tensor

from kernels.attention.index_prefill_cuda import index_scores_prefill
from kernels.attention.index_scores_cuda import index_scores_decode
from kernels.attention.packed_rows import pack_keys, unpack_keys
from kernels.quant.rounding_ref import round_fp4_ue8m0_ref
from tests.kernels.test_index_cuda import paged, released_scores

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("entries", [32, 64])
def test_scores_are_right_and_have_the_same_bits_alone(entries: int) -> None:
    torch.manual_seed(entries)
    lengths, max_blocks = (3, 70, 1, 12, 5), 40
    num_keys, tokens = max_blocks * entries, sum(lengths)
    table = paged(len(lengths), max_blocks, 400)
    pool = pack_keys(torch.randn(400 * entries, 128), entries)
    queries = round_fp4_ue8m0_ref(torch.randn(tokens, 32, 128), 32).bfloat16()
    weights = (torch.randn(tokens, 32) * 0.02).bfloat16()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    visible = torch.cat(
        [
            torch.randint(0 if index else num_keys - 2, num_keys + 1, (n,)).sort().values
            for index, n in enumerate(lengths)
        ]
    ).int()

    def arguments(part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor, Tensor, int]:
        mine = (queries[part].cuda(), weights[part].cuda(), pool.cuda(), table.cuda())
        return *mine, entries, rows[part].cuda(), visible[part].cuda(), num_keys

    hidden = (torch.arange(num_keys) >= visible.unsqueeze(1)).cuda()
    out = index_scores_prefill(*arguments(slice(tokens))).masked_fill(hidden, -torch.inf)
    few = index_scores_decode(*arguments(slice(tokens))).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(out, few, rtol=1e-4, atol=1e-5)  # another order of sums
    keys = unpack_keys(pool, entries).unflatten(0, (-1, entries))[table.long()].flatten(1, 2)
    want = released_scores(queries, weights, keys[rows.long()]).cuda()
    want = want.masked_fill(hidden, -torch.inf)
    near = (out - want).abs() <= 1e-5 + 1e-4 * want.abs()
    assert float((near | hidden).float().mean()) > 0.999  # a product near a tie may differ
    for start, end in ((0, 1), (5, 30), (64, 90), (tokens - 6, tokens)):
        alone = index_scores_prefill(*arguments(slice(start, end)))
        alone = alone.masked_fill(hidden[start:end], -torch.inf)
        assert torch.equal(alone, out[start:end])
    skipped = index_scores_prefill(*arguments(slice(tokens)), skip=100)
    seen = visible > 100
    assert torch.equal(skipped.masked_fill(hidden, -torch.inf)[seen], out[seen])
