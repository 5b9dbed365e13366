"""How much of a GPU's time the host leaves unused while the whole mesh streams to HTTP clients.

`deepmesh bench overlap --device cuda --json`. Gateway, tokenizer, scheduler and executor as
processes; a client with as many streams as the scheduler has rows. The model is a slice of real
shape whose weights the executor makes on the device, or a checkpoint (`--layers 0`). Begin and end
of a step are read by the GPU's own clock, in kernels in front of and behind it.

Phases, one after the other in the same mesh (`--chats`): chats of one length, one a stream, of
which the steps count that are full and decode alone; then chats of drawn lengths that follow each
other, with prompts in between, of which all steps count from the first full one to the last.
`sync_calls`: calls in which torch saw the host wait for the device, once the model was loaded.
`lead_ms`: how long before the end of a step the next one was launched whole.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.checkpoints import add_options, open_checkpoint
from bench.gpu.mesh_run import MeshRun, Phase, Plan, run_mesh, write_slice
from bench.tables import show
from deepmesh.report import Json, report

LIMITS = {"gpu_gap_us_p50": 10.0, "gpu_gap_us_p99": 50.0, "bubble_ratio": 0.005, "sync_calls": 0}
COLUMNS = (
    "chats",
    "rows",
    "depth",
    "steps",
    "prompts_per_step",
    "gpu_gap_us_p50",
    "gpu_gap_us_p99",
)
COLUMNS += ("gpu_gap_us_max", "bubble_ratio", "sync_calls", "busy_ms_mean", "launch_ms_p50")
COLUMNS += ("lead_ms_p01", "tokens_per_s")
NUM_WORST = 8  # gaps that are described


def options(parser: argparse.ArgumentParser) -> None:
    """Of `bench overlap`."""
    add_options(parser)
    parser.set_defaults(preset="v41-flash")  # of whose shapes the kernels for Hopper have code
    parser.add_argument("--layers", type=int, default=4, help="of the slice; 0: a checkpoint, read")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of a group that share the rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--depth", type=int, nargs="+", default=[2], choices=[1, 2, 3])
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--max-len", type=int, default=2048, help="of a request, tokens")
    parser.add_argument(
        "--chats", nargs="+", default=["1200", "200:800", "40:119"], help="tokens, by phase"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of a phase of drawn lengths")


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark."""
    with tempfile.TemporaryDirectory(prefix="dm-") as name:
        model, folder = f"{arguments.preset}, {arguments.layers} layers", Path(name) / "slice"
        if arguments.layers:
            write_slice(folder, arguments.preset, arguments.layers)
        else:
            checkpoint = open_checkpoint(arguments)
            model, folder = checkpoint.name, checkpoint.folder.resolve()
        on_gpu = arguments.device == "cuda"
        figures: list[dict[str, Json]] = []
        waits: set[str] = set()
        for rows in arguments.rows:
            for depth in arguments.depth:
                plan = Plan(
                    folder,
                    makes_weights=bool(arguments.layers),
                    rows=rows,
                    depth=depth,
                    chats=arguments.chats,
                    seconds=arguments.seconds,
                    max_len=arguments.max_len,
                    device="cuda" if on_gpu else "host",
                    ranks=arguments.ranks,
                )
                runs = [run_mesh(plan) for _ in range(arguments.runs)]
                waits.update(words for one in runs for words in one.waits)
                figures += figures_of(model, plan, runs)
    show("overlap on the GPU", COLUMNS, figures)
    config: dict[str, Json] = {
        "model": model,
        "runs": arguments.runs,
        "targets": judged(figures),
        "waits": list(sorted(waits)),
    }
    gpu = torch.cuda.get_device_name() if on_gpu else None
    return report("bench overlap", config=config, cases=figures, ok=bool(figures), gpu=gpu)


def judged(figures: Sequence[dict[str, Json]]) -> list[Json]:
    """The limits that were set, and whether the figures keep them."""
    found: list[Json] = []
    for case in figures:
        for key, limit in LIMITS.items():
            value = case[key]
            assert isinstance(value, int | float)
            about = {name: case[name] for name in ("rows", "depth", "chats")}
            found.append(
                {**about, "key": key, "value": value, "at_most": limit, "met": value <= limit}
            )
    return found


def figures_of(model: str, plan: Plan, runs: Sequence[MeshRun]) -> list[dict[str, Json]]:
    """One case a phase, its steps those of all runs."""
    load = runs[-1].load
    about: dict[str, Json] = {
        "device": plan.device,
        "model": model,
        "rows": plan.rows,
        "ranks": plan.ranks,  # steps, gaps and tokens are those of rank 0
        "depth": plan.depth,
        "scope": "mesh",
        "start_s": round(runs[0].start_s, 1),
        "sync_calls": max(len(one.waits) for one in runs),
        "cpu_ms_per_step": {name: round(ms, 3) for name, ms in load.cpu_ms.items()},
        "steal": round(load.steal, 4),
        "others_cpu": round(load.others or 0.0, 4),
    }
    return [
        {**about, **phase_figures(phases)}
        for phases in zip(*(one.phases for one in runs), strict=True)
    ]


def phase_figures(phases: Sequence[Phase]) -> dict[str, Json]:
    """Of one phase in all runs."""
    windows = [phase.window for phase in phases]
    gaps = np.concatenate([window.gaps for window in windows]) / 1e3
    busy = np.concatenate([window.busy for window in windows]) / 1e6
    prompts = np.concatenate([phase.num_prompt_rows for phase in phases])
    launches = np.concatenate([_launch_ms(phase) for phase in phases])
    leads = np.concatenate([_leads_ms(phase) for phase in phases])
    span_s = sum(window.span for window in windows) / 1e9
    idle = gaps.sum() / 1e3
    return {
        "chats": phases[0].chats,
        "steps": len(busy),
        "prompts_per_step": round(float(prompts.mean()), 3),
        "gpu_gap_us_p50": round(float(np.median(gaps)), 1),
        "gpu_gap_us_p99": round(float(np.percentile(gaps, 99)), 1),
        "gpu_gap_us_max": round(float(gaps.max()), 1),
        "bubble_ratio": round(float(idle / (idle + busy.sum())), 5),
        "busy_ms_mean": round(float(busy.mean()), 4),
        "busy_ms_with_prompts": _mean(busy[prompts > 0]),
        "busy_ms_decode_alone": _mean(busy[prompts == 0]),
        "launch_ms_p50": round(float(np.median(launches)), 3),
        "launch_ms_p99": round(float(np.percentile(launches, 99)), 3),
        "launch_ms_with_prompts": _mean(launches[prompts > 0]),
        "lead_ms_p50": round(float(np.median(leads)), 3),
        "lead_ms_p01": round(float(np.percentile(leads, 1)), 3),
        "tokens_per_s": round(sum(window.tokens for window in windows) / span_s),
        "worst": _worst(phases[0]),
    }


def _launch_ms(phase: Phase) -> NDArray[np.float64]:
    """How long the launching thread was busy with each step."""
    return (phase.launch_end - phase.launch_begin) / 1e6


def _leads_ms(phase: Phase) -> NDArray[np.float64]:
    """How long before the end of each step, but the last, the next one was launched whole."""
    return (phase.window.end[:-1] - phase.launch_end[1:]) / 1e6


def _mean(values: NDArray[np.float64]) -> Json:
    return round(float(values.mean()), 4) if len(values) else None


def _worst(phase: Phase) -> list[Json]:
    """The longest gaps, and what came in front of and behind them; times in ms before the end of
    the step in front, negative: too late."""
    window = phase.window
    gaps = (window.begin[1:] - window.end[:-1]) / 1e3
    found: list[Json] = []
    for at in np.argsort(-gaps, kind="stable")[:NUM_WORST].tolist():
        end = window.end[at]
        found.append(
            {
                "gap_us": round(float(gaps[at]), 1),
                "step": at + 1,
                "prompts_before": int(phase.num_prompt_rows[at]),
                "prompts_behind": int(phase.num_prompt_rows[at + 1]),
                "queued": round(float(end - window.enqueued[at + 1]) / 1e6, 3),
                "launch_began": round(float(end - phase.launch_begin[at + 1]) / 1e6, 3),
                "launched": round(float(end - phase.launch_end[at + 1]) / 1e6, 3),
            }
        )
    return found
