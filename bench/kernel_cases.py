"""Kernels of the CPU path at the shapes of a model: what each reads, multiplies, and runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention.block_slots import BlockTable
from kernels.attention.index_scores import index_scores
from kernels.attention.pools import RowFormat, RowPool
from kernels.attention.select import top_k_indices
from kernels.attention.sparse import sparse_attention
from kernels.mhc.mix import hyper_mix
from kernels.mhc.rms_norm import rms_norm
from kernels.moe.experts import routed_experts
from kernels.moe.gate import route
from kernels.quant.linear import LinearWeight, Rounding, linear, pack_linear
from kernels.quant.pack import pack_fp4, pack_fp8
from kernels.quant.unpack import unpack_fp8
from services.executor.model_config import ModelConfig

COPIES_BYTES = 192 << 20  # of weights to go through in turn: beyond the caches that a core has
MAX_COPIES = 8
EXPERT_WEIGHTS = 600_000_000  # of a layer, at most: the experts that are never chosen are left out
CONTEXT = 2048
BLOCK = 64
FP4_BYTES, FP8_BYTES = 17 / 32, 1 + 1 / 1024  # of a weight, its share of the scales included
SCALE = 120  # 2^-7, as UE8M0
POOL_TOKENS = 16  # tokens with rows of their own; more share these


@dataclass
class Case:
    """One kernel at one shape; `ours(i)` and `peer(i)` use copy i of what is read."""

    op: str
    shape: str
    read_bytes: int  # as the checkpoint and the packed cache formats hold it
    flops: int
    copies: int
    ours: Callable[[int], Tensor]
    peer: Callable[[int], Tensor] | None = None


def cases(config: ModelConfig, rows: tuple[int, ...]) -> Iterator[Case]:
    """All of them, one after another: their weights live as long as the case."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    down = config.q_lora_rank + config.head_dim
    linears = ((hidden, down), (config.q_lora_rank, heads * config.head_dim))
    linears += ((config.o_groups * config.o_lora_rank, hidden),)
    for inner, outer in linears:
        for count in rows:
            yield linear_case(count, inner, outer)
    for count in rows:
        yield experts_case(config, count)
    for count in rows:
        yield attention_case(config, count)
        yield scores_case(config, count)
        yield select_case(config, count)
        yield mix_case(config, count)
        yield norm_case(config, count)
        yield route_case(config, count)


def linear_case(rows: int, inner: int, outer: int) -> Case:
    """Rows times an FP8 weight; the peer is torch's bfloat16 product."""
    copies = max(1, min(MAX_COPIES, COPIES_BYTES // (2 * inner * outer)))
    stored = [fp8_codes(outer, inner) for _ in range(copies)]
    packed = [pack_fp8(*codes) for codes in stored]
    plain = [unpack_fp8(*codes).bfloat16() for codes in stored]
    x = torch.randn(rows, inner).bfloat16()
    return Case(
        "linear",
        f"{rows}x{inner}x{outer}",
        round(FP8_BYTES * inner * outer),
        2 * rows * inner * outer,
        copies,
        lambda i: linear(x.float(), packed[i], rounding=Rounding.BF16, bf16=True),
        lambda i: F.linear(x, plain[i]).float(),
    )


def experts_case(config: ModelConfig, rows: int) -> Case:
    """Routed experts; what is read are the experts that the rows touch."""
    hidden, inner, top_k = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts_per_tok,
    )
    weights = 3 * hidden * inner
    experts = max(top_k, min(config.n_routed_experts, EXPERT_WEIGHTS // weights))
    w13, w2 = expert_weights(experts, hidden, inner)
    ids = torch.rand(rows, experts).argsort(1)[:, :top_k].sort(1).values
    x, shares = torch.randn(rows, hidden), torch.rand(rows, top_k)
    return Case(
        "routed_experts",
        f"{rows}x{top_k} of {experts}x{hidden}x{inner}",
        round(FP4_BYTES * ids.unique().numel() * weights),
        2 * rows * top_k * weights,
        1,
        lambda _: routed_experts(x, ids, shares, w13, w2, first_expert=0, limit=10.0, bf16=True),
    )


def expert_weights(experts: int, hidden: int, inner: int) -> tuple[LinearWeight, LinearWeight]:
    """w13 and w2 of so many experts, packed as the loader packs them."""
    return pack_fp4(*fp4_codes(experts, 2 * inner, hidden)), pack_fp4(
        *fp4_codes(experts, hidden, inner)
    )


def fp8_codes(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Any finite codes, and a scale for 32 of a row."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    scales = torch.full((rows, columns // 32), SCALE, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), scales


def fp4_codes(groups: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Any codes, two in a byte, and a scale for 32 of a row."""
    codes = torch.randint(0, 256, (groups, rows, columns // 2), dtype=torch.uint8)
    scales = torch.full((groups, rows, columns // 32), SCALE, dtype=torch.uint8)
    return codes.view(torch.int8), scales


def pool_of(count: int, row_format: RowFormat, dim: int) -> RowPool:
    """Rows as the cache stores them; the last stands for none."""
    width = row_format.row_bytes(dim)
    pool = RowPool(torch.zeros(count + 1, width, dtype=torch.uint8), row_format, dim)
    pool.put(torch.arange(count), torch.randn(count, dim))
    return pool


def attention_case(config: ModelConfig, rows: int) -> Case:
    """Each token over window and compressed rows scattered over their pools."""
    heads, dim, window, top_k = (
        config.num_attention_heads,
        config.head_dim,
        config.sliding_window,
        config.index_topk,
    )
    own = min(rows, POOL_TOKENS)
    near = pool_of(own * window, RowFormat.FP8, dim)
    far = pool_of(own * top_k, RowFormat.FP4_E4M3, dim)
    near_slots, far_slots = (
        torch.randperm(own * width).view(own, width).sort(1).values[torch.arange(rows) % own]
        for width in (window, top_k)
    )
    queries, sinks = torch.randn(rows, heads, dim), torch.zeros(heads)
    row_bytes = window * near.row_format.row_bytes(dim) + top_k * far.row_format.row_bytes(dim)
    return Case(
        "sparse_attention",
        f"{rows}x{heads}x{dim} over {window}+{top_k}",
        own * row_bytes,
        4 * rows * heads * (window + top_k) * dim,
        1,
        lambda _: sparse_attention(queries, near, near_slots, far, far_slots, sinks, bf16=True),
    )


def scores_case(config: ModelConfig, rows: int) -> Case:
    """Index scores of each token over the keys of its request."""
    heads, dim = config.index_n_heads, config.index_head_dim
    own = min(rows, POOL_TOKENS)
    pool = pool_of(own * CONTEXT, RowFormat.FP4_UE8M0, dim)
    table = BlockTable(torch.arange(own * CONTEXT // BLOCK).view(own, -1), BLOCK, own * CONTEXT)
    row_of = torch.arange(rows) % own
    queries = torch.randn(rows, heads, dim)
    weights, visible = torch.randn(rows, heads).bfloat16().float(), torch.full((rows,), CONTEXT)
    return Case(
        "index_scores",
        f"{rows}x{heads}x{dim} over {CONTEXT}",
        own * CONTEXT * pool.row_format.row_bytes(dim),
        2 * rows * heads * CONTEXT * dim,
        1,
        lambda _: index_scores(queries, weights, pool, table, row_of, visible, CONTEXT, bf16=True),
    )


def select_case(config: ModelConfig, rows: int) -> Case:
    """The best keys of each row; the peer is torch's topk, sorted by index."""
    scores, top_k = torch.randn(rows, CONTEXT), config.index_topk
    return Case(
        "top_k_indices",
        f"{rows}x{top_k} of {CONTEXT}",
        4 * rows * CONTEXT,
        0,
        1,
        lambda _: top_k_indices(scores, top_k),
        lambda _: scores.topk(top_k, dim=1).indices.sort(1).values,
    )


def mix_case(config: ModelConfig, rows: int) -> Case:
    """Mixing weights of the residual streams."""
    count, hidden = config.hc_mult, config.hidden_size
    outputs = (2 + count) * count
    fn, streams = (
        pack_linear(torch.randn(outputs, count * hidden)),
        torch.randn(rows, count, hidden),
    )
    scale, base = torch.ones(3), torch.zeros(outputs)
    return Case(
        "hyper_mix",
        f"{rows}x{count}x{hidden}",
        4 * outputs * count * hidden + 2 * rows * count * hidden,
        2 * rows * outputs * count * hidden,
        1,
        lambda _: (
            hyper_mix(
                streams,
                fn,
                scale,
                base,
                num_iters=config.hc_sinkhorn_iters,
                hc_eps=config.hc_eps,
                norm_eps=config.rms_norm_eps,
            ).comb
        ),
    )


def norm_case(config: ModelConfig, rows: int) -> Case:
    """RMSNorm of activations; the peer is torch's, in float32."""
    x, weight = torch.randn(rows, config.hidden_size), torch.ones(config.hidden_size)
    eps = config.rms_norm_eps
    return Case(
        "rms_norm",
        f"{rows}x{config.hidden_size}",
        4 * (rows + 1) * config.hidden_size,
        4 * rows * config.hidden_size,
        1,
        lambda _: rms_norm(x, weight, eps),
        lambda _: F.rms_norm(x, weight.shape, weight, eps),
    )


def route_case(config: ModelConfig, rows: int) -> Case:
    """The router's choice behind its product."""
    experts = config.n_routed_experts
    scores, bias = torch.randn(rows, experts), torch.zeros(experts)
    return Case(
        "route",
        f"{rows}x{config.num_experts_per_tok} of {experts}",
        4 * (rows + 1) * experts,
        0,
        1,
        lambda _: route(scores, bias, config.num_experts_per_tok, scaling=1.5)[1],
    )
