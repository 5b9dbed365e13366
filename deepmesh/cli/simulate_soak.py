"""`deepmesh simulate --soak`: drawn worlds with faults, on all cores."""

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepmesh.report import Json
    from services.scheduler.sim.soak import SoakRun

KINDS = ("oracle", "audit", "shadow", "unfinished")


def run_soak(*, seed: int, runs: int, faults: int, as_json: bool) -> int:
    """Run the worlds of consecutive seeds and sum up.

    Returns:
        the exit status: 1 if any world was wrong.
    """
    import multiprocessing
    import time

    from rich.console import Console

    from deepmesh.cli.simulate import progress_bar
    from deepmesh.report import publish, report
    from services.scheduler.sim.soak import soak_run

    console = Console(stderr=True, highlight=False)
    sums, failed, start = Counter[str](), Counter[str](), time.monotonic()
    wrong: list[SoakRun] = []
    workers = min(runs, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(workers, mp_context=context) as pool,
        progress_bar(console) as bar,
    ):
        task = bar.add_task("worlds", total=runs)
        work = partial(soak_run, faults=faults)
        for done in pool.map(work, range(seed, seed + runs), chunksize=4):
            sums.update(done.counts)
            bar.advance(task)
            if done.error:
                failed[done.kind] += 1
                wrong.append(done)
                again = f"deepmesh simulate --soak --seed {done.seed} --runs 1 --faults {faults}"
                console.print(f"[red]seed {done.seed}[/red] {done.error}\n  again: {again}")
    case: dict[str, Json] = {
        "runs": runs,
        "wall_s": time.monotonic() - start,
        "oracle_mismatches": failed["oracle"],
        "audit_failures": failed["audit"],
        "shadow_errors": failed["shadow"],
        "unfinished": failed["unfinished"],
        "failing_seeds": [run.seed for run in wrong],
        "reached": {name: sums[name] for name in sorted(sums)},
    }
    for name, value in case.items():
        console.print(f"{name}: {value}", soft_wrap=True)
    config: dict[str, Json] = {"seed": seed, "faults": faults, "workers": workers}
    found = report("simulate --soak", config=config, cases=[case], ok=not wrong)
    publish(found, name="simulate-soak", as_json=as_json)
    return 1 if wrong else 0
