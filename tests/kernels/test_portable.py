"""Kernels of any shape against those of the CPU: the same bits, on a host and on a GPU."""

import pytest
import torch
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from kernels.attention.cache_rows import store_rows
from kernels.attention.compress import pool_pairs
from kernels.attention.index_scores import index_scores
from kernels.attention.pools import RowFormat, RowPool
from kernels.attention.rope import rotate
from kernels.attention.rows_portable import (
    pool_pairs_portable,
    rotate_portable,
    store_rows_portable,
)
from kernels.attention.select import candidate_blocks, top_k_indices
from kernels.attention.sparse import sparse_attention
from kernels.attention.sparse_portable import (
    choose_candidates,
    choose_slots,
    index_scores_portable,
    sparse_attention_portable,
)
from kernels.engram.gate import add_gated, engram_gate
from kernels.engram.gate_portable import engram_portable
from kernels.engram.gather import gather_rows
from kernels.engram.gather_portable import gather_portable
from kernels.engram.hash import ngram_rows
from kernels.mhc.mix import hyper_mix
from kernels.mhc.rms_norm import rms_norm
from kernels.mhc.streams import collapse, collapse_norm, expand
from kernels.mhc.streams_portable import (
    collapse_norm_portable,
    collapse_portable,
    expand_portable,
    hyper_mix_portable,
    rms_norm_portable,
)
from kernels.moe.experts import all_experts
from kernels.moe.experts_portable import (
    combine_portable,
    expert_mlp_portable,
    route_portable,
    routed_experts_portable,
)
from kernels.moe.gate import route
from kernels.quant.linear import Rounding, linear, pack_linear
from kernels.quant.linear_portable import (
    FP4_E4M3,
    FP4_UE8M0,
    FP8,
    linear_portable,
    round_bf16_portable,
    round_portable,
    transpose_linear,
)
from kernels.quant.rounding import round_bf16, round_fp4_e4m3, round_fp4_ue8m0, round_fp8

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
both_precisions = pytest.mark.parametrize("bf16", [False, True])


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal deviates, a few of them large or tiny."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-8, 9, shape, generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(powers * 0.5)


def same(ours: Tensor, wanted: Tensor) -> bool:
    """Equal values; both zeros are the same, NaN is NaN."""
    ours = ours.cpu()
    return ours.shape == wanted.shape and torch.equal(ours.nan_to_num(7.5), wanted.nan_to_num(7.5))


@every_device
@both_precisions
@pytest.mark.parametrize("tokens", [0, 1, 5, 9])
@pytest.mark.parametrize(("groups", "inner", "outer"), [(1, 96, 40), (2, 64, 24), (1, 45, 7)])
@pytest.mark.parametrize("exact", [True, False])
def test_linears(
    device: str, bf16: bool, tokens: int, groups: int, inner: int, outer: int, exact: bool
) -> None:
    weights = draw(groups, outer, inner, seed=1)
    if exact:
        weights = weights.bfloat16().float()
    x = draw(tokens, groups * inner, seed=2)
    ours = transpose_linear(weights.to(device))
    assert (ours.data.dtype is torch.bfloat16) == exact
    for rounding in Rounding:
        if rounding is Rounding.FP8 and inner % 32:
            continue
        wanted = linear(x, pack_linear(weights), rounding=rounding, bf16=bf16)
        assert same(linear_portable(x.to(device), ours, rounding=rounding, bf16=bf16), wanted)


@every_device
def test_roundings(device: str) -> None:
    x = draw(7, 96)
    x[0], x[1, 3], x[2, :32] = 0.0, -0.0, 1e-30
    for row_format, wanted in (
        (FP8, round_fp8(x)),
        (FP4_E4M3, round_fp4_e4m3(x)),
        (FP4_UE8M0, round_fp4_ue8m0(x)),
    ):
        assert same(round_portable(x.to(device), row_format), wanted)
    assert same(round_bf16_portable(x.to(device)), round_bf16(x))
    with pytest.raises(ValueError, match="no whole number of groups"):
        round_portable(x[:, :40].contiguous().to(device), FP8)


@every_device
@both_precisions
@pytest.mark.parametrize(("hc", "hidden"), [(4, 96), (4, 40), (2, 33)])
def test_streams(device: str, bf16: bool, hc: int, hidden: int) -> None:
    tokens, eps = 5, 1e-20
    streams, y, weight = draw(tokens, hc, hidden), draw(tokens, hidden, seed=1), draw(hidden)
    fn = draw((2 + hc) * hc, hc * hidden, seed=2) * (hc * hidden) ** -0.5
    scale, base = draw(3, seed=3), draw((2 + hc) * hc, seed=4)
    iters = {"num_iters": 20, "hc_eps": 1e-6, "norm_eps": eps}
    wanted = hyper_mix(streams, pack_linear(fn), scale, base, **iters)
    on = [x.to(device) for x in (streams, y, weight, scale, base)]
    packed = transpose_linear(fn.unsqueeze(0).to(device))
    ours = hyper_mix_portable(on[0], packed, on[3], on[4], **iters)
    assert all(same(a, b) for a, b in zip(ours, wanted, strict=True))
    pre = wanted.pre.to(device)
    assert same(collapse_portable(on[0], pre, bf16=bf16), collapse(streams, wanted.pre, bf16=bf16))
    assert same(
        collapse_norm_portable(on[0], pre, on[2], eps, bf16=bf16),
        collapse_norm(streams, wanted.pre, weight, eps, bf16=bf16),
    )
    assert same(
        expand_portable(on[0], on[1], ours.post, ours.comb, bf16=bf16),
        expand(streams, y, wanted.post, wanted.comb, bf16=bf16),
    )
    part, start = draw(4, hidden + 8), 5
    assert same(
        rms_norm_portable(part.to(device)[:, start : start + hidden], on[2], eps, bf16=bf16),
        rms_norm(part[:, start : start + hidden], weight, eps, bf16=bf16),
    )


@every_device
@both_precisions
@pytest.mark.parametrize("row_format", list(RowFormat))
def test_cache_rows(device: str, bf16: bool, row_format: RowFormat) -> None:
    rows, dim, rope = 6, 96, 16
    x, weight = draw(rows, dim), draw(dim, seed=1)
    x[3] = 0.0
    cos, sin = draw(rows, rope // 2, seed=2).cos(), draw(rows, rope // 2, seed=2).sin()
    slots = torch.tensor([7, 0, 3, 9, 1, 4])
    is_float = row_format is RowFormat.FLOAT
    empty = torch.zeros(11, dim) if is_float else torch.zeros(11, row_format.row_bytes(dim)).byte()
    for norm in (None, weight):
        wanted, ours = empty.clone(), empty.to(device, copy=True)
        arguments = {"bf16": bf16, "eps": 1e-20}
        pool = RowPool(wanted, row_format, dim)
        store_rows(x, cos, sin, pool, slots, weight=norm, **arguments)
        store_rows_portable(
            x.to(device),
            cos.to(device),
            sin.to(device),
            RowPool(ours, row_format, dim),
            slots.to(device),
            weight=None if norm is None else norm.to(device),
            **arguments,
        )
        assert same(ours.float(), wanted.float())


@every_device
@both_precisions
def test_a_group_with_a_nan_stays_one(device: str, bf16: bool) -> None:
    x, angles = draw(2, 64), (torch.ones(2, 4), torch.zeros(2, 4))
    x[1, 40] = torch.nan
    for row_format in (RowFormat.FP8, RowFormat.FP4_E4M3, RowFormat.FP4_UE8M0):
        held = torch.zeros(3, row_format.row_bytes(64), dtype=torch.uint8, device=device)
        pool = RowPool(held, row_format, 64)
        cos, sin = (part.to(device) for part in angles)
        slots = torch.tensor([0, 1], device=device)
        store_rows_portable(x.to(device), cos, sin, pool, slots, bf16=bf16)
        read = RowPool(held.cpu(), row_format, 64).gather(torch.tensor([0, 1]))
        assert read[0].isfinite().all()
        assert read[1, 40].isnan()


@every_device
@both_precisions
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_and_pooling(device: str, bf16: bool, inverse: bool) -> None:
    x, angles = draw(4, 3, 40), draw(4, 8, seed=1)
    on = [part.to(device) for part in (x, angles.cos(), angles.sin())]
    wanted = rotate(x, angles.cos(), angles.sin(), inverse=inverse, bf16=bf16)
    assert same(rotate_portable(*on, inverse=inverse, bf16=bf16), wanted)
    pairs = draw(5, 2, 80, seed=2)
    ours = pool_pairs_portable(
        pairs[:, 0].contiguous().to(device), pairs[:, 1].contiguous().to(device), bf16=bf16
    )
    assert same(ours, pool_pairs(pairs[:, :, :40], pairs[:, :, 40:], bf16=bf16))


def filled_pool(row_format: RowFormat, rows: int, dim: int) -> RowPool:
    """A pool of random rows, the last one zeros."""
    if row_format is RowFormat.FLOAT:
        held = draw(rows + 1, dim, seed=5)
        held[-1] = 0.0
        return RowPool(held, row_format, dim)
    pool = RowPool(
        torch.zeros(rows + 1, row_format.row_bytes(dim), dtype=torch.uint8), row_format, dim
    )
    flat = torch.ones(rows, 4), torch.zeros(rows, 4)
    store_rows(draw(rows, dim, seed=5), *flat, pool, torch.arange(rows), bf16=False)
    return pool


def moved(pool: RowPool, device: str) -> RowPool:
    return RowPool(pool.rows.to(device), pool.row_format, pool.dim)


@every_device
@both_precisions
@pytest.mark.parametrize("packed", [False, True])
def test_attention(device: str, bf16: bool, packed: bool) -> None:
    tokens, heads, dim = 5, 3, 64
    window = filled_pool(RowFormat.FP8 if packed else RowFormat.FLOAT, 40, dim)
    compressed = filled_pool(RowFormat.FP4_E4M3 if packed else RowFormat.FLOAT, 70, dim)
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 41, (tokens, 16), generator=generator)
    second = torch.randint(0, 71, (tokens, 37), generator=generator)
    second[1] = compressed.null_row
    first[2, 1:], second[2] = window.null_row, compressed.null_row
    queries = round_bf16(draw(tokens, heads, dim, seed=6) * 0.3)
    sinks = draw(heads, seed=7)
    absent = second.masked_fill(second == compressed.null_row, -1)
    for pool, slots, given in ((compressed, second, absent), (None, None, None)):
        wanted = sparse_attention(queries, window, first, pool, slots, sinks, bf16=bf16)
        ours = sparse_attention_portable(
            queries.to(device),
            moved(window, device),
            first.to(device),
            None if pool is None else moved(pool, device),
            None if given is None else given.to(device),
            sinks.to(device),
            bf16=bf16,
        )
        assert same(ours, wanted)
    nothing = torch.full_like(first, -1).to(device)
    on = queries.to(device), moved(window, device), nothing, None, None, sinks.to(device)
    assert sparse_attention_portable(*on, bf16=bf16).eq(0).all()


@every_device
@both_precisions
@pytest.mark.parametrize("row_format", [RowFormat.FLOAT, RowFormat.FP4_UE8M0])
def test_index_scores_and_what_they_choose(device: str, bf16: bool, row_format: RowFormat) -> None:
    tokens, heads, dim, entries, top_k = 6, 5, 32, 8, 12
    pool = filled_pool(row_format, 10 * entries, dim)
    blocks = torch.tensor([[3, 0, 7, 9, 1], [2, 8, -1, -1, -1]])
    table = BlockTable(blocks, entries, pool.null_row)
    rows, visible = torch.tensor([0, 0, 1, 0, 1, 0]), torch.tensor([38, 40, 13, 17, 16, 29])
    queries = round_fp4_ue8m0(draw(tokens, heads, dim, seed=8))
    weights = round_bf16(draw(tokens, heads, seed=9))
    wanted = index_scores(queries, weights, pool, table, rows, visible, 40, bf16=bf16)
    on = BlockTable(blocks.to(device), entries, pool.null_row)
    rows_on, visible_on = rows.to(device), visible.to(device)
    ours = index_scores_portable(
        queries.to(device),
        weights.to(device),
        moved(pool, device),
        on,
        rows_on,
        visible_on,
        40,
        bf16=bf16,
    )
    assert same(ours, wanted)
    kept = candidate_blocks(wanted, visible, 4, 5)
    chosen = choose_candidates(ours, visible_on, 4, 5)
    for allowed, mask in ((None, None), (chosen, kept)):
        slots = choose_slots(ours, visible_on, top_k, on, rows_on, allowed=allowed, block_size=4)
        expected = table.slots(rows, top_k_indices(wanted, top_k, mask))
        slots = slots.cpu()
        assert torch.equal(torch.where(slots < 0, pool.null_row, slots), expected)


@every_device
@both_precisions
def test_router_and_experts(device: str, bf16: bool) -> None:
    tokens, experts, top_k, hidden, inter, limit = 7, 10, 3, 64, 32, 2.0
    x, bias = round_bf16(draw(tokens, hidden)), draw(experts, seed=1) * 0.1
    gate = draw(experts, hidden, seed=2) * 0.1
    gate[4] = gate[7]  # a tie goes to the lower id
    bias[4] = bias[7]
    scores = linear(x, pack_linear(gate))
    ids, shares = route(scores, bias, top_k, scaling=1.5, temperature=0.7)
    found = route_portable(scores.to(device), bias.to(device), top_k, scaling=1.5, temperature=0.7)
    assert torch.equal(found[0].cpu(), ids)
    assert same(found[1], shares)
    w13 = (draw(experts, 2 * inter, hidden, seed=3) * 0.1).bfloat16().float()
    w2 = (draw(experts, hidden, inter, seed=4) * 0.1).bfloat16().float()
    how = {"limit": limit, "bf16": bf16}
    wanted = all_experts(
        x,
        ids,
        shares,
        *(pack_linear(weight) for weight in (w13, w2, w13[0], w2[1])),
        **how,
    )
    ours = [transpose_linear(w.to(device)) for w in (w13, w2, w13[:1], w2[1:2])]
    on = x.to(device)
    slots = routed_experts_portable(on, *found, *ours[:2], first_expert=0, **how)
    shared = expert_mlp_portable(on, *ours[2:], **how)
    assert same(combine_portable(slots, shared, bf16=bf16), wanted)
    part = [transpose_linear(w[4:].to(device)) for w in (w13, w2)]
    half = routed_experts_portable(on, *found, *part, first_expert=4, **how).cpu()
    assert same(half, slots.cpu().masked_fill((ids < 4).unsqueeze(2), 0.0))


@every_device
@both_precisions
def test_engram(device: str, bf16: bool) -> None:
    tokens, hc, hidden = 4, 4, 40
    streams, both = draw(tokens, hc, hidden), draw(tokens, (hc + 1) * hidden, seed=1)
    q, k = draw(hc, hidden, seed=2), draw(hc, hidden, seed=3)
    keys = both[:, : hc * hidden].unflatten(1, (hc, hidden))
    gates = engram_gate(streams, keys, q, k, 1e-20)
    wanted = add_gated(streams, gates, both[:, hc * hidden :], bf16=bf16)
    inputs = streams.to(device), both.to(device), q.to(device), k.to(device)
    ours = engram_portable(*inputs, 1e-20, bf16=bf16)
    assert same(ours, wanted)


@every_device
def test_engram_rows_are_found_and_gathered(device: str) -> None:
    generator = torch.Generator().manual_seed(9)
    rows, dim, order, heads = 500, 64, 4, 2
    codes = torch.randint(0, 127, (rows, dim), generator=generator).to(torch.uint8)
    table = codes.view(torch.float8_e4m3fn)
    scales = torch.randint(110, 130, (rows, dim // 32), generator=generator).to(torch.uint8)
    ids = torch.randint(-1, 90, (23, order), generator=generator)
    multipliers = torch.randint(1 << 40, 1 << 62, (order,), generator=generator) * 2 + 1
    primes = torch.tensor([[61, 67], [71, 73], [79, 83]])
    offsets = primes.flatten().cumsum(0).view(3, heads) - primes
    constants = multipliers, primes, offsets
    wanted = gather_rows(table, scales, ngram_rows(ids, 5, *constants))
    if device == "cuda":
        table, scales = table.pin_memory(), scales.pin_memory()
    for dtype in (torch.float32, torch.bfloat16):
        moved = [x.to(device) for x in (ids, *constants)]
        ours = gather_portable(
            moved[0], 5, moved[1], moved[2], moved[3], table, scales, dtype=dtype
        )
        assert ours.dtype is dtype
        assert torch.equal(ours.float().cpu(), wanted)
