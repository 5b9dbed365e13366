"""Formats and products against the obvious way to write them."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.quant.linear import tile_linear
from kernels.quant.pointwise import sigmoid, silu, softplus
from kernels.quant.rounding import round_bf16, round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from kernels.quant.rounding_ref import FEW_VALUES
from kernels.quant.unpack import unpack_fp4, unpack_fp8, unpack_scale


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
floats = st.floats(-1e4, 1e4, width=32)


def e2m1_naive(x: float) -> float:
    """Nearest of the eight magnitudes; a tie goes to the even code."""
    size = min(abs(x), 6.0)
    code = min(range(8), key=lambda c: (abs(E2M1[c] - size), c % 2))
    return math.copysign(E2M1[code], x)


def e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize(("tokens", "inner", "outer"), [(1, 32, 8), (17, 300, 5), (33, 64, 70)])
def test_linear_is_a_matrix_product(tokens: int, inner: int, outer: int) -> None:
    x, weight = torch.randn(tokens, inner), torch.randn(inner, outer)
    wanted = (x.double() @ weight.double()).float()
    error = (tile_linear(x, weight) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 1e-6


def test_linear_names_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        tile_linear(torch.zeros(2, 3), torch.zeros(4, 5))


def test_activations() -> None:
    x = torch.cat((torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30])))
    exact = x.double()
    assert (sigmoid(x) - torch.sigmoid(exact)).abs().max() < 2e-7
    assert torch.allclose(silu(x), (exact * torch.sigmoid(exact)).float(), rtol=4e-7, atol=1e-36)
    assert torch.allclose(
        softplus(x),
        torch.nn.functional.softplus(exact, threshold=800).float(),
        rtol=4e-7,
        atol=1e-36,
    )


def test_check_vectors_of_the_released_formats() -> None:
    """Bytes of layer 0 of the released checkpoint."""
    packed = torch.tensor([[0xA0, 0xA8, 0xEC, 0x4A] + [0] * 12], dtype=torch.uint8)
    found = unpack_fp4(packed.view(torch.int8), torch.tensor([[0x78]], dtype=torch.uint8))
    wanted = [0, -0.0078125, 0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625]
    assert found[0, :8].tolist() == wanted
    row = torch.tensor([[0xD8, 0x71, 0xF2, 0x79] + [0] * 28], dtype=torch.uint8)
    scale = torch.tensor([[0x73]], dtype=torch.uint8)
    found = unpack_fp8(row.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
    assert found[0, :4].tolist() == [-0.00390625, 0.03515625, -0.0390625, 0.0703125]


def test_scales_are_powers_of_two() -> None:
    bytes_ = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8)
    assert unpack_scale(bytes_).tolist() == [2.0 ** (int(b) - 127) for b in bytes_]


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (40, 32), (1, 64), (70, 64)])
def test_fp8_blocks(shape: tuple[int, int]) -> None:
    rows, cols = shape
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.randint(118, 130, (-(-rows // 32), cols // 32), dtype=torch.uint8)
    found = unpack_fp8(weight, scale)
    for i, j in itertools.product(range(rows), range(cols)):
        factor = 2.0 ** (int(scale[i // 32, j // 32]) - 127)
        assert found[i, j] == weight[i, j].float() * factor


def test_fp8_rows_with_scales_of_their_own() -> None:
    weight = torch.randn(64, 64).to(torch.float8_e4m3fn)
    scale = torch.randint(118, 130, (64, 2), dtype=torch.uint8)
    found = unpack_fp8(weight, scale)
    assert found[5, 40] == weight[5, 40].float() * 2.0 ** (int(scale[5, 1]) - 127)


@given(st.lists(floats, min_size=32, max_size=32))
@settings(max_examples=60, deadline=None)
def test_fp8_rounding(values: list[float]) -> None:
    x = torch.tensor([values])
    amax = max(*(abs(v) for v in values), 1e-4)
    scale = 2.0 ** math.ceil(math.log2(float(torch.tensor(amax) / 448)))
    assert torch.equal(round_fp8(x), e4m3((x / scale).clamp(-448, 448)) * scale)


def test_fp8_rounding_of_every_tie() -> None:
    """All values, and the middles between them, both signs: scale 1 by a 448 in each group.

    Few values take another path than many; the bits must not tell, not even those of zero.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat((codes, middles))
    groups = torch.zeros(len(values), 32)
    groups[:, 0], groups[:, 1], groups[:, 2] = 448.0, values, -values
    many = round_fp8(groups)
    assert many.numel() > FEW_VALUES
    assert torch.equal(many, e4m3(groups))
    for index in range(len(values)):
        few = round_fp8(groups[index : index + 1])
        assert torch.equal(few.view(torch.int32), many[index : index + 1].view(torch.int32))


@given(st.lists(floats, min_size=32, max_size=32))
@settings(max_examples=60, deadline=None)
def test_fp4_rounding_with_power_of_two_scales(values: list[float]) -> None:
    x = torch.tensor([values])
    amax = x.abs().max().clamp_min(6 * 2.0**-126)
    scale = 2.0 ** math.ceil(math.log2(float(amax / 6)))
    wanted = [e2m1_naive(float(v) / scale) * scale for v in x[0]]
    assert round_fp4_ue8m0(x)[0].tolist() == torch.tensor(wanted).tolist()


@given(st.lists(floats, min_size=16, max_size=16))
@settings(max_examples=60, deadline=None)
def test_fp4_rounding_with_fp8_scales(values: list[float]) -> None:
    x = torch.tensor([values]) / 100
    scale = e4m3(x.abs().max().clamp_min(6 * 2.0**-9) / 6)
    wanted = [e2m1_naive(float(v / scale)) * float(scale) for v in x[0]]
    assert torch.allclose(round_fp4_e4m3(x)[0], torch.tensor(wanted), rtol=1e-6, atol=0)


def test_fp4_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0] + [0.0] * 22])
    wanted = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -4.0]
    assert round_fp4_ue8m0(x)[0, :10].tolist() == wanted


@pytest.mark.parametrize("op", [round_fp8, round_fp4_ue8m0, round_fp4_e4m3, round_bf16])
def test_rounded_values_stay(op: object) -> None:
    assert callable(op)
    for x in (torch.zeros(3, 32), torch.randn(50, 64) * torch.logspace(-3, 3, 50)[:, None]):
        once = op(x)
        # An FP8 or FP4 group whose largest value fell below half may get a finer scale later,
        # in which all its values are representable, too.
        assert torch.equal(op(once), once) or op is round_fp4_e4m3
        assert once.isfinite().all()


def test_groups_must_fit() -> None:
    with pytest.raises(ValueError, match="not a multiple of 32"):
        round_fp8(torch.zeros(2, 40))
