"""Runs the check: every request alone, then in every group, and compares bit by bit."""

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from deepmesh.report import Json, publish, report

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny"
FULL, QUICK = (104, 64), (12, 16)  # requests, tokens of each
# Where the planted faults show; the whole check would find them, too, but takes longer.
LEFT_OUT = {"speculation": "this engine does not draft yet"}  # groups of the check, and why
TELLING = ("in_flight_8", "in_flight_64", "shuffled")


def run(
    *,
    model: Path,
    device: Literal["cpu", "cuda"],
    size: tuple[int, int],
    fault: str = "",
    with_mesh: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Json]:
    """The whole check, as the object that --json prints.

    Args:
        size: number of requests, and output tokens of each.
        fault: plant this one; the check has to find it.
        with_mesh: also kill a real executor process (some 20 seconds).
    """
    from bench.determinism.groups import Groups, Setting
    from bench.determinism.jobs import make_jobs
    from bench.determinism.mesh import killed_executor
    from bench.determinism.outputs import Tally

    run_dir = Path(tempfile.mkdtemp(prefix="dm-"))  # paths of sockets are short
    jobs = make_jobs(model, *size, has_masks=True)
    setting = Setting(model, run_dir, jobs, fault=fault, device=device)
    kinds = [job.kind for job in jobs]
    tallies: list[Tally] = []
    groups = Groups(setting)
    try:
        began = time.monotonic()
        wanted = groups.alone()
        say(f"{len(jobs)} requests alone: {time.monotonic() - began:.1f} s")
        runs = groups.all()
        if with_mesh and not fault:
            runs["killed_executor_process"] = lambda: [killed_executor(setting)]
        for name, group in runs.items():
            if fault and name not in TELLING:
                continue
            began, tally = time.monotonic(), Tally(name)
            for outputs in group():
                tally.compare(kinds, outputs, wanted)
            say(
                f"{name}: {time.monotonic() - began:.1f} s"
                + (f"; {tally.first}" if tally.first else "")
            )
            tallies.append(tally)
    finally:
        groups.close()
        shutil.rmtree(run_dir, ignore_errors=True)
    caught = any(not tally.is_clean for tally in tallies)
    cases: list[dict[str, Json]] = [
        {
            "device": device,
            "group": tally.group,
            "comparisons": tally.comparisons,
            "tokens": tally.tokens,
            "id_mismatches": tally.id_mismatches,
            "logprob_bit_mismatches": tally.logprob_bit_mismatches,
            "first_mismatch": tally.first or None,
            **({"caught": not tally.is_clean} if fault else {}),
        }
        for tally in tallies
    ]
    config: dict[str, Json] = {
        "model": model.name,
        "numerics": setting.numerics,
        "requests": size[0],
        "tokens_each": size[1],
        "break": fault or None,
        "left_out": dict(LEFT_OUT),
    }
    found = report(
        "check determinism", config=config, cases=cases, ok=caught if fault else not caught
    )
    return found | ({"caught": caught} if fault else {})


def show(found: dict[str, Json]) -> None:
    """A table on stderr."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group")
    for name in ("comparisons", "tokens", "ids differ", "bits differ"):
        table.add_column(name, justify="right")
    cases = found["cases"]
    assert isinstance(cases, list)
    for case in cases:
        assert isinstance(case, dict)
        keys = ("comparisons", "tokens", "id_mismatches", "logprob_bit_mismatches")
        table.add_row(str(case["group"]), *(f"{case[key]:,}" for key in keys))
    console = Console(stderr=True)
    console.print(table)
    config = found["config"]
    assert isinstance(config, dict)
    for group, why in LEFT_OUT.items():
        console.print(f"left out: {group} on and off ({why})")
    if config["break"]:
        console.print(f"planted fault {config['break']}: {'caught' if found['ok'] else 'MISSED'}")


def _problem(fault: str) -> str:
    """Why the check cannot run on a GPU; empty: it can."""
    import torch

    if fault:
        return "faults are planted on a CPU: use --device cpu"
    return "" if torch.cuda.is_available() else "no CUDA device is here: use --device cpu"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    from bench.determinism.faults import FAULTS

    parser = argparse.ArgumentParser(prog="deepmesh check determinism", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--break",
        dest="fault",
        choices=tuple(FAULTS),
        default="",
        help="plant a known fault, which must be caught: "
        + "; ".join(f"{name}: {text}" for name, text in FAULTS.items()),
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a checkpoint")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and (problem := _problem(given.fault)):
        print(problem, file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)  # executors are killed on purpose
    found = run(
        model=given.model,
        device=given.device,
        size=QUICK if given.quick or given.fault else FULL,
        fault=given.fault,
        with_mesh=not given.quick,
        say=lambda text: print(text, file=sys.stderr),
    )
    show(found)
    publish(found, name="check_determinism", as_json=given.json)
    return 0
