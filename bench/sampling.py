"""The sampler on the CPU: native kernels and torch side by side, by vocabulary and by wish.

`deepmesh bench sampling --json`. A case is one call of the executor's sampler for all rows of a
step, from logits to tokens. The floor is one read of the logits at the rate of a read-only sum.
Native and torch repetitions take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from msgspec.structs import replace

from bench.tables import show
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from deepmesh.wire.messages import SamplingParams, SlotInit
from kernels import native
from services.executor.sample_row import SampleRow, SampleSettings
from services.executor.sampler import sample

VOCABULARIES = (4096, 129_280)
ROWS = (1, 16, 64)
LENGTH = 1024  # tokens before the one to sample
REPETITIONS = 9
READ_FLOATS = 128 << 20
KINDS: dict[str, tuple[SamplingParams, int]] = {  # and how many logprobs
    "greedy": (SamplingParams(temperature=0.0), -1),
    "temperature": (SamplingParams(temperature=1.0), -1),
    "top_k 40": (SamplingParams(temperature=1.0, top_k=40), -1),
    "top_p 0.9": (SamplingParams(temperature=1.0, top_p=0.9), -1),
    "min_p 0.05": (SamplingParams(temperature=1.0, min_p=0.05), -1),
    "penalties": (
        SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.3, repetition_penalty=1.1),
        -1,
    ),
    "logprobs 20": (SamplingParams(temperature=0.0), 20),
}
LEVELS = {"native": "", "torch": native.REFERENCE}


def rows_of(kind: str, count: int, vocab: int) -> list[SampleRow]:
    """Rows of requests that ask for `kind`."""
    params, n_logprobs = KINDS[kind]
    tokens = np.random.default_rng(0).integers(0, vocab, (count, LENGTH)).astype(np.int32)
    base = SlotInit(
        0, 1, 1, 0, b"", LENGTH // 2, 2 * LENGTH, sampling=params, n_logprobs=n_logprobs
    )
    inits = [replace(base, seed=row) for row in range(count)]
    return [
        SampleRow(init, frozenset(), tokens[row], None, SampleSettings.of(init, frozenset()))
        for row, init in enumerate(inits)
    ]


def milliseconds(work: Callable[[], object]) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def measure(kind: str, count: int, vocab: int) -> dict[str, float]:
    """Median ms by kind of kernels."""
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * 3
    rows = rows_of(kind, count, vocab)
    times: dict[str, list[float]] = {name: [] for name in LEVELS}
    for repetition in range(REPETITIONS):
        for name, level in LEVELS.items():
            native.use(level)
            taken = milliseconds(lambda: sample(logits, rows))
            if repetition > 1:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def read_gbps() -> float:
    """Rate of a read-only sum."""
    floats = torch.ones(READ_FLOATS)
    best = min(milliseconds(floats.sum) for _ in range(5))
    return 4 * READ_FLOATS / best / 1e6


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="deepmesh bench sampling", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    steal, rate = Steal(), read_gbps()
    cases: list[dict[str, Json]] = []
    for vocab in VOCABULARIES:
        for count in ROWS:
            for kind in KINDS:
                found = measure(kind, count, vocab)
                floor_us = 4 * vocab * count / rate / 1e3
                cases.append(
                    {
                        "device": "cpu",
                        "op": f"sample {kind}",
                        "shape": f"{count}x{vocab}",
                        "ours_us": round(1e3 * found["native"], 1),
                        "floor_us": round(floor_us, 1),
                        "share_of_floor": round(floor_us / (1e3 * found["native"]), 3),
                        "peers": {"torch": round(1e3 * found["torch"], 1)},
                        "ratio_to_best_peer": round(found["torch"] / found["native"], 2),
                    }
                )
    native.use()
    share = steal.take()
    config = cast(
        "dict[str, Json]", {"threads": 1, "read_gbps": round(rate, 1), "steal": round(share, 4)}
    )
    show("sampler on the CPU", ("op", "shape", "ours_us", "floor_us", "peers.torch"), cases)
    whole = report("bench sampling", config=config, cases=cases, ok=True)
    publish(whole | {"valid": share <= MAX_STEAL}, name="sampling", as_json=given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
