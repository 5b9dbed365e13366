"""FP8 linears on a GPU: packing (anywhere), results and bits (on a device)."""

import pytest
import torch
from torch import Tensor

from kernels.quant.linear_cuda import CHUNK_BYTES, linear_fp8_decode, pack_linear_fp8
from kernels.quant.rounding_ref import round_fp8_ref


def random_weight(groups: int, outputs: int, depth: int, device: str) -> tuple[Tensor, Tensor]:
    """e4m3 codes without NaN, ue8m0 scales."""
    codes = torch.randint(0, 254, (groups, outputs, depth), device=device)
    codes = torch.where(codes >= 127, codes + 1, codes)
    scale = torch.randint(113, 119, (groups, outputs // 32, depth // 32), device=device)
    return codes.to(torch.uint8), scale.to(torch.uint8)


def code_at(chunk: Tensor, row: int, k: int) -> int:
    """The code of a row of a unit and a position of a chunk, by the layout of mma.m16n8k16."""
    tile, half, g = row // 16, row // 8 % 2, row % 8
    group, q, step, pair, position = k // 32, k // 8 % 4, k // 4 % 2, k // 2 % 2, k % 2
    at = (((tile * 2 + group) * 32 + g * 4 + q) * 2 + step) * 8 + pair * 4 + position * 2
    word = int(chunk[at]) | int(chunk[at + 1]) << 8
    if half:
        return (word >> 14 & 1) << 7 | word & 127
    return (word >> 15) << 7 | word >> 7 & 127


def test_packed_chunks_hold_every_code_and_scale_once() -> None:
    torch.manual_seed(0)
    weight, scale = random_weight(2, 128, 192, "cpu")
    packed = pack_linear_fp8(weight, scale)
    assert packed.data.shape == (4, 3, CHUNK_BYTES)
    for group, unit, step in ((0, 0, 0), (0, 1, 2), (1, 1, 1)):
        chunk = packed.data[group * 2 + unit, step]
        for row in range(64):
            for k in range(0, 64, 3):
                code = int(weight[group, unit * 64 + row, step * 64 + k])
                assert code_at(chunk, row, k) == code
        for block in range(4):
            want = scale[group, unit * 2 + block // 2, step * 2 + block % 2]
            assert chunk[4096 + block] == want


def test_slices_depend_on_the_shape_of_the_weights_alone() -> None:
    wide = pack_linear_fp8(*random_weight(1, 64 * 256, 64, "cpu"))
    deep = pack_linear_fp8(*random_weight(1, 64, 4096, "cpu"))
    even = pack_linear_fp8(*random_weight(1, 64 * 80, 2304, "cpu"))  # 240 teams of 264 have one
    assert (wide.slices, deep.slices, even.slices) == (1, 6, 3)


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="depth 96 must be multiples of 64"):
        pack_linear_fp8(*random_weight(1, 64, 96, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("groups", "outputs", "depth"),
    [(1, 64, 64), (1, 1792, 5120), (1, 4096, 1280), (8, 1024, 4096), (3, 128, 320)],
)
def test_rows_are_right_and_have_the_same_bits_in_any_number(
    groups: int, outputs: int, depth: int
) -> None:
    torch.manual_seed(outputs)
    weight, scale = random_weight(groups, outputs, depth, "cuda")
    packed = pack_linear_fp8(weight, scale)
    spread = torch.exp2(torch.randint(-6, 7, (200, groups * depth // 32, 1), device="cuda").float())
    x = (torch.randn(200, groups * depth // 32, 32, device="cuda") * spread).flatten(1).bfloat16()
    x[7] *= 4096
    out = linear_fp8_decode(x, packed)
    for start, end in ((0, 1), (3, 8), (1, 13), (5, 30), (0, 50), (64, 128), (99, 200), (4, 4)):
        assert torch.equal(linear_fp8_decode(x[start:end], packed), out[start:end])
    factors = torch.exp2(scale.double() - 127).repeat_interleave(32, 1).repeat_interleave(32, 2)
    exact = weight.view(torch.float8_e4m3fn).double() * factors
    rounded = round_fp8_ref(x.float().cpu(), 32).cuda().double().unflatten(1, (groups, depth))
    want = torch.einsum("tgk,gnk->tgn", rounded, exact).flatten(1)
    error = (out.double() - want).norm(dim=1) / want.norm(dim=1)
    assert float(error.max()) < 2.0**-8
