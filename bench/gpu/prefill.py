"""How fast a prompt is computed by a slice on a GPU: a share of the rate of bfloat16 products.

`deepmesh bench prefill --device cuda --json`. Random weights of real shape, made on the device. The
work is 2 x active weights x tokens and attention over the rows really attended to; the rate is that
of a product of 8192 x 8192 x 8192 random values in the same run. `prefill_ms` is of a step that was
launched while the device was busy, as an executor's is; `alone_ms` of one that an idle device waits
for. `products` splits the time of one prompt by kernel.
"""

import argparse
import statistics
import time

import torch

from bench.accounting import prefill_flops
from bench.gpu import slice_ranks
from bench.gpu.model_slice import ModelSlice, layer_kinds
from bench.gpu.routes_seen import experts_of, routes_seen
from bench.gpu.timing import Rates, event_us
from bench.tables import show
from deepmesh.report import Json, report
from services.executor.batch import StepBatch

COLUMNS = ("tokens", "zipf", "prefill_ms", "ours_tokens_per_s=tokens/s", "tflops")
COLUMNS += ("share_of_peak", "experts_touched=experts")
REPEATS, WARM_UPS = 7, 2
POPULAR_TOKENS = 1024  # of the prompts by which experts are made popular
LARGEST = 24  # kernels that are listed


def case_of(
    part: ModelSlice, batch: StepBatch, rates: Rates | None, *, zipf: float
) -> dict[str, Json]:
    """One prompt in one step."""
    with routes_seen() as seen:
        logits = part.prefill(batch)
    if rates is None:
        began = time.perf_counter()
        part.prefill(batch)
        samples = [1e6 * (time.perf_counter() - began)]
        alone = samples[0]
    else:

        def work() -> object:
            return part.prefill(batch)

        runs = [event_us(work, ahead=True) for _ in range(REPEATS + WARM_UPS)]
        samples = runs[WARM_UPS:]
        alone = statistics.median(event_us(work) for _ in range(REPEATS))
    median, tokens = statistics.median(samples), batch.num_tokens
    flops = prefill_flops(part.config, tokens)
    layers = [len(experts_of(ids)) for ids in seen]
    return {
        "device": part.device.type,
        "layers": part.config.num_hidden_layers,
        "tokens": tokens,
        "zipf": zipf,
        "ours_tokens_per_s": round(1e6 * tokens / median, 1),
        "prefill_ms": round(median / 1e3, 3),
        "best_ms": round(min(samples) / 1e3, 3),
        "alone_ms": round(alone / 1e3, 3),
        "tflops": round(flops / median / 1e6, 1),
        "share_of_peak": round(flops / (median * 1e-6) / rates.flops, 4) if rates else None,
        "flops": flops,
        "experts_touched": round(sum(layers) / max(1, len(layers)), 1),
        "finite": bool(torch.isfinite(logits).all()),
        "peers": {},
        "samples_ms": [round(sample / 1e3, 3) for sample in samples],
    }


def products(part: ModelSlice, batch: StepBatch) -> list[Json]:
    """Kernels of one prompt by their time, the largest first."""
    activity = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activity) as profile:
        part.prefill(batch)
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return [
        {"kernel": row.key[:80], "calls": row.count, "us": round(row.device_time_total, 1)}
        for row in rows[:LARGEST]
    ]


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark; arguments of `bench prefill`."""
    if arguments.ranks > 1:
        return slice_ranks.run("prefill", "tokens", arguments)
    on_gpu = arguments.device == "cuda"
    rates = Rates() if on_gpu else None
    part = ModelSlice(
        arguments.preset,
        arguments.layers,
        rows=1,
        context=64,
        tokens=max(arguments.tokens),
        device=arguments.device,
    )
    found: list[dict[str, Json]] = []
    for zipf in arguments.zipf:
        part.make_popular_in_prompts(zipf, min(POPULAR_TOKENS, max(arguments.tokens)))
        for tokens in arguments.tokens:
            case = case_of(part, part.prompt(tokens), rates, zipf=zipf)
            found.append({"preset": arguments.preset, **case})
    config: dict[str, Json] = {
        "kinds": list(layer_kinds(part.config)),
        "numerics": "bf16",
        "kernels_of_their_own": part.model.prefill is not None,
        **(rates.config() if rates else {}),
    }
    name = None
    if on_gpu:
        name = torch.cuda.get_device_name()
        config["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        config["products"] = products(part, part.prompt(max(arguments.tokens)))
    show("prefill on the GPU", COLUMNS, found)
    ok = all(bool(case["finite"]) for case in found)
    return report("bench prefill", config=config, cases=found, ok=ok, gpu=name)
