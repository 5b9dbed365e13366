"""Packed cache rows (anywhere) and attention over them on a GPU: results and bits."""

import pytest
import torch
from torch import Tensor

from kernels.attention.packed_rows import (
    compressed_row_bytes,
    pack_compressed_rows,
    pack_keys,
    pack_window_rows,
    unpack_compressed_rows,
    unpack_keys,
    unpack_window_rows,
    window_row_bytes,
)
from kernels.attention.rope_ref import rotate_ref
from kernels.attention.sparse_cuda import best_block_heads, sparse_attention_decode
from kernels.quant.rounding_ref import (
    round_bf16_ref,
    round_fp4_e4m3_ref,
    round_fp4_ue8m0_ref,
    round_fp8_ref,
)


def spread(rows: int, dim: int) -> Tensor:
    """Values whose groups differ much in size; one row of zeros."""
    groups = torch.exp2(torch.randint(-6, 5, (rows, dim // 16, 1)).float())
    x = (torch.randn(rows, dim // 16, 16) * groups).flatten(1)
    x[rows // 2] = 0.0
    return x


def attend(queries: Tensor, rows: Tensor, sinks: Tensor) -> Tensor:
    """Heads of one token over its rows, in double precision; weights rounded as released."""
    scores = queries.double() @ rows.double().mT * 512**-0.5
    most = torch.maximum(scores.amax(1), sinks) if len(rows) else sinks.double()
    weights = (scores - most.unsqueeze(1)).exp()
    total = weights.sum(1) + (sinks - most).exp()
    return weights.bfloat16().double() @ rows.double() / total.unsqueeze(1)


def test_packed_rows_hold_exactly_the_rounded_values() -> None:
    torch.manual_seed(0)
    x = spread(40, 512)
    window, compressed = pack_window_rows(x), pack_compressed_rows(x)
    assert window.shape == (40, window_row_bytes(512)) == (40, 528)
    assert compressed.shape == (40, compressed_row_bytes(512)) == (40, 288)
    assert torch.equal(unpack_window_rows(window), round_fp8_ref(x, 32))
    assert torch.equal(unpack_compressed_rows(compressed), round_fp4_e4m3_ref(x, 16))
    keys = spread(64, 128)
    packed = pack_keys(keys, 32)
    assert packed.shape == (2, 32 * 68)
    assert torch.equal(unpack_keys(packed, 32), round_fp4_ue8m0_ref(keys, 32))


def test_blocks_hold_few_heads_in_small_steps_and_many_in_large_ones() -> None:
    assert [best_block_heads(tokens, 64, 132) for tokens in (1, 16, 256)] == [8, 8, 64]
    assert best_block_heads(256, 24, 132) == 8


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "width", "selected"), [(64, 128, 512), (16, 96, 40), (64, 128, 0)]
)
def test_rows_are_right_and_have_the_same_bits_alone_and_in_any_blocks(
    heads: int, width: int, selected: int
) -> None:
    torch.manual_seed(heads + selected)
    tokens, slots = 37, 900
    window, compressed = (
        pack_window_rows(spread(slots, 512)),
        pack_compressed_rows(spread(slots, 512)),
    )
    queries = (0.3 * torch.randn(tokens, heads, 512)).bfloat16()
    window_slots = torch.stack([torch.randperm(slots)[:width] for _ in range(tokens)])
    window_slots[1, :100] = -1
    window_slots[2] = -1
    selected_slots = torch.stack([torch.randperm(slots)[:selected] for _ in range(tokens)])
    if selected:
        selected_slots[2] = -1
        selected_slots[3, selected // 3 :] = -1
        selected_slots[4, 7:21] = -1
    sinks = torch.randn(heads)
    angles = torch.rand(tokens, 32) * 6.28

    def run(rows: slice, block_heads: int, with_rope: bool = False) -> Tensor:
        rope = (angles[rows].cos().cuda(), angles[rows].sin().cuda()) if with_rope else None
        return sparse_attention_decode(
            queries[rows].cuda(),
            window.cuda(),
            window_slots[rows].int().cuda(),
            compressed.cuda() if selected else None,
            selected_slots[rows].int().cuda() if selected else None,
            sinks.cuda(),
            rope=rope,
            block_heads=block_heads,
        )

    out = run(slice(tokens), 8)
    for block_heads in (8, 16, 32, 64):
        if heads % block_heads == 0:
            for start, end in ((0, tokens), (0, 1), (2, 5), (30, 37)):
                assert torch.equal(run(slice(start, end), block_heads), out[start:end])

    near, far = unpack_window_rows(window), unpack_compressed_rows(compressed)
    want = torch.stack(
        [
            attend(
                queries[token],
                torch.cat(
                    (
                        near[window_slots[token][window_slots[token] >= 0]],
                        far[selected_slots[token][selected_slots[token] >= 0].long()],
                    )
                ),
                sinks,
            )
            for token in range(tokens)
        ]
    )
    assert not out[2].any()
    error = (out.double().cpu() - want).norm(dim=2) / want.norm(dim=2).clamp_min(1e-30)
    assert float(error.max()) < 4e-3
    turned = run(slice(tokens), 0, with_rope=True).float().cpu()
    straight = out.float().cpu()
    straight = round_bf16_ref(rotate_ref(straight, angles.cos(), -angles.sin()))
    torch.testing.assert_close(turned, straight, rtol=2.0**-7, atol=1e-2)
