"""A whole step of the model on the CPU: native kernels and torch references side by side.

`make bench NAME=model ARGS=--json`. Decode rows stand at a context of their own each; prefill is
one prompt from position 0. Native and reference repetitions alternate. Prints one JSON object (with
--json) and appends it to bench/results/model.jsonl.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.cpu_kernels import MAX_LOAD
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from kernels import native
from services.executor.batch import BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.weights import load_model

MODEL = Path(__file__).parents[1] / "models" / "tiny"
BLOCK = 64
CONTEXT = 512  # tokens before a decode row
ROWS = (1, 4, 16, 64)
PREFILLS = (128, 512, 2048)
LEVELS = {"native": "", "reference": native.REFERENCE}


def batch_of(model: DeepseekV41, num_rows: int, start: int, width: int) -> StepBatch:
    """`num_rows` requests that compute `width` positions from `start`, in blocks of their own."""
    blocks = -(-(start + width) // BLOCK)
    rng = np.random.default_rng(0)
    rows = [
        BatchRow(
            ids=rng.integers(20, model.config.vocab_size, width).astype(np.int32),
            start=start,
            global_blocks=range(row * blocks, (row + 1) * blocks),
            window_blocks=range(row * blocks, (row + 1) * blocks),
            state_block=row,
            context=[20, 21, 22] if start else [],
        )
        for row in range(num_rows)
    ]
    return StepBatch.build(rows, model.config.context_ids)


def milliseconds(work: Callable[[], object]) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def measure(
    models: dict[str, DeepseekV41], num_rows: int, start: int, width: int
) -> dict[str, float]:
    """Median ms of a step by kind of kernels, their repetitions taking turns."""
    blocks = num_rows * -(-(start + width) // BLOCK)
    steps: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        cache = KvCache(model.config, blocks, blocks, num_rows)
        batch = batch_of(model, num_rows, start, width)
        steps[name] = lambda m=model, b=batch, c=cache: m.forward(b, c)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(7 if width > 1 else 15):
        for name, step in steps.items():
            native.use(LEVELS[name])
            taken = milliseconds(step)
            if repetition > 1:
                times[name].append(taken)
    return {name: round(statistics.median(taken), 3) for name, taken in times.items()}


def run() -> dict[str, Json]:
    """The whole benchmark."""
    torch.set_num_threads(1)
    steal, load = Steal(), os.getloadavg()[0]
    models: dict[str, DeepseekV41] = {}
    for name, level in LEVELS.items():
        native.use(level)  # weights are packed for the kernels in use
        models[name] = load_model(MODEL, "bf16")
    cases: list[dict[str, Json]] = []
    for kind, num_rows, start, width in (
        *(("decode", rows, CONTEXT, 1) for rows in ROWS),
        *(("prefill", 1, 0, tokens) for tokens in PREFILLS),
    ):
        found = measure(models, num_rows, start, width)
        tokens = num_rows * width
        case: dict[str, Json] = {
            "op": kind,
            "rows": num_rows,
            "context": start,
            "tokens": tokens,
            "step_ms": found["native"],
            "ours_tokens_per_s": round(1e3 * tokens / found["native"]),
            "peers": {"torch reference": round(1e3 * tokens / found["reference"])},
            "ratio_to_best_peer": round(found["reference"] / found["native"], 2),
        }
        print(case, file=sys.stderr)
        cases.append(case)
    share = steal.take()
    config: dict[str, Json] = {
        "threads": 1,
        "numerics": "bf16",
        "steal": round(share, 4),
        "load_before": load,
    }
    whole = report("bench model", config=config, cases=cases, ok=True)
    return whole | {"valid": share <= MAX_STEAL and load < MAX_LOAD}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    publish(run(), name="model", as_json=arguments.json)


if __name__ == "__main__":
    main()
