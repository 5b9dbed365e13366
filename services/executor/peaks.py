"""The most that a device could compute and move: configured, known by its name, or measured."""

import time
from collections.abc import Callable

import torch

from deepmesh.config import ExecutorConfig
from services.executor.work import Peaks

TERA, GIGA = 1e12, 1e9
# FP8 without sparsity, TFLOP/s, and GB/s of its memory, by a part of the name that CUDA tells;
# the first that fits counts.
KNOWN = {
    "H200": (1979.0, 4800.0),
    "H20": (296.0, 4000.0),
    "H100 PCIe": (1513.0, 2000.0),
    "H100 NVL": (1671.0, 3900.0),
    "H100": (1979.0, 3350.0),
    "H800": (1979.0, 3350.0),
}
SQUARE = 384  # of the products that a CPU is measured with
READ_BYTES = 32 << 20
REPEATS = 4


def device_peaks(settings: ExecutorConfig, device: str) -> Peaks:
    """Of this device, with the threads that torch has been told to use."""
    flops, rate = settings.peak_tflops * TERA, settings.peak_gbps * GIGA
    if flops and rate:
        return Peaks(flops, rate)
    found = known_peaks(device) if device.startswith("cuda") else measured_peaks()
    return Peaks(flops or found.flops, rate or found.bytes)


def known_peaks(device: str) -> Peaks:
    """Of a GPU, as its vendor says; zeros if it is not in the table."""
    return named_peaks(torch.cuda.get_device_name(device))


def named_peaks(name: str) -> Peaks:
    """The same by its name."""
    for part, (tflops, gbps) in KNOWN.items():
        if part in name:
            return Peaks(tflops * TERA, gbps * GIGA)
    return Peaks(0.0, 0.0)


def measured_peaks() -> Peaks:
    """Of the CPU: a float32 product, and a read-only sum, each the best of a few; some 50 ms."""
    one, out = torch.ones(SQUARE, SQUARE), torch.empty(SQUARE, SQUARE)
    data = torch.ones(READ_BYTES // 4)
    product_s = _best_s(lambda: torch.mm(one, one, out=out))
    read_s = _best_s(data.sum)
    return Peaks(2.0 * SQUARE**3 / product_s, READ_BYTES / read_s)


def _best_s(work: Callable[[], object]) -> float:
    found: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)
