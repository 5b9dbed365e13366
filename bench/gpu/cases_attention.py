"""Attention, indexer, seam and router of a layer of V4.1-Flash, over several sets of inputs.

The peer is torch: gathered rows, already unpacked to bfloat16 in its favour.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.gpu.timing import Rates, graph_us
from deepmesh.report import Json
from kernels.attention.index_scores_cuda import index_scores_decode
from kernels.attention.packed_rows import (
    pack_compressed_rows,
    pack_keys,
    pack_window_rows,
    unpack_compressed_rows,
)
from kernels.attention.select_cuda import candidate_blocks_decode, top_k_decode
from kernels.attention.sparse_cuda import BLOCK_HEADS, sparse_attention_decode
from kernels.attention.store_rows_cuda import PackedFormat, store_rows_decode
from kernels.mhc.mix import HyperMix
from kernels.mhc.seam_cuda import CLUSTER_TOKENS, pack_seam, seam
from kernels.moe.gate_cuda import route_decode
from kernels.quant.rounding_ref import round_fp4_ue8m0_ref

HEADS, DIM, WINDOW, TOP_K, HIDDEN = 64, 512, 128, 512, 5120
INDEX_HEADS, INDEX_DIM, ENTRIES = 32, 128, 32
SETS = 4
PROMPT_TOKENS = 1024  # so many at once are of one request
Case = dict[str, Json]


def attention_cases(
    rates: Rates, batches: list[int], *, variants: bool, with_peer: bool = True
) -> Iterator[Case]:
    """Sparse attention of rows, and torch over rows that are unpacked already.

    Rows of a decode step are of as many requests, those of a prompt neighbours in one.
    """
    slots = 1 << 17
    window = pack_window_rows(torch.randn(slots, DIM, device="cuda"))
    compressed = pack_compressed_rows(torch.randn(slots, DIM, device="cuda"))
    plain = unpack_compressed_rows(compressed).bfloat16()
    sinks = torch.randn(HEADS, device="cuda")
    for batch in batches:
        queries = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        near = [_windows(batch, slots) for _ in range(SETS)]
        far = [torch.randint(slots, (batch, TOP_K), device="cuda").int() for _ in range(SETS)]
        angles = torch.rand(batch, 32, device="cuda")
        rope = angles.cos(), angles.sin()

        def attend(
            at: int,
            block_heads: int = 0,
            queries: Tensor = queries,
            near: list[Tensor] = near,
            far: list[Tensor] = far,
            rope: tuple[Tensor, Tensor] = rope,
        ) -> Tensor:
            return sparse_attention_decode(
                queries,
                window,
                near[at],
                compressed,
                far[at],
                sinks,
                rope=rope,
                block_heads=block_heads,
            )

        def peer(
            at: int,
            queries: Tensor = queries,
            near: list[Tensor] = near,
            far: list[Tensor] = far,
            batch: int = batch,
        ) -> Tensor:
            picked = torch.cat((near[at], far[at]), 1).flatten()
            rows = plain.index_select(0, picked).view(batch, 1, -1, DIM)
            return F.scaled_dot_product_attention(queries.unsqueeze(2).transpose(1, 2), rows, rows)

        read = batch * (
            WINDOW * window.shape[1] + TOP_K * compressed.shape[1] + 2 * HEADS * DIM * 2
        )
        flops = batch * HEADS * (WINDOW + TOP_K) * DIM * 4
        times = graph_us(attend, SETS)
        name, shape = "sparse_decode", f"B={batch}"
        if batch >= PROMPT_TOKENS:
            name, shape = "sparse_prefill", f"{batch} tokens"
        case = rates.case(name, shape, times, read=read, flops=flops)
        if variants:
            case["by_block_heads_us"] = {
                str(count): round(graph_us(lambda at, c=count: attend(at, c), SETS)[0], 2)
                for count in BLOCK_HEADS
            }
        if with_peer:
            case["peers"] = {"torch": round(graph_us(peer, SETS)[0], 2)}
        yield case


def _windows(tokens: int, slots: int) -> Tensor:
    """[tokens, WINDOW], int32: rows of as many requests, or of the neighbours in one prompt."""
    if tokens < PROMPT_TOKENS:
        return torch.randint(slots, (tokens, WINDOW), device="cuda").int()
    first = int(torch.randint(slots - tokens - WINDOW, ()))
    ends = torch.arange(first, first + tokens, device="cuda").unsqueeze(1)
    return (ends + torch.arange(WINDOW, device="cuda")).int()


def index_cases(rates: Rates, shapes: list[tuple[int, int]]) -> Iterator[Case]:
    """Scores, choice of 512, and candidate blocks for (batch, keys of each row)."""
    for batch, keys in shapes:
        blocks = keys // ENTRIES
        count = max(batch * blocks, 1 << 13)
        raw = torch.randn(1 << 13, ENTRIES, INDEX_DIM, device="cuda").flatten(0, 1)
        packed = pack_keys(raw, ENTRIES)
        pool = packed.repeat(-(-count // packed.shape[0]), 1)
        tables = [
            torch.randperm(pool.shape[0], device="cuda")[: batch * blocks].view(batch, blocks).int()
            for _ in range(SETS)
        ]
        queries = torch.randn(batch, INDEX_HEADS, INDEX_DIM)
        queries = round_fp4_ue8m0_ref(queries, 32).bfloat16().cuda()
        weights = (torch.randn(batch, INDEX_HEADS, device="cuda") * 0.02).bfloat16()
        rows = torch.arange(batch, device="cuda", dtype=torch.int32)
        visible = torch.full((batch,), keys, device="cuda", dtype=torch.int32)

        def score(
            at: int,
            tables: list[Tensor] = tables,
            queries: Tensor = queries,
            weights: Tensor = weights,
            pool: Tensor = pool,
            rows: Tensor = rows,
            visible: Tensor = visible,
            keys: int = keys,
        ) -> Tensor:
            return index_scores_decode(
                queries, weights, pool, tables[at], ENTRIES, rows, visible, keys, skip=TOP_K
            )

        scores = [score(at) for at in range(SETS)]
        shape = f"B={batch} keys={keys}"
        read = batch * keys * (68 + 4)
        flops = batch * keys * INDEX_HEADS * INDEX_DIM * 2
        yield rates.case("index_scores", shape, graph_us(score, SETS), read=read, flops=flops)

        def choose(
            at: int,
            scores: list[Tensor] = scores,
            tables: list[Tensor] = tables,
            rows: Tensor = rows,
            visible: Tensor = visible,
        ) -> object:
            return top_k_decode(scores[at], visible, TOP_K, tables[at], ENTRIES, rows)

        case = rates.case("top_k", shape, graph_us(choose, SETS), read=batch * keys * 4)
        torch_us = graph_us(lambda at, scores=scores: scores[at].topk(TOP_K, 1), SETS)[0]
        case["peers"] = {"torch.topk": round(torch_us, 2)}
        yield case
        times = graph_us(
            lambda at, scores=scores, seen=visible: candidate_blocks_decode(
                scores[at], seen, 8, 2048
            ),
            SETS,
        )
        yield rates.case("candidate_blocks", shape, times, read=batch * keys * 4)


def seam_cases(rates: Rates, batches: list[int], *, variants: bool) -> Iterator[Case]:
    """Post-mix, projection, Sinkhorn, pre-mix and norm."""
    packs = [
        pack_seam(
            torch.randn(24, 4 * HIDDEN, device="cuda"),
            torch.ones(3, device="cuda"),
            torch.zeros(24, device="cuda"),
            torch.ones(HIDDEN, device="cuda"),
        )
        for _ in range(40)  # 80 MB: none waits in the L2
    ]
    for batch in batches:
        streams = torch.randn(batch, 4, HIDDEN, device="cuda").bfloat16()
        output = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        part = torch.rand(batch, 4, device="cuda")
        mix = HyperMix(part, part, torch.rand(batch, 4, 4, device="cuda").softmax(1) * 0.5)

        def join(
            at: int,
            cluster_tokens: int = 0,
            streams: Tensor = streams,
            output: Tensor = output,
            mix: HyperMix = mix,
        ) -> object:
            return seam(
                streams,
                output,
                mix,
                mix.pre,
                packs[at],
                num_iters=20,
                hc_eps=1e-6,
                norm_eps=1e-20,
                cluster_tokens=cluster_tokens,
            )

        read = batch * HIDDEN * 2 * (4 + 4 + 1 + 1) + packs[0].fn.numel() * 4
        case = rates.case("seam", f"B={batch}", graph_us(join, len(packs)), read=read)
        if variants:
            case["by_cluster_tokens_us"] = {
                str(count): round(graph_us(lambda at, c=count: join(at, c), len(packs))[0], 2)
                for count in CLUSTER_TOKENS
            }
        yield case


def small_cases(rates: Rates, batches: list[int]) -> Iterator[Case]:
    """Router, and window rows into their slots."""
    gates = [torch.randn(384, HIDDEN, device="cuda").bfloat16() for _ in range(20)]  # 79 MB
    bias = torch.zeros(384, device="cuda")
    pool = pack_window_rows(torch.zeros(1 << 16, DIM, device="cuda"))
    for batch in batches:
        x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        times = graph_us(
            lambda at, x=x: route_decode(x, gates[at], bias, 6, scaling=1.5), len(gates)
        )
        moved, flops = gates[0].numel() * 2 + batch * HIDDEN * 2, 2 * batch * gates[0].numel()
        case = rates.case("route", f"B={batch}", times, read=moved, flops=flops)
        logits_us = graph_us(lambda at, x=x: x @ gates[at].mT, len(gates))[0]
        case["peers"] = {"torch bf16, logits alone": round(logits_us, 2)}
        yield case
        rows = torch.randn(batch, DIM, device="cuda").bfloat16()
        angles = torch.rand(batch, 32, device="cuda")
        rope, norm = (angles.cos(), angles.sin()), torch.ones(DIM, device="cuda")
        slots = torch.randperm(1 << 16, device="cuda")[:batch].int()
        times = graph_us(
            lambda _, rows=rows, rope=rope, slots=slots, norm=norm: store_rows_decode(
                rows, rope, pool, slots, PackedFormat.WINDOW, norm=norm, eps=1e-20
            ),
            32,
        )
        yield rates.case("store_rows", f"B={batch}", times, read=batch * 1552)
