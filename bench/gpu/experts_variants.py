"""The experts of a single token in several variants: equal bits, how long each takes, and where.

`python -m bench.gpu.experts_variants [--build]`. With --build only compiles them, without a GPU.
Prints a line of JSON each; variants take turns, so that a clock that moves shows. `timeline`: us
from the first block's start until blocks of either product came to a place: least, median, most.
"""

import argparse
import ctypes
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bench.gpu.cases_experts import SHAPE, Layer
from bench.gpu.peers.mxfp4 import LIMIT
from bench.gpu.routing import ROUTINGS, routings, touched
from bench.gpu.timing import Rates, graph_us
from kernels import cuda
from kernels.moe import experts_cuda

VARIANTS: dict[str, tuple[str, ...]] = {
    f"{stages} stages": (f"-DEXPERTS_ONE_STAGES={stages}",) for stages in (4, 3, 2, 5)
}
TIMED = {
    f"{stages} stages": (f"-DEXPERTS_ONE_STAGES={stages}", "-DEXPERTS_ONE_TIMES")
    for stages in (4, 2)
}
PLACES = ("start", "may begin", "loads begun", "row there", "first chunk", "last chunk", "end")
TURNS, REPLAYS = 3, 5


def timeline(library: ctypes.CDLL, layer: Layer, x: Tensor, ids: list[Tensor]) -> dict[str, object]:
    """Of one call among others, in a graph."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    top_k, hidden, inter = SHAPE["top_k"], SHAPE["hidden"], SHAPE["inter"]
    shares, kinds = torch.rand(1, top_k, device="cuda"), {"device": "cuda", "dtype": torch.float16}
    times = [torch.zeros(2, blocks, 8, dtype=torch.int32, device="cuda") for _ in ids]
    rows = torch.empty(top_k * 8, inter, **kinds)
    slots = torch.empty(top_k, hidden, device="cuda").bfloat16()
    out = torch.empty(1, hidden, device="cuda")
    a, n = ctypes.c_void_p, ctypes.c_int64

    def call(at: int) -> None:
        cuda.check(
            library.experts_decode(
                *(a(t.data_ptr()) for t in (x, ids[at], shares)),
                *(n(1), n(top_k)),
                *(a(t.data_ptr()) for t in (layer.packed.w13, layer.packed.w2)),
                *(n(0), n(SHAPE["experts"]), n(hidden), n(inter), ctypes.c_float(LIMIT)),
                a(times[at].data_ptr()),
                *(a(None), a(None)),
                *(a(t.data_ptr()) for t in (rows, slots, out)),
                a(torch.cuda.current_stream().cuda_stream),
            )
        )

    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(len(ids)):
            call(at)
    found: dict[str, list[list[float]]] = {}
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        for each in times[1:]:
            seen = each.cpu().long()
            us = (seen - seen[0, :, 0].min()).float() / 1e3
            for product in range(2):
                for place, name in enumerate(PLACES):
                    own = us[product, :, place]
                    key = f"{('first', 'second')[product]}: {name}"
                    spread = [float(own.min()), float(own.median()), float(own.max())]
                    found.setdefault(key, []).append(spread)
    return {
        key: [round(statistics.median(part), 1) for part in zip(*spreads, strict=True)]
        for key, spreads in found.items()
    }


def main() -> int:
    """1 if bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", action="store_true")
    arguments = parser.parse_args()
    flags = [*VARIANTS.values(), *TIMED.values()]
    with ThreadPoolExecutor(len(flags)) as pool:  # nvcc, where they are not there
        list(pool.map(lambda own: cuda.build("moe", "experts_decode", own), flags))
    if arguments.build:
        return 0
    torch.manual_seed(0)
    rates, layer, top_k = Rates(), Layer(), SHAPE["top_k"]
    drawn = routings(1, SHAPE["experts"], top_k, zipf=0.0, count=ROUTINGS)
    ids = [each.cuda() for each in drawn]
    x, shares = torch.randn(1, SHAPE["hidden"], device="cuda").bfloat16(), torch.rand(1, top_k)
    shares, fixed = shares.cuda(), {"first_expert": 0, "limit": LIMIT}

    def work(at: int) -> Tensor:
        return experts_cuda.routed_experts_decode(x, ids[at], shares, layer.packed, **fixed)

    def unsummed(at: int) -> Tensor:
        return experts_cuda.routed_experts_slots(x, ids[at], shares, layer.packed, **fixed)

    def as_of_two(at: int) -> Tensor:
        both = x.repeat(2, 1), ids[at].repeat(2, 1), shares.repeat(2, 1)
        return experts_cuda.routed_experts_decode(*both, layer.packed, **fixed)[:1]

    wanted = [as_of_two(at) for at in range(ROUTINGS)]
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    unsummed_us: dict[str, float] = {}
    good: dict[str, bool] = {}
    for _ in range(TURNS):
        for name, own in VARIANTS.items():
            library = cuda.load("moe", "experts_decode", own)
            experts_cuda.cuda.load = lambda *_, library=library: library
            good[name] = all(torch.equal(work(at), wanted[at]) for at in range(ROUTINGS))
            times[name].append(graph_us(work, ROUTINGS)[0])
            unsummed_us[name] = graph_us(unsummed, ROUTINGS)[0]
            experts_cuda.cuda.load = LOAD
    read = touched(drawn) * 3 * SHAPE["hidden"] * SHAPE["inter"] * 17 / 32
    floor = 1e6 * read / rates.read
    for name in VARIANTS:
        median = statistics.median(times[name])
        line = {"variant": name, "us": round(median, 2), "same_bits": good[name]}
        line |= {"share_of_floor": round(floor / median, 4)}
        line |= {"unsummed_us": round(unsummed_us[name], 2)}
        print(json.dumps(line | {"turns": [round(time, 2) for time in times[name]]}), flush=True)
    for name, own in TIMED.items():
        found = timeline(cuda.load("moe", "experts_decode", own), layer, x, ids)
        print(json.dumps({"variant": name, "timeline": found}), flush=True)
    return 0 if all(good.values()) else 1


LOAD = cuda.load

if __name__ == "__main__":
    sys.exit(main())
