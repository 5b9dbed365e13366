"""Linears of many rows on a GPU: sizes (anywhere), results and bits (on a device)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention.rope_ref import rotate_ref
from kernels.mhc.rms_norm_ref import rms_norm_ref
from kernels.quant.linear_bf16_cuda import PackedCodes, pack_linear_bf16, pack_linear_codes
from kernels.quant.linear_cuda import PackedLinear, pack_linear_fp8
from kernels.quant.linear_prefill_cuda import NARROW, WIDE, fits, linear_prefill, tile_outputs
from kernels.quant.rounding_ref import round_bf16_ref, round_fp8_ref
from kernels.quant.rows_prefill_cuda import (
    expand_linear,
    norm_round_rows,
    round_rows,
    swiglu_round_rows,
)
from tests.kernels.test_linear_cuda import random_weight

gpu = pytest.mark.gpu


def spread(rows: int, width: int) -> Tensor:
    """Values whose groups differ much in size, bfloat16."""
    groups = torch.exp2(torch.randint(-6, 7, (rows, width // 32, 1), device="cuda").float())
    return (torch.randn(rows, width // 32, 32, device="cuda") * groups).flatten(1).bfloat16()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """In double precision."""
    rows = x.double().unflatten(1, weight.shape[::2])
    return torch.einsum("tgk,gnk->tgn", rows, weight.double()).flatten(1)


def error_of(out: Tensor, want: Tensor) -> float:
    """The largest of a row, relative to its norm."""
    return float(((out.double() - want).norm(dim=1) / want.norm(dim=1)).max())


def test_groups_need_whole_tiles_and_a_single_linear_does_not() -> None:
    assert fits(1, 1792)
    assert fits(1, 32)
    assert not fits(1, 36)
    assert fits(8, 1024)
    assert not fits(8, 384)


def test_tiles_are_narrow_where_wide_ones_would_leave_multiprocessors_idle() -> None:
    found = [tile_outputs(tokens, 1, 5120, 132) for tokens in (1, 128, 768, 769, 8192)]
    assert found == [NARROW, NARROW, NARROW, WIDE, WIDE]
    assert tile_outputs(8192, 1, 32, 132) == NARROW
    assert tile_outputs(384, 8, 1024, 132) == NARROW


@gpu
@pytest.mark.parametrize(
    ("groups", "outputs", "depth"),
    [(1, 1792, 5120), (1, 384, 640), (1, 32, 192), (8, 1024, 512), (3, 128, 320), (1, 4096, 1280)],
)
def test_rows_are_right_and_have_the_same_bits_in_any_number(
    groups: int, outputs: int, depth: int
) -> None:
    torch.manual_seed(outputs)
    weight = torch.randn(groups, outputs, depth, device="cuda").bfloat16()
    linear = pack_linear_bf16(weight)
    x = torch.randn(700, groups * depth + 64, device="cuda").bfloat16()[:, : groups * depth]
    want = product(x, weight)
    sums = linear_prefill(x, linear, floats=True)
    assert error_of(sums, want) < 1e-5
    out = linear_prefill(x, linear)
    assert torch.equal(out, sums.bfloat16())
    assert torch.equal(linear_prefill(x, linear, rounds=True), round_rows(out))
    for tile in (NARROW, WIDE):
        if groups == 1 or outputs % tile == 0:
            assert torch.equal(linear_prefill(x, linear, tile=tile), out)
            assert torch.equal(linear_prefill(x, linear, floats=True, tile=tile), sums)
    for start, end in ((0, 1), (0, 128), (128, 256), (5, 300), (690, 700), (4, 4)):
        assert torch.equal(linear_prefill(x[start:end], linear), out[start:end])
        assert torch.equal(linear_prefill(x[start:end], linear, floats=True), sums[start:end])


@gpu
def test_the_end_of_each_head_is_turned() -> None:
    torch.manual_seed(0)
    linear = pack_linear_bf16(torch.randn(1, 1536, 256, device="cuda").bfloat16())
    x = torch.randn(300, 256, device="cuda").bfloat16()
    angles = torch.rand(300, 32, device="cuda") * 6.0
    cos, sin = angles.cos(), angles.sin()
    out = linear_prefill(x, linear, rope=(cos, sin), head=512)
    plain = linear_prefill(x, linear).float().unflatten(1, (3, 512))
    want = round_bf16_ref(rotate_ref(plain.cpu(), cos.cpu(), sin.cpu())).flatten(1)
    assert torch.equal(out.float().cpu(), want)


@gpu
@pytest.mark.parametrize(("groups", "outputs", "depth"), [(1, 1792, 5120), (2, 128, 192)])
@pytest.mark.parametrize("pack", [pack_linear_fp8, pack_linear_codes])
def test_expanded_weights_are_the_packed_ones(
    pack: Callable[[Tensor, Tensor], PackedLinear | PackedCodes],
    groups: int,
    outputs: int,
    depth: int,
) -> None:
    torch.manual_seed(1)
    weight, scale = random_weight(groups, outputs, depth, "cuda")
    held = torch.full((groups * outputs * depth + 5,), torch.nan, device="cuda").bfloat16()
    out = expand_linear(pack(weight, scale), held)
    factors = torch.exp2(scale.float() - 127).repeat_interleave(32, 1).repeat_interleave(32, 2)
    want = weight.view(torch.float8_e4m3fn).float() * factors
    assert torch.equal(out.data, pack_linear_bf16(want.bfloat16()).data)
    assert bool(held[-5:].isnan().all())


@gpu
def test_rows_are_rounded_as_the_references_do() -> None:
    torch.manual_seed(2)
    x, norm = spread(77, 1792), torch.rand(1280, device="cuda") + 0.5
    assert torch.equal(round_rows(x).float().cpu(), round_fp8_ref(x.float().cpu(), 32))
    low = x[:, :1280]
    assert torch.equal(round_rows(low).float().cpu(), round_fp8_ref(low.float().cpu(), 32))
    rounded = norm_round_rows(low, norm, 1e-20)
    normed = round_bf16_ref(rms_norm_ref(low.float().cpu(), norm.cpu(), 1e-20))
    assert error_of(rounded.cpu(), round_fp8_ref(normed, 32).double()) < 2e-3
    both = spread(77, 512)
    gate, up = both.double().chunk(2, 1)
    gate, up = gate.clamp_max(10.0), up.clamp(-10.0, 10.0)
    hidden = round_bf16_ref((gate * gate.sigmoid() * up).float().cpu())
    out = swiglu_round_rows(both, 10.0)
    assert error_of(out.cpu(), round_fp8_ref(hidden, 32).double()) < 2e-3
