"""The MXFP4 expert kernels on a GPU: how near they come to the rate of the memory.

`make bench NAME=gpu_experts ARGS=--json`. Each timing replays a CUDA graph over several routings,
so that no expert's weights wait in the L2. The floor is what is read (the experts
really touched) over the rate of a plain read-only sum in the same run.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from deepmesh.report import Json, publish, report
from kernels.moe.experts_cuda import PackedExperts, pack_experts, routed_experts_decode

SHAPES = {"v41-flash": (384, 6, 5120, 2304), "v4-flash": (256, 6, 4096, 2048)}
BATCHES = (1, 4, 16, 64, 128, 256)
LIMIT = 10.0
ROUTINGS = 6
REPEATS = 15


def random_codes(experts: int, outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor]:
    """MXFP4 weights and scales of about unit gain."""
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), device=device).to(torch.uint8)
    spread = torch.randint(-1, 2, (experts, outputs, inputs // 32), device=device)
    base = 127 - round(0.5 * torch.tensor(float(inputs)).log2().item()) - 2
    return codes, (spread + base).to(torch.uint8)


def make_experts(experts: int, hidden: int, inter: int, device: str) -> PackedExperts:
    """Random weights of all experts of a layer."""
    raw = [
        *random_codes(experts, inter, hidden, device),
        *random_codes(experts, inter, hidden, device),
        *random_codes(experts, hidden, inter, device),
    ]
    return pack_experts(*raw)


def route(tokens: int, experts: int, top_k: int, device: str, zipf: float = 0.0) -> Tensor:
    """[tokens, top_k], int32, ascending, drawn uniform or Zipf."""
    odds = 1.0 / torch.arange(1, experts + 1, device=device, dtype=torch.float64) ** zipf
    ids = torch.multinomial(odds.expand(tokens, -1), top_k)
    return ids.sort(1).values.to(torch.int32).contiguous()


def graph_us(work: Callable[[int], object], count: int) -> tuple[float, float]:
    """Median and best time of one of `count` calls that a graph replays one after another."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for at in range(count):
            work(at)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(count):
            work(at)
    times = []
    for _ in range(REPEATS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times[3:]), min(times[3:])


def read_rate() -> float:
    """Bytes/s of a read-only sum over 4 GB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    median, _ = graph_us(lambda _: data.sum(), 3)
    return data.numel() * 4 / (median * 1e-6)


def measure(name: str, batches: list[int], zipf: float, rate: float) -> list[dict[str, Json]]:
    """Cases of one model's shape."""
    experts, top_k, hidden, inter = SHAPES[name]
    torch.manual_seed(0)
    packed = make_experts(experts, hidden, inter, "cuda")
    expert_bytes = (packed.w13[0].numel() + packed.w2[0].numel()) * 1.0
    cases: list[dict[str, Json]] = []
    for batch in batches:
        x = torch.randn(batch, hidden, device="cuda").bfloat16()
        weights = torch.rand(batch, top_k, device="cuda")
        routings = [route(batch, experts, top_k, "cuda", zipf) for _ in range(ROUTINGS)]
        touched = statistics.mean(len(ids.unique()) for ids in routings)

        median, best = graph_us(
            lambda at, x=x, routings=routings, weights=weights: routed_experts_decode(
                x, routings[at], weights, packed, first_expert=0, limit=LIMIT
            ),
            ROUTINGS,
        )
        read = touched * expert_bytes + batch * hidden * 2
        cases.append(
            {
                "device": "cuda",
                "op": "experts_decode",
                "shape": f"{name} B={batch} zipf={zipf}",
                "ours_us": round(median, 2),
                "best_us": round(best, 2),
                "floor_us": round(1e6 * read / rate, 2),
                "share_of_floor": round(1e6 * read / rate / median, 4),
                "gbps": round(read / median / 1e3, 1),
                "experts_touched": round(touched, 1),
            }
        )
        print(cases[-1], file=sys.stderr, flush=True)
    return cases


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 1
    rate = read_rate()
    cases: list[dict[str, Json]] = []
    for name in arguments.shape or list(SHAPES):
        cases += measure(name, arguments.batch or list(BATCHES), 0.0, rate)
        cases += measure(name, arguments.batch or [64, 256], 1.0, rate)
    found = report(
        "bench gpu_experts",
        config={"read_gbps": round(rate / 1e9, 1)},
        cases=cases,
        ok=True,
        gpu=torch.cuda.get_device_name(),
    )
    publish(found, name="gpu_experts", as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
