"""Linears of unrounded inputs on a GPU: packing (anywhere), results and bits (on a device)."""

import pytest
import torch
from torch import Tensor

from kernels.quant.linear_bf16_cuda import (
    CODES_BYTES,
    PackedBf16,
    PackedCodes,
    linear_bf16,
    pack_linear_bf16,
    pack_linear_codes,
)
from tests.kernels.test_linear_cuda import random_weight

PARTS = ((0, 1), (3, 8), (1, 13), (5, 30), (0, 50), (64, 128), (99, 300), (0, 256), (4, 4))


def test_tiles_hold_every_weight_once() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 96, 192).bfloat16()
    packed = pack_linear_bf16(weight)
    assert packed.data.shape == (4, 3, 64, 64)
    for group, row, k in ((0, 0, 0), (0, 95, 191), (1, 37, 100), (1, 64, 8)):
        tile = packed.data[group * 2 + row // 64, k // 64]
        piece = k % 64 // 8 ^ row % 8
        assert tile[row % 64, piece * 8 + k % 8] == weight[group, row, k]
    assert int(packed.data.count_nonzero()) == int(weight.count_nonzero())


def test_codes_lie_as_registers_want_them() -> None:
    torch.manual_seed(0)
    weight, scale = random_weight(2, 128, 192, "cpu")
    packed = pack_linear_codes(weight, scale)
    assert packed.data.shape == (4, 3, CODES_BYTES)
    for group, row, k in ((0, 0, 0), (0, 77, 191), (1, 127, 90), (1, 24, 41)):
        chunk = packed.data[group * 2 + row // 64, k // 64]
        warp, half, g = row % 64 // 16, row % 16 // 8, row % 8
        step, pair, q = k % 32 // 16, k % 16 // 8, k % 8 // 2  # of m64nNk16
        word = ((k % 64 // 32 * 4 + warp) * 32 + g * 4 + q) * 4 + step * 2 + pair
        assert chunk[word * 4 + k % 2 * 2 + half] == weight[group, row, k]
        block = row % 64 // 32 * 2 + k % 64 // 32
        assert chunk[4096 + block] == scale[group, row // 32, k // 32]


def test_slices_depend_on_the_shape_of_the_weights_alone() -> None:
    assert pack_linear_bf16(torch.zeros(1, 64 * 128, 64).bfloat16()).slices == 1
    assert pack_linear_bf16(torch.zeros(1, 32, 5120).bfloat16()).slices == 8


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="depth 96 must be a multiple of 64"):
        pack_linear_bf16(torch.zeros(1, 64, 96).bfloat16())
    with pytest.raises(ValueError, match="depth 96 must be multiples of 64"):
        pack_linear_codes(*random_weight(1, 64, 96, "cpu"))


def check(weight: PackedBf16 | PackedCodes, exact: Tensor) -> None:
    groups, depth = weight.groups, weight.depth
    x = torch.randn(300, groups * depth, device="cuda").bfloat16()
    out = linear_bf16(x, weight, unrounded=True)
    for start, end in PARTS:
        assert torch.equal(linear_bf16(x[start:end], weight, unrounded=True), out[start:end])
    wide = torch.randn(300, groups * depth + 64, device="cuda").bfloat16()
    wide[:, :-64] = x
    assert torch.equal(linear_bf16(wide[:, :-64], weight, unrounded=True), out)
    assert torch.equal(linear_bf16(x, weight), out.bfloat16())
    assert torch.equal(linear_bf16(x, weight, factor=0.37), (out.bfloat16() * 0.37).bfloat16())
    want = torch.einsum("tgk,gnk->tgn", x.double().unflatten(1, (groups, depth)), exact.double())
    error = (out.double() - want.flatten(1)).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert float(error.max()) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("groups", "outputs", "depth"),
    [(1, 64, 64), (1, 1024, 5120), (1, 32, 5120), (1, 33600, 1024), (3, 96, 320)],
)
def test_bf16_rows_are_right_and_have_the_same_bits_in_any_number(
    groups: int, outputs: int, depth: int
) -> None:
    torch.manual_seed(outputs)
    weight = (torch.randn(groups, outputs, depth, device="cuda") * depth**-0.5).bfloat16()
    check(pack_linear_bf16(weight), weight)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("groups", "outputs", "depth"), [(1, 64, 64), (8, 1024, 4096), (2, 128, 320)]
)
def test_codes_are_worth_what_their_values_are(groups: int, outputs: int, depth: int) -> None:
    torch.manual_seed(outputs)
    codes, scale = random_weight(groups, outputs, depth, "cuda")
    factors = torch.exp2(scale.double() - 127).repeat_interleave(32, 1).repeat_interleave(32, 2)
    exact = codes.view(torch.float8_e4m3fn).double() * factors
    packed = pack_linear_codes(codes, scale)
    check(packed, exact)
    x = torch.randn(20, groups * depth, device="cuda").bfloat16()
    assert torch.equal(linear_bf16(x, packed), linear_bf16(x, pack_linear_bf16(exact.bfloat16())))
