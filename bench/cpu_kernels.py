"""How near the native CPU kernels come to what memory allows, and how torch does.

`make bench NAME=cpu_kernels ARGS="--threads 1 --json"`. The floor of a case is the bytes that it
must read over the rate of a read-only sum measured in the same run; weights are changed between
repetitions where they are large enough to come from memory; a share above 1 means that they lay
in the cache. Prints one JSON object (with --json) and appends it to
bench/results/cpu_kernels.jsonl.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from kernels import native
from kernels.attention.sparse import sparse_attention
from kernels.mhc.mix import hyper_mix
from kernels.moe.experts import routed_experts
from kernels.quant.linear import Rounding, linear, pack_linear

SUM_BYTES = 512 << 20
COPIES_BYTES = 192 << 20  # of weights to go through in turn: beyond the caches that a core has
REPETITIONS = 9
MAX_LOAD = 0.5  # processes that run beside it


@dataclass
class Case:
    """One kernel at one shape; `ours(i)` and `peer(i)` use copy i of what is read."""

    op: str
    shape: str
    read_bytes: int
    flops: int
    copies: int
    ours: Callable[[int], torch.Tensor]
    peer: Callable[[int], torch.Tensor] | None = None


def linear_case(rows: int, inner: int, outer: int) -> Case:
    """Rows times a bfloat16 weight, input rounded to FP8; the peer is torch's bf16 product."""
    size = 2 * inner * outer
    copies = max(1, min(8, COPIES_BYTES // size))
    plain = [torch.randn(outer, inner).bfloat16() for _ in range(copies)]
    packed = [pack_linear(weight.float()) for weight in plain]
    x = torch.randn(rows, inner).bfloat16()
    return Case(
        "linear",
        f"{rows}x{inner}x{outer}",
        size,
        2 * rows * inner * outer,
        copies,
        lambda i: linear(x.float(), packed[i], rounding=Rounding.BF16, bf16=True),
        lambda i: F.linear(x, plain[i]).float(),
    )


def experts_case(rows: int, experts: int, hidden: int, inner: int, top_k: int) -> Case:
    """Routed experts; what is read are the experts that the rows touch."""
    w13 = pack_linear(torch.randn(experts, 2 * inner, hidden).bfloat16().float())
    w2 = pack_linear(torch.randn(experts, hidden, inner).bfloat16().float())
    ids = torch.rand(rows, experts).argsort(1)[:, :top_k].sort(1).values
    x, shares = torch.randn(rows, hidden), torch.rand(rows, top_k)
    return Case(
        "routed_experts",
        f"{rows}x{top_k} of {experts}x{hidden}x{inner}",
        ids.unique().numel() * 3 * hidden * inner * 2,
        6 * rows * top_k * hidden * inner,
        1,
        lambda _: routed_experts(x, ids, shares, w13, w2, first_expert=0, limit=10.0, bf16=True),
    )


def attention_case(rows: int, heads: int, dim: int, width: int) -> Case:
    """Each row over `width` rows of its own, scattered over the pool."""
    pool = torch.randn(rows * width + 1, dim)
    slots = torch.randperm(rows * width).view(rows, width)
    queries, sinks = torch.randn(rows, heads, dim), torch.zeros(heads)
    return Case(
        "sparse_attention",
        f"{rows}x{heads}x{dim} over {width}",
        4 * rows * width * dim,
        4 * rows * heads * width * dim,
        1,
        lambda _: sparse_attention(queries, pool, slots, None, None, sinks, bf16=True),
    )


def mix_case(rows: int, hidden: int) -> Case:
    """Mixing weights of four streams."""
    fn, streams = pack_linear(torch.randn(24, 4 * hidden)), torch.randn(rows, 4, hidden)
    scale, base = torch.ones(3), torch.zeros(24)
    return Case(
        "hyper_mix",
        f"{rows}x4x{hidden}",
        4 * (24 + rows) * 4 * hidden,
        2 * rows * 24 * 4 * hidden,
        1,
        lambda _: (
            hyper_mix(streams, fn, scale, base, num_iters=20, hc_eps=1e-6, norm_eps=1e-20).comb
        ),
    )


def cases() -> list[Case]:
    """Shapes of models/tiny, and of a layer of V4.1-Flash."""
    torch.manual_seed(0)
    tiny = [(256, 160), (96, 512), (256, 4096)]
    return [
        *(linear_case(rows, *shape) for shape in tiny for rows in (1, 16, 512)),
        *(linear_case(rows, 5120, 1792) for rows in (1, 16)),
        *(experts_case(rows, 16, 256, 128, 2) for rows in (1, 16, 512)),
        experts_case(1, 6, 5120, 2304, 6),
        *(attention_case(rows, 8, 64, 128) for rows in (1, 16, 512)),
        attention_case(4, 64, 512, 640),
        *(mix_case(rows, 256) for rows in (1, 16, 512)),
    ]


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def read_rate() -> float:
    """Bytes a second of a read-only sum."""
    data = torch.ones(SUM_BYTES // 4)
    return SUM_BYTES / min(timed(data.sum) for _ in range(5))


def measure(case: Case, rate: float) -> dict[str, Json]:
    """Medians of interleaved repetitions."""
    runs = {"ours": case.ours} | ({"torch_bf16": case.peer} if case.peer else {})
    once = timed(lambda: case.ours(0))
    inner = max(1, min(200, int(2e-3 / max(once, 1e-6)))) * case.copies
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPETITIONS):
        for name, run in runs.items():
            took = timed(lambda run=run: [run(i % case.copies) for i in range(inner)])
            samples[name].append(1e6 * took / inner)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ours, floor = medians.pop("ours"), 1e6 * case.read_bytes / rate
    error = 0.0
    if case.peer is not None:
        found, wanted = case.ours(0), case.peer(0)
        error = float((found - wanted).abs().max() / wanted.abs().max())
    return {
        "device": "cpu",
        "op": case.op,
        "shape": case.shape,
        "ours_us": round(ours, 2),
        "floor_us": round(floor, 2),
        "share_of_floor": round(floor / ours, 4),
        "gbps": round(case.read_bytes / ours / 1e3, 2),
        "tflops": round(case.flops / ours / 1e6, 4),
        "peers": {name: round(value, 2) for name, value in medians.items()},
        "max_error": error,
        "samples_us": [round(value, 2) for value in samples["ours"]],
    }


def run(threads: int, level: str) -> dict[str, Json]:
    """The whole benchmark."""
    torch.set_num_threads(threads)
    native.use(level)
    steal, load = Steal(), os.getloadavg()[0]
    rate = read_rate()
    found: list[dict[str, Json]] = []
    with torch.inference_mode():
        for case in cases():
            found.append(measure(case, rate))
            print("{op} {shape}: {ours_us} us, {gbps} GB/s".format(**found[-1]), file=sys.stderr)
    share = steal.take()
    config: dict[str, Json] = {
        "threads": threads,
        "level": level or native.supported_levels()[0],
        "read_gbps": round(rate / 1e9, 2),
        "steal": round(share, 4),
        "load_before": round(load, 2),
    }
    whole = report("bench kernels", config=config, cases=found, ok=True)
    return whole | {"valid": share <= MAX_STEAL and load < MAX_LOAD}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", default="", choices=["", *native.supported_levels()])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    result = run(arguments.threads, arguments.level)
    publish(result, name="cpu_kernels", as_json=arguments.json)
    if not result["valid"]:
        print("the machine was busy: figures are not valid", file=sys.stderr)


if __name__ == "__main__":
    main()
