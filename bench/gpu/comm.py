"""Dispatch and combine between GPUs: a process and a device a rank, in graphs.

A graph holds LAYERS exchanges, as a step does. Combine is what a graph of both takes more than
one of dispatch alone. Beside our one-sided kernels run NCCL's collectives on padded buffers, and a
plain put of the same bytes by the copy engine. Bytes are those that leave a rank for others, on
average.
"""

import ctypes
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.ranks import Rank
from deepmesh.report import Json
from kernels import cuda, portable
from kernels.comm.collective import CollectiveExchange
from kernels.comm.one_sided import Geometry, OneSidedExchange

LAYERS, REPEATS, WARM_UPS = 20, 15, 3
LARGE, FEW_LAYERS = 2048, 4  # tokens from which on a graph is shorter
NUM_EXPERTS = 384


def layers_of(count: int) -> int:
    """Exchanges of a graph."""
    return LAYERS if count < LARGE else FEW_LAYERS


def draw(rank: int, count: int, hidden: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, with evenly drawn experts, and weights."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(count, hidden, generator=random)
    ids = torch.rand(count, NUM_EXPERTS, generator=random).topk(top_k).indices.sort(1).values
    return x, ids, torch.rand(count, top_k, generator=random)


def owners_of(ranks: int) -> Tensor:
    """An equal run of experts for each rank."""
    return torch.arange(NUM_EXPERTS) * ranks // NUM_EXPERTS


def bytes_to_others(shape: Geometry, count: int) -> tuple[float, float]:
    """Of a rank's tokens on their way out, and of results that it sends back."""
    others, share = shape.ranks - 1, 1 / shape.ranks
    wanted = others * (1 - (1 - share) ** shape.top_k)  # other ranks of a token
    row = shape.hidden * (1 + 1 / 32) if shape.fp8_rows else 4 * shape.hidden
    rows_back = wanted if shape.is_fast else shape.top_k * others * share
    return count * wanted * (row + 8 * shape.top_k + 4), (
        count * rows_back * shape.hidden * shape.slots.itemsize
    )


class Timer:
    """Graphs of this rank that run at the same time as those of the others."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._stream = rank, torch.cuda.Stream()

    def us(self, step: Callable[[], object], count: int) -> float:
        """Median time of one of `count` steps of a graph."""
        self._rank.meet()
        with torch.cuda.stream(self._stream):
            step()  # loads what it runs
        self._rank.meet()
        graph, kept = torch.cuda.CUDAGraph(), list[object]()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(count):
                kept.append(step())
                kept[:-1] = []  # memory is used again, as in a step
        self._rank.meet()
        took: list[float] = []
        with torch.cuda.stream(self._stream):
            for _ in range(REPEATS + WARM_UPS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                took.append(1e3 * begin.elapsed_time(end) / count)
        self._rank.meet()
        del graph
        return statistics.median(took[WARM_UPS:])


def one_sided(
    timer: Timer, exchange: OneSidedExchange, own: tuple[Tensor, ...], slots: Tensor
) -> tuple[float, float]:
    """Of dispatch and combine."""
    x, ids, weights, owners = own
    count = layers_of(len(x))
    exchange.begin(1, len(x))
    torch.cuda.synchronize()

    def alone() -> object:
        here = exchange.dispatch(x, ids, weights, owners)
        exchange.skip()
        return here

    def both() -> object:
        here = exchange.dispatch(x, ids, weights, owners)
        return here, exchange.combine(slots)

    dispatch = timer.us(alone, count)
    exchange.check()
    whole = timer.us(both, count)
    exchange.check()
    return dispatch, whole - dispatch


def collective(
    timer: Timer, exchange: CollectiveExchange, own: tuple[Tensor, ...], slots: Tensor
) -> tuple[float, float]:
    """The same by NCCL's all_gather and reduce_scatter, with what lies around them."""
    x, ids, weights, owners = own
    count = min(4, layers_of(len(x)))
    exchange.begin(1, len(x))

    def alone() -> object:
        return exchange.dispatch(x, ids, weights, owners)

    def both() -> object:
        here = exchange.dispatch(x, ids, weights, owners)
        return here, exchange.combine(slots)

    dispatch = timer.us(alone, count)
    return dispatch, timer.us(both, count) - dispatch


def all_to_all(timer: Timer, group: dist.ProcessGroupNCCL, ranks: int, num_bytes: int) -> float:
    """NCCL alone: `num_bytes` of each rank to each other one."""
    size = (num_bytes + 15) // 16 * 16
    out, given = (torch.zeros(ranks * size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def run() -> object:
        exchange = group.alltoall_base  # pyright: ignore[reportAttributeAccessIssue] # no stub
        work = exchange(out, given, [], [], dist.AllToAllOptions())
        work.wait()
        return None

    return timer.us(run, layers_of(0))


def put(timer: Timer, to: int, num_bytes: int) -> float:
    """A copy of our memory into another rank's window, while it does the same."""
    library = portable.library("comm", "exchange", is_cuda=True)
    given = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

    def run() -> object:
        arguments = (
            ctypes.c_void_p(to),
            ctypes.c_void_p(given.data_ptr()),
            ctypes.c_int64(num_bytes),
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        cuda.check(library.window_put(*arguments, stream))
        return given

    return timer.us(run, 4)


def measure(rank: Rank, asked: dict[str, Json]) -> None:
    """All cases; `asked`: hidden, top_k, tokens (ascending). Rank 0 says what it found."""
    hidden, top_k, counts = asked["hidden"], asked["top_k"], asked["tokens"]
    assert isinstance(hidden, int)
    assert isinstance(top_k, int)
    assert isinstance(counts, list)
    sizes = [int(str(count)) for count in counts]
    timer, most = Timer(rank), max(sizes)
    shapes = {
        mode: Geometry(rank.ranks, most, hidden, top_k, is_fast=mode == "fast")
        for mode in ("strict", "fast")
    }
    window, addresses = rank.window(shapes["strict"].window_bytes)
    exchanges = {
        mode: OneSidedExchange(shape, rank.rank, addresses, patience_s=20.0)
        for mode, shape in shapes.items()
    }
    owners = owners_of(rank.ranks).int().cuda()
    nccl: dist.ProcessGroupNCCL | None = None
    if rank.ranks <= torch.cuda.device_count():
        options = dist.ProcessGroupNCCL.Options()
        nccl = dist.ProcessGroupNCCL(rank.store("nccl"), rank.rank, rank.ranks, options)
    for count in sizes:
        x, ids, weights = draw(rank.rank, count, hidden, top_k)
        own = x.bfloat16().cuda(), ids.int().cuda(), weights.cuda(), owners
        shape = (rank.ranks * count, top_k, hidden)
        slots = torch.ones(1, dtype=torch.bfloat16, device="cuda").expand(shape).contiguous()
        other = addresses[(rank.rank + 1) % rank.ranks]
        for mode, exchange in exchanges.items():
            rank.meet()
            window.clear()
            exchange.reset(addresses)
            rank.meet()
            sent, back = bytes_to_others(shapes[mode], count)
            puts = [put(timer, other, int(num)) for num in (sent, back)]
            case: dict[str, Json] = {"ranks": rank.ranks, "tokens": count, "mode": mode}
            case["put_us"] = [round(each, 2) for each in puts]
            case["put_gbps"] = [
                round(num / each / 1e3, 1) for num, each in zip((sent, back), puts, strict=True)
            ]
            times = one_sided(timer, exchange, own, slots)
            _say(rank, case | {"backend": "one_sided"}, times, (sent, back), puts)
            if mode == "strict":  # what a rank without tokens costs
                nobody = own[0], torch.full_like(own[1], -1), *own[2:]
                times = one_sided(timer, exchange, nobody, slots)
                _say(rank, case | {"backend": "one_sided_empty"}, times, (0, 0), puts)
            if nccl is None or (mode == "fast" and rank.ranks > 2):
                continue
            by_nccl = CollectiveExchange(nccl, device="cuda", is_fast=mode == "fast")
            times = collective(timer, by_nccl, own, slots)
            _say(rank, case | {"backend": "nccl_gather_scatter"}, times, (sent, back), puts)
            alone = [all_to_all(timer, nccl, rank.ranks, int(num)) for num in (sent, back)]
            _say(rank, case | {"backend": "nccl_all_to_all"}, alone, (sent, back), puts)
        del slots, own
        torch.cuda.empty_cache()
    rank.meet()


def _say(
    rank: Rank,
    case: dict[str, Json],
    times: "tuple[float, float] | list[float]",
    sent: tuple[float, float],
    puts: list[float],
) -> None:
    found: dict[str, Json] = dict(case)
    for name, took, num, plain in zip(("dispatch", "combine"), times, sent, puts, strict=True):
        found[f"{name}_us"] = round(took, 2)
        found[f"{name}_bytes"] = int(num)
        found[f"{name}_gbps"] = round(num / took / 1e3, 1)
        found[f"{name}_share_of_put"] = round(plain / took, 3)
    rank.say(found)
