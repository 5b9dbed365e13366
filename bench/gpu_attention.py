"""Attention, indexer, seam and router kernels on a GPU beside what they must read.

`make bench NAME=gpu_attention ARGS=--json`. Shapes of V4.1-Flash, one layer. Each timing replays a
CUDA graph over several sets of inputs. The floor is the larger of two times: what must be
read and written over the rate of a plain read-only sum, and the products over the rate of a large
bfloat16 matrix product, both of the same run. The peer is torch: gathered rows, already unpacked
to bfloat16 in its favour.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.gpu_experts import graph_us, read_rate
from deepmesh.report import Json, publish, report
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
Case = dict[str, Json]


class Rates:
    """Of this device: bytes/s of a read-only sum, FLOP/s of a bfloat16 product."""

    def __init__(self) -> None:
        self.read = read_rate()
        a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        median, _ = graph_us(lambda _: a @ b, 3)
        self.flops = 2 * 8192**3 / (median * 1e-6)

    def case(
        self, op: str, shape: str, times: tuple[float, float], read: float, flops: float
    ) -> Case:
        """A case of the report."""
        floor = 1e6 * max(read / self.read, flops / self.flops)
        case: Case = {
            "device": "cuda",
            "op": op,
            "shape": shape,
            "ours_us": round(times[0], 2),
            "best_us": round(times[1], 2),
            "floor_us": round(floor, 2),
            "share_of_floor": round(floor / times[0], 4),
            "gbps": round(read / times[0] / 1e3, 1),
        }
        return case


def say(case: Case) -> Case:
    print(case, file=sys.stderr, flush=True)
    return case


def empty_us() -> float:
    """A kernel that does nothing, in a graph of many: what a node costs."""
    x = torch.zeros(1, device="cuda")
    return graph_us(lambda _: x.zero_(), 64)[0]


def attention_cases(rates: Rates, batches: list[int], variants: bool) -> list[Case]:
    """Sparse attention of decode rows, and torch over rows that are unpacked already."""
    slots = 1 << 17
    window = pack_window_rows(torch.randn(slots, DIM, device="cuda"))
    compressed = pack_compressed_rows(torch.randn(slots, DIM, device="cuda"))
    plain = unpack_compressed_rows(compressed).bfloat16()
    sinks = torch.randn(HEADS, device="cuda")
    cases: list[Case] = []
    for batch in batches:
        queries = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        near = [torch.randint(slots, (batch, WINDOW), device="cuda").int() for _ in range(SETS)]
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
        case = rates.case("sparse_decode", f"B={batch}", graph_us(attend, SETS), read, flops)
        if variants:
            case["by_block_heads_us"] = {
                str(count): round(graph_us(lambda at, c=count: attend(at, c), SETS)[0], 2)
                for count in BLOCK_HEADS
            }
        case["peers"] = {"torch": round(graph_us(peer, SETS)[0], 2)}
        cases.append(say(case))
    return cases


def index_cases(rates: Rates, shapes: list[tuple[int, int]]) -> list[Case]:
    """Scores, choice of 512, and candidate blocks for (batch, keys of each row)."""
    cases: list[Case] = []
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
        cases.append(say(rates.case("index_scores", shape, graph_us(score, SETS), read, flops)))

        def choose(
            at: int,
            scores: list[Tensor] = scores,
            tables: list[Tensor] = tables,
            rows: Tensor = rows,
            visible: Tensor = visible,
        ) -> object:
            return top_k_decode(scores[at], visible, TOP_K, tables[at], ENTRIES, rows)

        case = rates.case("top_k", shape, graph_us(choose, SETS), batch * keys * 4, 0)
        torch_us = graph_us(lambda at, scores=scores: scores[at].topk(TOP_K, 1), SETS)[0]
        case["peers"] = {"torch.topk": round(torch_us, 2)}
        cases.append(say(case))
        times = graph_us(
            lambda at, scores=scores, seen=visible: candidate_blocks_decode(
                scores[at], seen, 8, 2048
            ),
            SETS,
        )
        cases.append(say(rates.case("candidate_blocks", shape, times, batch * keys * 4, 0)))
    return cases


def seam_cases(rates: Rates, batches: list[int], variants: bool) -> list[Case]:
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
    cases: list[Case] = []
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
        case = rates.case("seam", f"B={batch}", graph_us(join, len(packs)), read, 0)
        if variants:
            case["by_cluster_tokens_us"] = {
                str(count): round(graph_us(lambda at, c=count: join(at, c), len(packs))[0], 2)
                for count in CLUSTER_TOKENS
            }
        cases.append(say(case))
    return cases


def small_cases(rates: Rates, batches: list[int]) -> list[Case]:
    """Router, and window rows into their slots."""
    gates = [torch.randn(384, HIDDEN, device="cuda").bfloat16() for _ in range(20)]  # 79 MB
    bias = torch.zeros(384, device="cuda")
    pool = pack_window_rows(torch.zeros(1 << 16, DIM, device="cuda"))
    cases: list[Case] = []
    for batch in batches:
        x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
        times = graph_us(
            lambda at, x=x: route_decode(x, gates[at], bias, 6, scaling=1.5), len(gates)
        )
        moved, flops = gates[0].numel() * 2 + batch * HIDDEN * 2, 2 * batch * gates[0].numel()
        case = rates.case("route", f"B={batch}", times, moved, flops)
        logits_us = graph_us(lambda at, x=x: x @ gates[at].mT, len(gates))[0]
        case["peers"] = {"torch bf16, logits alone": round(logits_us, 2)}
        cases.append(say(case))
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
        cases.append(say(rates.case("store_rows", f"B={batch}", times, batch * 1552, 0)))
    return cases


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=["attention", "index", "seam", "small"], action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--variants", action="store_true", help="every division into blocks")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    rates = Rates()
    batches = arguments.batch or [1, 16, 64, 128, 256]
    shapes = [(batch, 8192) for batch in batches] + [(1, 131_072), (16, 32_768)]
    work: dict[str, Callable[[], list[Case]]] = {
        "attention": lambda: attention_cases(rates, batches, arguments.variants),
        "index": lambda: index_cases(rates, shapes),
        "seam": lambda: seam_cases(rates, batches, arguments.variants),
        "small": lambda: small_cases(rates, batches),
    }
    cases: list[Case] = []
    for op in arguments.op or list(work):
        cases += work[op]()
    config: dict[str, Json] = {
        "read_gbps": round(rates.read / 1e9, 1),
        "bf16_tflops": round(rates.flops / 1e12, 1),
        "empty_node_us": round(empty_us(), 2),
    }
    found = report(
        "bench gpu_attention",
        config=config,
        cases=cases,
        ok=True,
        gpu=torch.cuda.get_device_name(),
    )
    publish(found, name="gpu_attention", as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
