"""Times of kernels on a GPU, and what the GPU itself gives in the same run."""

import statistics
import subprocess
from collections.abc import Callable

import torch

from deepmesh.report import Json

REPEATS = 15
WARM_UPS = 3
READ_FLOATS = 1 << 30  # 4 GB: far more than the L2 holds
SQUARE = 8192
AHEAD_CYCLES = 200_000_000  # 0.1 s: the host launches a step of any length in that time


def graph_us(work: Callable[[int], object], count: int) -> tuple[float, float]:
    """Median and best time of one of `count` calls that a graph replays one after another."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for at in range(count):
            work(at)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(count):
            work(at)
    times = [event_us(graph.replay) / count for _ in range(REPEATS + WARM_UPS)][WARM_UPS:]
    return statistics.median(times), min(times)


def event_us(work: Callable[[], object], *, ahead: bool = False) -> float:
    """Time on the device between two events around what `work` enqueues.

    `ahead`: the device is busy until the host has launched all of it, as an executor's is.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if ahead:
        torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def read_rate() -> float:
    """Bytes/s of a read-only sum."""
    data = torch.randn(READ_FLOATS, dtype=torch.float32, device="cuda")
    median, _ = graph_us(lambda _: data.sum(), 3)
    return data.numel() * 4 / (median * 1e-6)


def bf16_rate() -> float:
    """FLOP/s of a large bfloat16 product of random values."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda").bfloat16() for _ in range(2))
    median, _ = graph_us(lambda _: a @ b, 3)
    return 2 * SQUARE**3 / (median * 1e-6)


def empty_us() -> float:
    """A kernel that does nothing, in a graph of many: what a node costs."""
    x = torch.zeros(1, device="cuda")
    return graph_us(lambda _: x.zero_(), 64)[0]


class Rates:
    """Of this device in this run: what floors are made of."""

    def __init__(self) -> None:
        self.read = read_rate()
        self.flops = bf16_rate()
        torch.cuda.empty_cache()

    def case(
        self,
        op: str,
        shape: str,
        times: tuple[float, float],
        *,
        read: float,
        flops: float = 0.0,
    ) -> dict[str, Json]:
        """A case of the report: the floor is the larger of its two times."""
        floor = 1e6 * max(read / self.read, flops / self.flops)
        return {
            "device": "cuda",
            "op": op,
            "shape": shape,
            "ours_us": round(times[0], 2),
            "best_us": round(times[1], 2),
            "floor_us": round(floor, 2),
            "share_of_floor": round(floor / times[0], 4),
            "gbps": round(read / times[0] / 1e3, 1),
            "tflops": round(flops / times[0] / 1e6, 2),
            "peers": {},
        }

    def config(self) -> dict[str, Json]:
        """For the report, with the state of the card."""
        return {
            "read_gbps": round(self.read / 1e9, 1),
            "bf16_tflops": round(self.flops / 1e12, 1),
            **card(),
        }


def card() -> dict[str, Json]:
    """Driver and clocks, as nvidia-smi reads them; empty where it is not there."""
    fields = ("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(", ")
    names = ("driver", "sm_mhz", "memory_mhz", "celsius", "watts")
    return dict(zip(names, values, strict=False))


def speed_up(case: dict[str, Json]) -> None:
    """Add `ratio_to_best_peer` (above 1: ours is faster) to a case with peers' times."""
    peers, ours = case["peers"], case["ours_us"]
    assert isinstance(peers, dict)
    assert isinstance(ours, float)
    times = [time for time in peers.values() if isinstance(time, float)]
    if times:
        case["ratio_to_best_peer"] = round(min(times) / ours, 3)
