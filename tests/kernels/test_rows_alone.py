"""Every kernel gives a row the same bits alone, among others, and in another place."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.attention.block_slots import BlockTable
from kernels.attention.cache_rows import cache_rows
from kernels.attention.compress import pool_pairs
from kernels.attention.index_scores import index_scores
from kernels.attention.pools import RowFormat
from kernels.attention.rope import RopeTable, frequencies, rotate
from kernels.attention.select import candidate_blocks, top_k_indices
from kernels.attention.sparse import sparse_attention
from kernels.engram.gate import add_gated, engram_gate
from kernels.engram.hash import ngram_rows
from kernels.mhc.mix import hyper_mix
from kernels.mhc.rms_norm import rms_norm
from kernels.mhc.streams import collapse, collapse_norm, expand
from kernels.moe.experts import all_experts, combine_slots, expert_mlp, routed_experts
from kernels.moe.gate import route
from kernels.quant.linear import Rounding, linear, pack_linear, tile_linear
from kernels.quant.pack import pack_fp4, pack_fp8
from kernels.quant.pointwise import sigmoid, silu, softplus
from kernels.quant.rounding import round_fp4_e4m3, round_fp4_ue8m0, round_fp8
from tests.kernels.quantised import random_fp4, random_fp8

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


Rows = tuple[Tensor, ...]  # inputs with one row per token
Outputs = tuple[Tensor, ...]
NUM_TOKENS = 70


def normal(*shape: int) -> Tensor:
    """Values that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear_case(inner: int, outer: int) -> tuple[Rows, Callable[..., Outputs]]:
    weight = normal(inner, outer)
    packed, rounded = pack_linear(weight.t()), pack_linear(weight.t().bfloat16().float())
    return (normal(NUM_TOKENS, inner),), lambda x: (
        tile_linear(x, weight),
        linear(x, packed),
        linear(x, rounded, rounding=Rounding.BF16, bf16=True),
    )


def attention_case(bf16: bool) -> tuple[Rows, Callable[..., Outputs]]:
    window, compressed = normal(101, 64), normal(65, 64)
    window[-1] = compressed[-1] = 0.0
    generator = torch.Generator().manual_seed(1)
    slots = torch.randint(0, 101, (NUM_TOKENS, 16), generator=generator)
    chosen = torch.randint(0, 65, (NUM_TOKENS, 24), generator=generator)
    return (normal(NUM_TOKENS, 8, 64), slots, chosen), lambda q, a, b: (
        sparse_attention(q, window, a, compressed, b, normal(8), bf16=bf16),
    )


def index_case(bf16: bool) -> tuple[Rows, Callable[..., Outputs]]:
    pool, table = normal(1024, 32), BlockTable(torch.randperm(16).view(2, 8), 64, -1)
    visible, rows = torch.arange(NUM_TOKENS) * 7 + 1, torch.arange(NUM_TOKENS) % 2
    inputs = normal(NUM_TOKENS, 16, 32), normal(NUM_TOKENS, 16), rows, visible
    return inputs, lambda q, w, r, v: (index_scores(q, w, pool, table, r, v, 500, bf16=bf16),)


def experts_case(bf16: bool) -> tuple[Rows, Callable[..., Outputs]]:
    w13, w2 = pack_linear(normal(8, 128, 64)), pack_linear(normal(8, 64, 64))
    shared13, shared2 = pack_linear(normal(128, 64)), pack_linear(normal(64, 64))
    ids = normal(NUM_TOKENS, 8).argsort(1)[:, :2].sort(1).values
    return (normal(NUM_TOKENS, 64), ids, normal(NUM_TOKENS, 2)), lambda x, e, w: (
        combine_slots(routed_experts(x, e, w, w13, w2, first_expert=0, limit=10.0, bf16=bf16)),
        expert_mlp(x, shared13, shared2, limit=10.0, bf16=bf16),
    )


def codes_case(inner: int, outer: int) -> tuple[Rows, Callable[..., Outputs]]:
    fp4, fp8 = pack_fp4(*random_fp4(outer, inner)), pack_fp8(*random_fp8(outer, inner))
    return (normal(NUM_TOKENS, inner),), lambda x: (
        linear(x, fp4),
        linear(x, fp8),
        linear(x, fp4, rounding=Rounding.FP8, bf16=True),
        linear(x, fp8, rounding=Rounding.BF16),
    )


def coded_experts_case(bf16: bool) -> tuple[Rows, Callable[..., Outputs]]:
    w13, w2 = pack_fp4(*random_fp4(8, 192, 128)), pack_fp4(*random_fp4(8, 128, 96))
    shared13, shared2 = pack_fp8(*random_fp8(192, 128)), pack_fp8(*random_fp8(128, 96))
    ids = normal(NUM_TOKENS, 8).argsort(1)[:, :2].sort(1).values
    return (normal(NUM_TOKENS, 128), ids, normal(NUM_TOKENS, 2)), lambda x, e, w: (
        routed_experts(x, e, w, w13, w2, first_expert=0, limit=10.0, bf16=bf16),
        expert_mlp(x, shared13, shared2, limit=10.0, bf16=bf16),
        all_experts(x, e, w, w13, w2, shared13, shared2, limit=10.0, bf16=bf16),
    )


def mix_case() -> tuple[Rows, Callable[..., Outputs]]:
    fn, scale, base = pack_linear(normal(24, 256)), normal(3), normal(24)
    return (normal(NUM_TOKENS, 4, 64),), lambda x: tuple(
        hyper_mix(x, fn, scale, base, num_iters=20, hc_eps=1e-6, norm_eps=1e-20)
    )


def rope_case() -> tuple[Rows, Callable[..., Outputs]]:
    table = RopeTable(frequencies(16, 10000.0))
    return (normal(NUM_TOKENS, 8, 64), torch.arange(NUM_TOKENS) * 31), lambda x, p: (
        rotate(x, *table.at(p)),
        rotate(x, *table.at(p), inverse=True, bf16=True),
        *(
            cache_rows(
                x[:, 0], *table.at(p), row_format=kept, bf16=True, weight=normal(64), eps=1e-6
            )
            for kept in RowFormat
        ),
    )


def engram_case() -> tuple[Rows, Callable[..., Outputs]]:
    q, k = normal(4, 64), normal(4, 64)
    return (normal(NUM_TOKENS, 4, 64), normal(NUM_TOKENS, 4, 64) * 2), lambda x, y: (
        gates := engram_gate(x, y, q, k, 1e-20),
        add_gated(x, gates, y[:, 0], bf16=True),
    )


def select_case() -> tuple[Rows, Callable[..., Outputs]]:
    scores = normal(NUM_TOKENS, 200).round()  # many ties
    visible = torch.full((NUM_TOKENS,), 200)
    return (scores, visible), lambda s, v: (
        top_k_indices(s, 30),
        candidate_blocks(s, v, 8, 5),
    )


CASES: dict[str, tuple[Rows, Callable[..., Outputs]]] = {
    "linear": linear_case(96, 40),
    "linear, sliced": linear_case(1000, 24),
    "attention": attention_case(False),
    "attention bf16": attention_case(True),
    "index": index_case(False),
    "index bf16": index_case(True),
    "experts": experts_case(False),
    "experts bf16": experts_case(True),
    "codes": codes_case(96, 40),
    "codes, long": codes_case(1024, 72),
    "experts of codes": coded_experts_case(False),
    "experts of codes bf16": coded_experts_case(True),
    "mix": mix_case(),
    "rope": rope_case(),
    "engram gate": engram_case(),
    "select": select_case(),
    "route": (
        (normal(NUM_TOKENS, 16),),
        lambda x: route(x, normal(16), 4, scaling=1.5),
    ),
    "pairs": (
        (normal(NUM_TOKENS, 2, 64), normal(NUM_TOKENS, 2, 64)),
        lambda v, g: (pool_pairs(v, g),),
    ),
    "norm": ((normal(NUM_TOKENS, 96),), lambda x: (rms_norm(x, normal(96), 1e-20),)),
    "streams": (
        (
            normal(NUM_TOKENS, 4, 64),
            normal(NUM_TOKENS, 64),
            normal(NUM_TOKENS, 4),
            normal(NUM_TOKENS, 4, 4),
        ),
        lambda x, y, post, comb: (
            collapse(x, post),
            collapse_norm(x, post, normal(64), 1e-20, bf16=True),
            expand(x, y, post, comb),
        ),
    ),
    "pointwise": (
        (normal(NUM_TOKENS, 37) * 5,),
        lambda x: (sigmoid(x), silu(x), softplus(x)),
    ),
    "rounding": (
        (normal(NUM_TOKENS, 96),),
        lambda x: (round_fp8(x), round_fp4_ue8m0(x), round_fp4_e4m3(x)),
    ),
    "hash": (
        (torch.arange(4 * NUM_TOKENS).view(-1, 4) % 97 - 1,),
        lambda ids: (
            ngram_rows(
                ids,
                5,
                torch.tensor([3, 5, 7, 9]),
                torch.tensor([[11, 13], [17, 19], [23, 29]]),
                torch.tensor([[0, 11], [24, 41], [60, 83]]),
            ),
        ),
    ),
}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32) if x.dtype == torch.float32 else x


def run_alike(op: Callable[..., Outputs], rows: Rows, wanted: Outputs, piece: Tensor) -> None:
    """The rows of `piece` by themselves have the bits that they have in the whole."""
    found = op(*[x[piece].contiguous() for x in rows])
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(bits(ours), bits(theirs[piece]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_see_each_other(name: str, threads: int) -> None:
    rows, op = CASES[name]
    whole = op(*rows)
    torch.set_num_threads(threads)
    try:
        run_alike(op, rows, whole, torch.randperm(NUM_TOKENS))
        for row in (0, 1, 17, NUM_TOKENS - 1):
            run_alike(op, rows, whole, torch.tensor([row]))
        for size in (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 47, 49, 50, 64):
            run_alike(op, rows, whole, torch.arange(size) + size % 7)
    finally:
        torch.set_num_threads(1)


@pytest.fixture
def every_level() -> Iterator[None]:
    yield
    native.use()


@pytest.mark.usefixtures("every_level")
@pytest.mark.parametrize("name", CASES)
def test_every_instruction_level_has_the_same_bits(name: str) -> None:
    rows, op = CASES[name]
    wanted = op(*rows)
    for level in native.supported_levels():
        native.use(level)
        for ours, theirs in zip(op(*rows), wanted, strict=True):
            assert torch.equal(bits(ours), bits(theirs)), level


@pytest.mark.parametrize("name", CASES)
def test_no_rows_give_no_rows(name: str) -> None:
    rows, op = CASES[name]
    for ours, wanted in zip(op(*[x[:0] for x in rows]), op(*rows), strict=True):
        assert ours.shape == (0, *wanted.shape[1:])
