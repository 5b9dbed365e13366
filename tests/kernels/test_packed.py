"""Codes multiply like the values that they stand for, bit for bit, whatever way a call takes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.moe.experts import all_experts, combine_slots, expert_mlp, routed_experts
from kernels.quant.linear import Kind, Rounding, linear, pack_linear
from kernels.quant.pack import pack_fp4, pack_fp8, row_scales
from kernels.quant.unpack import unpack_fp4, unpack_fp8
from tests.kernels.quantised import both_fp4, both_fp8, random_fp4, random_fp8

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    native.use()
    torch.set_num_threads(1)


def same_bits(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


# (out, in): linears of V4.1-Flash (cut), V4-Flash (cut), the medium and the tiny model, odd ones
SHAPES = [(272, 5120), (96, 4096), (384, 1024), (1024, 512), (160, 256), (7, 32), (1, 96), (40, 64)]


@pytest.mark.parametrize(("outer", "inner"), SHAPES)
def test_linears_of_codes(outer: int, inner: int) -> None:
    x = torch.randn(37, inner)
    for kind, (packed, plain) in (
        (Kind.FP4, both_fp4(outer, inner)),
        (Kind.FP8, both_fp8(outer, inner)),
    ):
        assert packed.kind is kind
        assert plain.kind is Kind.BF16
        wanted = linear(x, plain)
        same_bits(linear(x, packed), wanted)
        for rounding in (Rounding.BF16, Rounding.FP8):  # rows that matrix tiles can take
            rounded = linear(x, plain, rounding=rounding)
            same_bits(linear(x, packed, rounding=rounding), rounded)
            for rows in (1, 3, 16, 17):
                some = x[:rows]
                same_bits(linear(some, packed, rounding=rounding), rounded[:rows])
                same_bits(linear(some, packed), wanted[:rows])


@pytest.mark.parametrize(("outer", "inner"), SHAPES)
def test_linears_of_codes_against_float64(outer: int, inner: int) -> None:
    codes, scale = random_fp4(outer, inner)
    x = torch.randn(5, inner)
    wanted = x.double() @ unpack_fp4(codes, scale).double().t()
    error = (linear(x, pack_fp4(codes, scale)) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 2e-6


def test_every_code_has_its_value() -> None:
    """Each code alone, at every place of a group, at the ends of the range of scales, too."""
    for scale in (27, 127, 227):
        fp8 = torch.arange(256, dtype=torch.uint8)
        fp8[(fp8 & 127) == 127] = 0
        codes = torch.stack([fp8.roll(i) for i in range(32)])
        scales = torch.full((32, 8), scale, dtype=torch.uint8)
        stored = codes.view(torch.float8_e4m3fn)
        found = linear(torch.eye(256), pack_fp8(stored, scales))
        assert torch.equal(found.t(), unpack_fp8(stored, scales))
        nibbles = torch.arange(64, dtype=torch.uint8).repeat(32, 1) * 5
        stored4, scales = nibbles.view(torch.int8), torch.full((32, 4), scale, dtype=torch.uint8)
        found = linear(torch.eye(128), pack_fp4(stored4, scales), rounding=Rounding.BF16)
        assert torch.equal(found.t(), unpack_fp4(stored4, scales))


def test_what_codes_cannot_keep_exactly_is_kept_as_values() -> None:
    codes, scale = random_fp4(16, 64)
    scale[3, 1] = 7
    packed = pack_fp4(codes, scale)
    assert packed.kind in (Kind.BF16, Kind.FP32)
    assert torch.equal(linear(torch.eye(64), packed).t()[3, :32], unpack_fp4(codes, scale)[3, :32])
    codes[3, 16:] = 0  # a group of zeros may have any scale
    assert pack_fp4(codes, scale).kind is Kind.FP4
    eights, scale = random_fp8(16, 64)
    eights[2, 5] = torch.nan
    packed = pack_fp8(eights, scale)
    assert packed.kind is Kind.FP32
    assert linear(torch.ones(1, 64), packed)[0, 2].isnan()


def test_scales_must_fit() -> None:
    codes, scale = random_fp4(16, 64)
    with pytest.raises(ValueError, match=r"\(1, 16, 1\)"):
        pack_fp4(codes, scale[:, :1])


def test_blocks_of_scales_are_spread_over_rows() -> None:
    scale = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    spread = row_scales(scale, 40)
    assert spread.shape == (40, 2)
    assert spread[31].tolist() == [1, 2]
    assert spread[39].tolist() == [3, 4]


def test_without_native_kernels() -> None:
    stored = random_fp4(24, 64)
    found = linear(torch.eye(64), pack_fp4(*stored)).t()
    native.use(native.REFERENCE)
    packed = pack_fp4(*stored)
    assert packed.kind is Kind.PLAIN
    assert torch.equal(linear(torch.eye(64), packed).t(), found)


def test_parts_of_the_outputs() -> None:
    packed, plain = both_fp8(80, 64)
    x = torch.randn(9, 64)
    same_bits(linear(x, packed.outputs(48)), linear(x, plain)[:, 48:].contiguous())


# (hidden, inter, experts): V4.1-Flash, V4-Flash, medium, tiny, odd ones
EXPERTS = [
    (5120, 2304, 2),
    (4096, 2048, 2),
    (1024, 512, 8),
    (256, 128, 8),
    (96, 32, 3),
    (64, 40, 3),
]


@pytest.mark.parametrize(("hidden", "inter", "held"), EXPERTS)
def test_experts_of_codes(hidden: int, inter: int, held: int) -> None:
    if inter % 32:  # FP4 has whole groups only
        w2 = (pack_linear(torch.randn(held, hidden, inter).bfloat16().float()),) * 2
        shared2 = (pack_linear(torch.randn(hidden, inter).bfloat16().float()),) * 2
    else:
        w2, shared2 = both_fp4(held, hidden, inter, seed=1), both_fp8(hidden, inter, seed=2)
    w13, shared13 = both_fp4(held, 2 * inter, hidden, seed=3), both_fp8(2 * inter, hidden, seed=4)
    for tokens in (1, 2, 5, 16, 70):
        x, shares = torch.randn(tokens, hidden), torch.rand(tokens, 2)
        ids = torch.rand(tokens, held).argsort(1)[:, :2].sort(1).values
        for bf16 in (False, True):
            results: list[tuple[Tensor, ...]] = []
            for way in (0, 1):
                slots = routed_experts(
                    x, ids, shares, w13[way], w2[way], first_expert=0, limit=10.0, bf16=bf16
                )
                mlp = expert_mlp(x, shared13[way], shared2[way], limit=10.0, bf16=bf16)
                results.append((slots, mlp))
            for found, wanted in zip(*results, strict=True):
                same_bits(found, wanted)
            slots, mlp = results[0]
            whole = combine_slots(slots) + mlp
            together = all_experts(
                x, ids, shares, w13[0], w2[0], shared13[0], shared2[0], limit=10.0, bf16=bf16
            )
            same_bits(together, whole.bfloat16().float() if bf16 else whole)


@pytest.mark.parametrize("level", ["", native.REFERENCE])
def test_no_tokens(level: str) -> None:
    native.use(level)
    w13, w2 = pack_fp4(*random_fp4(3, 64, 32)), pack_fp4(*random_fp4(3, 32, 32))
    shared13, shared2 = pack_fp8(*random_fp8(64, 32)), pack_fp8(*random_fp8(32, 32))
    x, ids = torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.int64)
    shares = torch.zeros(0, 2)
    out = all_experts(x, ids, shares, w13, w2, shared13, shared2, limit=1.0, bf16=True)
    assert out.shape == (0, 32)


def test_all_experts_by_reference() -> None:
    x, shares = torch.randn(4, 64), torch.rand(4, 2)
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 2]])
    results: list[Tensor] = []
    for level in ("", native.REFERENCE):
        native.use(level)
        w13, w2 = pack_fp4(*random_fp4(3, 64, 64)), pack_fp4(*random_fp4(3, 64, 32))
        shared13, shared2 = pack_fp8(*random_fp8(64, 64)), pack_fp8(*random_fp8(64, 32))
        weights = w13, w2, shared13, shared2
        results.append(all_experts(x, ids, shares, *weights, limit=10.0, bf16=False))
    found, wanted = results
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_more_rows_than_go_in_one_block(bf16: bool, threads: int) -> None:
    """Of an expert, of the shared one and of a linear; the same bits as a few rows alone."""
    w13, w2 = pack_fp4(*random_fp4(2, 64, 64)), pack_fp4(*random_fp4(2, 64, 32))
    shared13, shared2 = pack_fp8(*random_fp8(64, 64)), pack_fp8(*random_fp8(64, 32))
    x, shares = torch.randn(1100, 64), torch.rand(1100, 2)
    ids = torch.tensor([[0, 1]]).expand(1100, 2)

    def run(first: int, end: int) -> tuple[Tensor, Tensor]:
        weights = w13, w2, shared13, shared2
        part = x[first:end], ids[first:end], shares[first:end]
        rounding = Rounding.FP8 if bf16 else Rounding.NONE
        return (
            all_experts(*part, *weights, limit=10.0, bf16=bf16),
            linear(x[first:end], shared13, rounding=rounding, bf16=bf16),
        )

    torch.set_num_threads(threads)
    whole = run(0, 1100)
    torch.set_num_threads(1)
    for first in (0, 285, 576, 1090):
        for found, wanted in zip(run(first, first + 10), whole, strict=True):
            same_bits(found, wanted[first : first + 10])


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_threads_share_out_the_weights_of_few_rows(tokens: int) -> None:
    """Who comes first takes a piece, and the second product begins where the first is done."""
    hidden, inter = 256, 544
    w13, w2 = pack_fp4(*random_fp4(8, 2 * inter, hidden)), pack_fp4(*random_fp4(8, hidden, inter))
    shared13 = pack_fp8(*random_fp8(2 * inter, hidden))
    shared2 = pack_fp8(*random_fp8(hidden, inter))
    x, shares = torch.randn(tokens, hidden), torch.rand(tokens, 3)
    ids = torch.rand(tokens, 8).argsort(1)[:, :3].sort(1).values
    weights = w13, w2, shared13, shared2
    for bf16 in (False, True):
        wanted = all_experts(x, ids, shares, *weights, limit=10.0, bf16=bf16)
        for threads in (2, 3) * 8:
            torch.set_num_threads(threads)
            same_bits(all_experts(x, ids, shares, *weights, limit=10.0, bf16=bf16), wanted)
        torch.set_num_threads(1)
