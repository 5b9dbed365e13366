"""MXFP4 experts of a layer of V4.1-Flash: decode steps and prompts, routing uniform and Zipf."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.gpu.peers.mxfp4 import LIMIT, error_of, random_mxfp4
from bench.gpu.routing import ROUTINGS, routings, touched
from bench.gpu.timing import Rates, graph_us
from deepmesh.report import Json
from kernels.moe.experts_cuda import PackedExperts, pack_experts, routed_experts_decode
from kernels.moe.experts_prefill_cuda import routed_experts_prefill

SHAPE = {"experts": 384, "top_k": 6, "hidden": 5120, "inter": 2304}
ZIPFS = (0.0, 1.0)
SCALES = (-8, -6)  # exponents of two, by which results are about as large as inputs
Run = Callable[..., Tensor]


class Layer:
    """Random experts, as released and packed."""

    def __init__(self) -> None:
        experts, hidden, inter = SHAPE["experts"], SHAPE["hidden"], SHAPE["inter"]
        self.w13 = random_mxfp4(experts, 2 * inter, hidden, scales=SCALES)
        self.w2 = random_mxfp4(experts, hidden, inter, scales=SCALES)
        w1, w3 = self.w13[0].chunk(2, 1)
        scale_1, scale_3 = self.w13[1].chunk(2, 1)
        self.packed: PackedExperts = pack_experts(w1, scale_1, w3, scale_3, *self.w2)

    def timed(self, run: Run, tokens: int, zipf: float) -> tuple[float, float, float, float | None]:
        """(median, best, experts touched, error) of so many tokens."""
        top_k = SHAPE["top_k"]
        count = ROUTINGS if tokens < 1024 else 2
        drawn = routings(tokens, SHAPE["experts"], top_k, zipf=zipf, count=count)
        ids = [each.cuda() for each in drawn]
        x = torch.randn(tokens, SHAPE["hidden"], device="cuda").bfloat16()
        shares = torch.rand(tokens, top_k, device="cuda")

        def work(at: int) -> Tensor:
            return run(x, ids[at], shares, self.packed, first_expert=0, limit=LIMIT)

        error = error_of(work(0), x, ids[0], shares, self.w13, self.w2)
        return *graph_us(work, count), touched(drawn), error


def decode_cases(rates: Rates, batches: list[int]) -> Iterator[dict[str, Json]]:
    """The whole sublayer but the router and the shared expert: sort, round, both products, sum."""
    layer = Layer()
    weights = 3 * SHAPE["hidden"] * SHAPE["inter"]
    for zipf in ZIPFS:
        for batch in batches:
            median, best, experts, error = layer.timed(routed_experts_decode, batch, zipf)
            read = experts * weights * 17 / 32 + 2 * 2 * batch * SHAPE["hidden"]
            flops = 2.0 * batch * SHAPE["top_k"] * weights
            shape = f"B={batch} zipf={zipf:g}"
            case = rates.case("experts_decode", shape, (median, best), read=read, flops=flops)
            yield case | {"experts_touched": round(experts, 1), "max_error": error}


def prefill_cases(rates: Rates, tokens: int) -> Iterator[dict[str, Json]]:
    """The same of a prompt: products are what it takes time for."""
    layer = Layer()
    weights = 3 * SHAPE["hidden"] * SHAPE["inter"]
    for zipf in ZIPFS:
        median, best, experts, _ = layer.timed(routed_experts_prefill, tokens, zipf)
        _, _, _, error = layer.timed(routed_experts_prefill, 16, zipf)  # few enough to check
        read = experts * weights * 17 / 32 + 2 * 2 * tokens * SHAPE["hidden"]
        flops = 2.0 * tokens * SHAPE["top_k"] * weights
        shape = f"{tokens} tokens zipf={zipf:g}"
        case = rates.case("experts_prefill", shape, (median, best), read=read, flops=flops)
        yield case | {"experts_touched": round(experts, 1), "max_error": error}
