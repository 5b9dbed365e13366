"""MXFP4 experts of many rows on a GPU: results, bits and parts of a group (on a device)."""

import shutil

import pytest
import torch
from torch import Tensor

from kernels import cuda
from kernels.moe.experts_cuda import PackedExperts, pack_experts
from kernels.moe.experts_prefill_cuda import MAX_TILE_ROWS, routed_experts_prefill
from kernels.moe.experts_ref import combine_slots_ref, routed_experts_ref
from kernels.quant.unpack_ref import unpack_fp4_ref
from tests.kernels.test_experts_cuda import random_weights, route

LIMIT = 10.0


def rows_of(tokens: int, hidden: int) -> Tensor:
    """Activations whose groups differ in size by up to 2^12."""
    spread = torch.exp2(torch.randint(-6, 7, (tokens, hidden // 32, 1), device="cuda").float())
    return (torch.randn(tokens, hidden // 32, 32, device="cuda") * spread).flatten(1).bfloat16()


def reference(x: Tensor, ids: Tensor, shares: Tensor, raw: list[Tensor]) -> Tensor:
    """By the CPU's reference with the numbers of the released model."""
    w1, s1, w3, s3, w2, s2 = (part.cpu() for part in raw)
    slots = routed_experts_ref(
        x.float().cpu(),
        ids.long().cpu(),
        shares.cpu(),
        torch.cat((unpack_fp4_ref(w1, s1), unpack_fp4_ref(w3, s3)), 1).mT.contiguous(),
        unpack_fp4_ref(w2, s2).mT.contiguous(),
        0,
        LIMIT,
        True,
    )
    return combine_slots_ref(slots)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_source_compiles_for_hopper() -> None:
    assert cuda.build("moe", "experts_prefill").exists()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inter", "tokens"),
    [
        (8, 2, 256, 128, 37),
        (8, 3, 320, 64, 300),  # an odd number of units
        (4, 2, 256, 192, 900),  # several tiles an expert
        (40, 6, 512, 128, 1200),
        (3, 2, 5120, 2304, 150),
    ],
)
def test_rows_are_right_and_have_the_same_bits_alone_and_split(
    experts: int, top_k: int, hidden: int, inter: int, tokens: int
) -> None:
    torch.manual_seed(tokens)
    raw = random_weights(experts, hidden, inter, "cuda")
    packed = pack_experts(*raw)
    x, ids = rows_of(tokens, hidden), route(tokens, experts, top_k)
    shares = torch.rand(tokens, top_k, device="cuda") + 0.1

    def run(rows: slice, first: int = 0, end: int = experts) -> Tensor:
        mine = PackedExperts(packed.w13[first:end], packed.w2[first:end], hidden, inter)
        return routed_experts_prefill(
            x[rows], ids[rows], shares[rows], mine, first_expert=first, limit=LIMIT
        )

    out = run(slice(tokens))
    for start, end in ((0, 1), (tokens - 1, tokens), (tokens // 3, tokens), (5, 26), (0, 0)):
        assert torch.equal(run(slice(start, end)), out[start:end])
    halves = run(slice(tokens), 0, experts // 2) + run(slice(tokens), experts // 2, experts)
    torch.testing.assert_close(halves, out, rtol=1e-5, atol=1e-5 * float(out.abs().max()))
    shared = torch.randn(tokens, hidden, device="cuda").bfloat16()
    both = routed_experts_prefill(
        x, ids, shares, packed, first_expert=0, limit=LIMIT, shared=shared
    )
    assert torch.equal(both, (out + shared.float()).bfloat16())
    want = reference(x, ids, shares, raw)
    error = (out.cpu() - want).norm(dim=1) / want.norm(dim=1)
    assert float(error.max()) < 2e-2


@pytest.mark.gpu
def test_every_width_of_a_tile_gives_a_row_the_same_bits() -> None:
    torch.manual_seed(1)
    hidden, inter, tokens = 256, 128, MAX_TILE_ROWS + 9
    packed = pack_experts(*random_weights(1, hidden, inter, "cuda"))
    x, shares = rows_of(tokens, hidden), torch.rand(tokens, 1, device="cuda") + 0.1
    ids = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")

    def run(end: int) -> Tensor:
        return routed_experts_prefill(
            x[:end], ids[:end], shares[:end], packed, first_expert=0, limit=LIMIT
        )

    out = run(tokens)
    for end in range(1, tokens, 5):
        assert torch.equal(run(end), out[:end])


@pytest.mark.gpu
def test_slots_without_an_expert_here_add_nothing() -> None:
    torch.manual_seed(2)
    packed = pack_experts(*random_weights(4, 256, 128, "cuda"))
    x, ids = rows_of(50, 256), route(50, 4, 2)
    shares = torch.rand(50, 2, device="cuda") + 0.1

    def run(expert_ids: Tensor, first: int = 0) -> Tensor:
        return routed_experts_prefill(
            x, expert_ids, shares, packed, first_expert=first, limit=LIMIT
        )

    padded = ids.clone()
    padded[30:] = -1
    out = run(padded)
    assert torch.equal(out[:30], run(ids)[:30])
    assert not out[30:].any()
    assert not run(ids, first=100).any()
