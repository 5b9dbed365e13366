"""How long tokens take to their experts and back: dispatch and combine of one layer.

`deepmesh bench comm --json`. On a host: gloo, and the one-sided exchange between threads; bytes are
those that leave a rank for itself and others. On GPUs: `bench/gpu/comm.py`; where ranks share a
device, figures are an indication.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from bench.gpu import comm as gpu
from bench.gpu.comm import NUM_EXPERTS, draw
from bench.gpu.comm import owners_of as shared
from bench.gpu.ranks import on_ranks
from bench.tables import show
from deepmesh.report import Json, publish, report
from kernels.comm.gloo import GlooExchange
from kernels.comm.one_sided import Geometry, OneSidedExchange
from kernels.comm.windows import local_windows

TOKENS = {"cpu": (1, 16, 128), "cuda": (1, 16, 64, 128, 1024, 8192)}
COLUMNS = ("ranks", "backend", "tokens", "mode", "latency_us", "gbps")
GPU_COLUMNS = ("backend", "tokens", "mode", "dispatch_us", "combine_us", "put_us")
GPU_COLUMNS += ("dispatch_gbps", "combine_gbps", "dispatch_share_of_put", "combine_share_of_put")
Own = tuple[Tensor, Tensor, Tensor]  # x, ids, weights


def sent_bytes(shape: Geometry, count: int) -> float:
    """Of a rank's tokens on their way to the experts and back, on average."""
    wanted = shape.ranks * (1 - (1 - 1 / shape.ranks) ** shape.top_k)  # ranks of a token
    row = shape.hidden * (1 + 1 / 32) if shape.fp8_rows else 4 * shape.hidden
    back = (wanted if shape.is_fast else shape.top_k) * shape.hidden * shape.slots.itemsize
    return count * (wanted * (row + 8 * shape.top_k + 8) + back)


def on_threads(ranks: int, action: Callable[[int], None]) -> float:
    """Seconds that all ranks together took."""
    with ThreadPoolExecutor(ranks) as pool:
        began = time.perf_counter()
        for _ in pool.map(action, range(ranks)):
            pass
        return time.perf_counter() - began


def gloo(shape: Geometry, count: int, rounds: int) -> float:
    """Seconds of one exchange."""
    store, owners = HashStore(), shared(shape.ranks)
    exchanges: list[GlooExchange] = [None] * shape.ranks  # type: ignore[list-item] # filled below

    def connect(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, shape.ranks, options)
        exchanges[rank] = GlooExchange(group, threading.Event())

    def run(rank: int) -> None:
        own, exchange = draw(rank, count, shape.hidden, shape.top_k), exchanges[rank]
        exchange.begin(1, count)
        for _ in range(rounds):
            here = exchange.dispatch(*own, owners)
            exchange.combine(here.x.unsqueeze(1).expand(-1, shape.top_k, -1))

    on_threads(shape.ranks, connect)
    on_threads(shape.ranks, run)
    took = on_threads(shape.ranks, run) / rounds
    on_threads(shape.ranks, lambda rank: exchanges[rank].close())
    return took


def one_sided_host(shape: Geometry, count: int, rounds: int) -> float:
    """Seconds of one exchange."""
    windows, owners = (
        local_windows(shape.window_bytes, ["cpu"] * shape.ranks),
        shared(shape.ranks).int(),
    )
    exchanges = [
        OneSidedExchange(shape, rank, windows.addresses, device="cpu")
        for rank in range(shape.ranks)
    ]

    def run(rank: int) -> None:
        x, ids, weights = draw(rank, count, shape.hidden, shape.top_k)
        exchange = exchanges[rank]
        slots = torch.ones(shape.ranks * count, shape.top_k, shape.hidden, dtype=shape.slots)
        exchange.begin(1, count)
        for _ in range(rounds):
            exchange.dispatch(x.bfloat16(), ids.int(), weights, owners)
            exchange.combine(slots)
        exchange.check()

    on_threads(shape.ranks, run)
    took = on_threads(shape.ranks, run) / rounds
    windows.close()
    return took


def on_gpus(arguments: argparse.Namespace) -> tuple[list[dict[str, Json]], str]:
    """Cases of a process a rank; what went wrong, if anything did."""
    asked: dict[str, Json] = {
        "hidden": arguments.hidden,
        "top_k": arguments.top_k,
        "tokens": sorted(arguments.tokens or TOKENS["cuda"]),
    }
    group = on_ranks(
        gpu.measure, asked, ranks=arguments.ranks, device="cuda", limit_s=arguments.limit
    )
    return group.found[0], group.problem


def measure(arguments: argparse.Namespace) -> list[dict[str, Json]]:
    """All cases of a host."""
    ranks = arguments.ranks
    torch.set_num_threads(1)
    cases: list[dict[str, Json]] = []
    for count in arguments.tokens or TOKENS["cpu"]:
        for is_fast in (False, True):
            shape = Geometry(ranks, count, arguments.hidden, arguments.top_k, is_fast=is_fast)
            backends = {"one_sided": lambda s=shape, c=count: one_sided_host(s, c, 5)}
            if not is_fast:
                backends["gloo"] = lambda s=shape, c=count: gloo(s, c, 5)
            for backend, run in backends.items():
                took = run()
                cases.append(
                    {
                        "ranks": ranks,
                        "op": "dispatch+combine",
                        "backend": backend,
                        "tokens": count,
                        "mode": "fast" if is_fast else "strict",
                        "latency_us": round(took * 1e6, 1),
                        "gbps": round(sent_bytes(shape, count) / took / 1e9, 2),
                    }
                )
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="deepmesh bench comm", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--tokens", type=int, action="append", help="of a rank")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds, of GPUs")
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 1
    name, problem = None, ""
    if parsed.device == "cuda":
        name = torch.cuda.get_device_name()
        cases, problem = on_gpus(parsed)
        print(problem, file=sys.stderr, end="")
        show("dispatch and combine", GPU_COLUMNS, cases)
    else:
        cases = measure(parsed)
        show("dispatch and combine", COLUMNS, cases)
    config: dict[str, Json] = {
        "device": parsed.device,
        "hidden": parsed.hidden,
        "top_k": parsed.top_k,
        "experts": NUM_EXPERTS,
        "devices": torch.cuda.device_count() if parsed.device == "cuda" else 0,
    }
    found = report("bench comm", config=config, cases=cases, ok=not problem, gpu=name)
    publish(found | {"problem": problem}, name="comm", as_json=parsed.json)
    return 1 if problem else 0


if __name__ == "__main__":
    raise SystemExit(main())
