"""How near a decode step of a slice comes to what it must read, on a GPU.

`deepmesh bench decode --device cuda --json`. Random weights of real shape, made on the device; each
row with a context in full pools. A step is the captured graph of one batch bucket, from index
tensors to logits, launched while the device was busy, as an executor's is; `alone_ms` of one that
an idle device waits for. Its floor is what it must read (experts that its routers really chose,
under routing drawn uniform and Zipf) at the rate of a read-only sum measured in the same run.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from bench.accounting import Touched, kv_bytes, weight_bytes
from bench.gpu import slice_ranks
from bench.gpu.model_slice import ModelSlice, layer_kinds, mean_touched
from bench.gpu.timing import Rates, event_us
from bench.tables import show
from deepmesh.report import Json, report
from services.executor.gpu.decode_program import DecodeProgram

COLUMNS = ("batch", "context", "zipf", "step_ms", "floor_ms", "share_of_floor")
COLUMNS += ("experts_touched=experts", "ours_tokens_per_s=tokens/s")
REPEATS, WARM_UPS = 20, 3


def timed(program: DecodeProgram, work: Callable[[], None], *, ahead: bool) -> list[float]:
    """Times of a step in us, in the order in which it ran.

    Args:
        ahead: launched while the device is still busy, as an executor's steps are.
    """
    if program.logits.is_cuda:
        return [event_us(work, ahead=ahead) for _ in range(REPEATS + WARM_UPS)][WARM_UPS:]
    return [0.0]


def case_of(
    part: ModelSlice, program: DecodeProgram, rates: Rates | None, *, zipf: float, eager: bool
) -> dict[str, Json]:
    """One batch under one routing."""
    step: Touched = part.touched(program)
    work = program.run if eager else program.replay
    samples, alone = (timed(program, work, ahead=ahead) for ahead in (True, False))
    median = statistics.median(samples)
    weights, kv = weight_bytes(part.config, step), kv_bytes(part.config, step)
    floor = 1e6 * (weights + kv) / rates.read if rates else 0.0
    rows = len(step.ids)
    return {
        "device": part.device.type,
        "layers": part.config.num_hidden_layers,
        "batch": rows,
        "context": part.context,
        "zipf": zipf,
        "graph": not eager,
        "ours_tokens_per_s": round(1e6 * rows / median, 1) if median else 0.0,
        "step_ms": round(median / 1e3, 4),
        "best_ms": round(min(samples) / 1e3, 4),
        "alone_ms": round(statistics.median(alone) / 1e3, 4),
        "floor_ms": round(floor / 1e3, 4),
        "share_of_floor": round(floor / median, 4) if median else 0.0,
        "bytes_read": weights + kv,
        "kv_bytes": kv,
        "experts_touched": round(mean_touched([step]), 1),
        "finite": bool(torch.isfinite(program.logits).all()),
        "peers": {},
        "samples_ms": [round(sample / 1e3, 4) for sample in samples],
    }


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark; arguments of `bench decode`."""
    if arguments.ranks > 1:
        return slice_ranks.run("decode", "batch", arguments)
    on_gpu = arguments.device == "cuda"
    rates = Rates() if on_gpu else None
    part = ModelSlice(
        arguments.preset,
        arguments.layers,
        rows=max(arguments.batch),
        context=max(arguments.context),
        tokens=0,
        device=arguments.device,
    )
    found: list[dict[str, Json]] = []
    for zipf in arguments.zipf:
        part.make_popular(zipf)
        for rows in arguments.batch:
            program = part.program(rows, graph=on_gpu)
            found.append(
                {
                    "preset": arguments.preset,
                    **case_of(part, program, rates, zipf=zipf, eager=not on_gpu),
                }
            )
            del program
    config: dict[str, Json] = {
        "kinds": list(layer_kinds(part.config)),
        "numerics": "bf16",
        "invariant": True,
        **(rates.config() if rates else {}),
    }
    name = None
    if on_gpu:
        name = torch.cuda.get_device_name()
        config["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    show("decode on the GPU", COLUMNS, found)
    ok = all(bool(case["finite"]) for case in found)
    return report("bench decode", config=config, cases=found, ok=ok, gpu=name)
