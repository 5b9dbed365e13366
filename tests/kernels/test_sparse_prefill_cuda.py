"""Attention of many tokens on a GPU: results and bits."""

from typing import Protocol

import pytest
import torch
from torch import Tensor

from kernels.attention.packed_rows import (
    pack_compressed_rows,
    pack_window_rows,
    unpack_compressed_rows,
    unpack_window_rows,
)
from kernels.attention.rope_ref import rotate_ref
from kernels.attention.sparse_cuda import sparse_attention_decode
from kernels.attention.sparse_prefill_cuda import sparse_attention_prefill
from kernels.quant.rounding_ref import round_bf16_ref
from tests.kernels.test_sparse_cuda import attend, spread

pytestmark = pytest.mark.gpu
SLOTS, CHECKED = 900, 40


class Attention(Protocol):
    """What both kernels are."""

    def __call__(
        self,
        queries: Tensor,
        window: Tensor,
        window_slots: Tensor,
        compressed: Tensor | None,
        compressed_slots: Tensor | None,
        sinks: Tensor,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `sparse_attention_decode`."""
        ...


@pytest.mark.parametrize(("width", "selected"), [(128, 512), (96, 40), (128, 0)])
def test_rows_are_right_and_have_the_same_bits_alone(width: int, selected: int) -> None:
    torch.manual_seed(width + selected)
    tokens = 300
    window, compressed = (
        pack_window_rows(spread(SLOTS, 512)),
        pack_compressed_rows(spread(SLOTS, 512)),
    )
    queries = (0.3 * torch.randn(tokens, 64, 512)).bfloat16()
    window_slots = torch.rand(tokens, SLOTS).argsort(1)[:, :width]
    window_slots[1, :100] = -1
    window_slots[2] = -1
    chosen = torch.rand(tokens, SLOTS).argsort(1)[:, :selected]
    if selected:
        chosen[2] = -1
        chosen[3, selected // 3 :] = -1
        chosen[4, 7:21] = -1
    sinks = torch.randn(64)
    sinks[5], sinks[6] = 30.0, -1e30
    angles = torch.rand(tokens, 32) * 6.28

    def run(rows: slice, attention: Attention, *, turned: bool = False) -> Tensor:
        return attention(
            queries[rows].cuda(),
            window.cuda(),
            window_slots[rows].int().cuda(),
            compressed.cuda() if selected else None,
            chosen[rows].int().cuda() if selected else None,
            sinks.cuda(),
            rope=(angles[rows].cos().cuda(), angles[rows].sin().cuda()) if turned else None,
        )

    out = run(slice(tokens), sparse_attention_prefill)
    assert torch.equal(run(slice(tokens), sparse_attention_prefill), out)
    for start, end in ((0, 1), (2, 5), (128, 256), (290, 300), (7, 7)):
        assert torch.equal(run(slice(start, end), sparse_attention_prefill), out[start:end])

    near, far = unpack_window_rows(window), unpack_compressed_rows(compressed)

    def seen(token: int) -> Tensor:
        first, second = window_slots[token], chosen[token]
        return torch.cat((near[first[first >= 0]], far[second[second >= 0]]))

    checked = [*range(CHECKED - 8), *range(tokens - 8, tokens)]
    want = torch.stack([attend(queries[token], seen(token), sinks) for token in checked])
    assert not out[2].any()
    error = (out[checked].double().cpu() - want).norm(dim=2) / want.norm(dim=2).clamp_min(1e-30)
    assert float(error.max()) < 6e-3
    decode = run(slice(tokens), sparse_attention_decode).double()
    other = (out.double() - decode).norm(dim=2) / decode.norm(dim=2).clamp_min(1e-30)
    assert float(other.max()) < 8e-3
    straight = round_bf16_ref(rotate_ref(out.float().cpu(), angles.cos(), -angles.sin()))
    turned = run(slice(tokens), sparse_attention_prefill, turned=True).float().cpu()
    torch.testing.assert_close(turned, straight, rtol=2.0**-7, atol=1e-2)
