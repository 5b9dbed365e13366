"""Variants of the experts of a decode step side by side: equal bits, and how long each takes.

`python -m bench.gpu.experts_variants [--build]`. With --build only compiles them, without a GPU.
Prints a line of JSON a variant and batch; variants take turns, so that a clock that moves shows.
"""

import argparse
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
    "before": (),
    "wide sums": ("-DEXPERTS_WIDE_SUMS=1",),
    "one token, 6 stages": ("-DEXPERTS_ONE_STAGES=6", "-DEXPERTS_WIDE_SUMS=1"),
    "one token, 4 stages": ("-DEXPERTS_ONE_STAGES=4", "-DEXPERTS_WIDE_SUMS=1"),
}
TURNS = 3


def main() -> int:
    """1 if bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 256])
    arguments = parser.parse_args()
    with ThreadPoolExecutor(len(VARIANTS)) as pool:  # nvcc, where they are not there
        list(pool.map(lambda flags: cuda.build("moe", "experts_decode", flags), VARIANTS.values()))
    if arguments.build:
        return 0
    libraries = {
        name: cuda.load("moe", "experts_decode", flags) for name, flags in VARIANTS.items()
    }
    torch.manual_seed(0)
    rates, layer, top_k = Rates(), Layer(), SHAPE["top_k"]
    weights = 3 * SHAPE["hidden"] * SHAPE["inter"]
    good = True
    for batch in arguments.batch:
        drawn = routings(batch, SHAPE["experts"], top_k, zipf=0.0, count=ROUTINGS)
        ids = [each.cuda() for each in drawn]
        x = torch.randn(batch, SHAPE["hidden"], device="cuda").bfloat16()
        shares = torch.rand(batch, top_k, device="cuda")

        def work(
            at: int, x: Tensor = x, ids: list[Tensor] = ids, shares: Tensor = shares
        ) -> Tensor:
            return experts_cuda.routed_experts_decode(
                x, ids[at], shares, layer.packed, first_expert=0, limit=LIMIT
            )

        def unsummed(
            at: int, x: Tensor = x, ids: list[Tensor] = ids, shares: Tensor = shares
        ) -> Tensor:
            return experts_cuda.routed_experts_slots(
                x, ids[at], shares, layer.packed, first_expert=0, limit=LIMIT
            )

        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        unsummed_us: dict[str, float] = {}
        outs: dict[str, list[Tensor]] = {}
        for _ in range(TURNS):
            for name, library in libraries.items():
                experts_cuda.cuda.load = lambda *_, library=library: library
                outs[name] = [work(at) for at in range(ROUTINGS)]
                times[name].append(graph_us(work, ROUTINGS)[0])
                unsummed_us[name] = graph_us(unsummed, ROUTINGS)[0]
        read = touched(drawn) * weights * 17 / 32 + 2 * 2 * batch * SHAPE["hidden"]
        floor = 1e6 * read / rates.read
        for name in VARIANTS:
            same = all(map(torch.equal, outs[name], outs["before"]))
            good = good and same
            median = statistics.median(times[name])
            line = {"batch": batch, "variant": name, "us": round(median, 2), "same_bits": same}
            line |= {"share_of_floor": round(floor / median, 4)}
            line |= {"unsummed_us": round(unsummed_us[name], 2)}
            line |= {"turns": [round(time, 2) for time in times[name]]}
            print(json.dumps(line), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
