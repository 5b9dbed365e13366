"""How much of a GPU's time the host leaves unused while the whole mesh streams to HTTP clients.

`deepmesh bench overlap --device cuda --json`. Gateway, tokenizer, scheduler and executor as
processes; a client with as many streams as the scheduler has rows. Begin and end of a step are read
by the GPU's own clock, in kernels in front of and behind it. Only steps with nearly all rows count.
`sync_calls`: calls in which torch saw the host wait for the device, once the model was loaded.
"""

import argparse
from pathlib import Path

import torch

from bench.checkpoints import add_options, open_checkpoint
from bench.overlap import case_figures, show
from bench.rig.cases import Case
from bench.rig.run import run as run_case
from deepmesh.report import Json, report

LIMITS = {"gpu_gap_us_p50": 10.0, "gpu_gap_us_p99": 50.0, "bubble_ratio": 0.005, "sync_calls": 0}


def options(parser: argparse.ArgumentParser) -> None:
    """Of `bench overlap`."""
    add_options(parser)
    parser.set_defaults(preset="v41-thin")  # of whose shapes the kernels for Hopper have code
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--depth", type=int, nargs="+", default=[2], choices=[1, 2, 3])
    parser.add_argument("--step-ms", type=float, default=8.0, help="about what a step takes")
    parser.add_argument("--steps", type=int, default=200, help="of a run, about")
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    parser.add_argument(
        "--tokens", type=int, default=1000, help="of each chat; 0: short ones, with many prompts"
    )


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark."""
    checkpoint = open_checkpoint(arguments)
    figures: list[dict[str, Json]] = []
    waits: list[Json] = []
    for rows in arguments.rows:
        for depth in arguments.depth:
            folder = str(Path(checkpoint.folder).resolve())
            case = Case(
                rows,
                arguments.step_ms,
                depth,
                whole_mesh=True,
                model=folder,
                output_tokens=arguments.tokens,
            )
            runs = [
                run_case(case, arguments.steps, with_replay=False) for _ in range(arguments.runs)
            ]
            figures.append({"preset": checkpoint.name, **case_figures(case, runs)})
            waits += sorted({line for one in runs for line in one.waits[1:]})
    judged: list[dict[str, Json]] = [
        {"rows": case["rows"], "key": key, "value": case[key], "at_most": limit}
        for case in figures
        for key, limit in LIMITS.items()
    ]
    show(figures, judged)
    config: dict[str, Json] = {
        "model": checkpoint.name,
        "runs": arguments.runs,
        "steps": arguments.steps,
        "tokens": arguments.tokens,
        "targets": list(judged),
        "waits": waits,
    }
    name = torch.cuda.get_device_name()
    return report("bench overlap", config=config, cases=figures, ok=bool(figures), gpu=name)
