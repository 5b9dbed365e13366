"""What the machine gives in the same run: bytes read a second, torch's products a second, peace."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench.rig.meter import Load, Meter
from deepmesh.report import MAX_STEAL, Json

SUM_BYTES = 512 << 20  # more than any cache holds
MAX_OTHERS = 0.1  # share of the CPU time for other processes, above which a run is not valid
SQUARE = 1024


def seconds(work: Callable[[], object]) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Memory:
    """Rates of main memory, with as many threads as torch has been told to use."""

    def __init__(self) -> None:
        self._data = torch.ones(SUM_BYTES // 4)

    def read_rate(self) -> float:
        """Bytes a second of a read-only sum, the better of two."""
        return SUM_BYTES / min(seconds(self._data.sum) for _ in range(2))

    def copy_rate(self) -> float:
        """Bytes a second, read and written together, of a plain copy; the better of two."""
        half = len(self._data) // 2
        source, target = self._data[:half], self._data[half:]
        return SUM_BYTES / min(seconds(lambda: target.copy_(source)) for _ in range(2))


def matmul_seconds(rows: int, inner: int, outer: int, *, count: int = 1) -> float:
    """torch's bfloat16 product [rows, inner] x [outer, inner]T, `count` weights in turn."""
    x = torch.ones(rows, inner, dtype=torch.bfloat16)
    weights = [torch.ones(outer, inner, dtype=torch.bfloat16) for _ in range(count)]
    torch.nn.functional.linear(x, weights[0])  # the first call prepares
    return seconds(lambda: [torch.nn.functional.linear(x, weight) for weight in weights])


class Peace:
    """Whether anything else ran beside a measurement."""

    def __init__(self, others: Mapping[str, int] | None = None) -> None:
        """`others`: processes that take part in it, by name, with their pids."""
        self._meter = Meter({"bench": os.getpid(), **(others or {})})

    def end(self) -> dict[str, Json]:
        """`steal`, `others_cpu` and `valid`, for the report."""
        self._meter.stop()
        load: Load = self._meter.load(1)
        others = load.others or 0.0
        return {
            "steal": round(load.steal, 4),
            "others_cpu": round(others, 4),
            "valid": load.steal <= MAX_STEAL and others <= MAX_OTHERS,
        }


def cache_folder() -> Path:
    """Where random checkpoints, converted ones and environments of peers are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepmesh"
