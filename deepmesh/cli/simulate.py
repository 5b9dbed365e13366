"""`deepmesh simulate`: the real scheduler on simulated ranks, in virtual time."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from deepmesh.report import Json
    from services.scheduler.sim.requests import SimRequest
    from services.scheduler.sim.simulate import Outcome, Scenario


def simulate(
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Executors of the group.")] = 1,
    rows: Annotated[
        int, typer.Option(min=1, max=4096, help="Requests that decode side by side on a rank.")
    ] = 128,
    workload: Annotated[
        str, typer.Option(help="mixed, chat, long-prompts, agentic, decode, or a file.")
    ] = "mixed",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[
        int,
        typer.Option(min=0, help="Group steps after which nothing arrives; 0: the whole file."),
    ] = 1000,
    depth: Annotated[int, typer.Option(min=1, max=3, help="Steps in flight.")] = 2,
    policy: Annotated[str, typer.Option(help="mixed, prefill-first or decode-first.")] = "mixed",
    utilisation: Annotated[
        float, typer.Option(min=0.01, max=10, help="Offered load of a named workload.")
    ] = 0.8,
    compare: Annotated[bool, typer.Option("--compare", help="All policies side by side.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A picture of the ranks' steps (PNG).")] = None,
    soak: Annotated[
        bool, typer.Option("--soak", help="Run drawn worlds with faults instead.")
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="Worlds of a soak.")] = 4500,
    faults: Annotated[int, typer.Option(min=0, help="Faults in each world of a soak.")] = 3,
    costs: Annotated[
        Path | None, typer.Option(help="Table of kernel times (JSON); default: a made-up device.")
    ] = None,
    h200: Annotated[
        bool, typer.Option("--h200", help="Step times from the H200's table of kernels.")
    ] = False,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="How many devices carry a daily load.")
    ] = False,
    daily: Annotated[
        float, typer.Option(min=1, help="Tokens a day, prompts and outputs (capacity).")
    ] = 1e12,
    output_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of these, outputs (capacity).")
    ] = 0.22,
    cached_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of prompt tokens (capacity).")
    ] = 0.56,
    context: Annotated[
        float, typer.Option(min=1, help="Tokens a decode row attends to, on average (capacity).")
    ] = 5000,
    itl_ms: Annotated[
        float, typer.Option(min=0.1, help="Most between tokens of a request (capacity).")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """Run the real scheduler on simulated executors and check every token (docs/simulator.md)."""
    if soak:
        from deepmesh.cli.simulate_soak import run_soak

        raise typer.Exit(run_soak(seed=seed, runs=runs, faults=faults, as_json=as_json))

    from services.scheduler.sim.capacity import TABLE, DailyLoad, read_table

    if capacity:
        from deepmesh.cli.simulate_capacity import GROUPS, run_capacity

        load = DailyLoad(daily, output_share, cached_share, context, itl_ms)
        groups = (ranks,) if ranks > 1 else GROUPS
        raise typer.Exit(run_capacity(load, table_file=costs, groups=groups, as_json=as_json))

    from rich.console import Console

    from deepmesh.errors import UserError
    from deepmesh.report import publish, report
    from services.scheduler.sim.baselines import POLICIES
    from services.scheduler.sim.picture import draw_timeline
    from services.scheduler.sim.simulate import Scenario
    from services.scheduler.sim.traffic import DEFAULT_COSTS

    device = costs or (TABLE if h200 else None)
    step_costs = read_table(device).step_costs(ranks) if device else DEFAULT_COSTS
    if policy not in POLICIES:
        raise UserError(f"no policy {policy!r}; there are: {', '.join(POLICIES)}")
    console = Console(stderr=True, highlight=False)
    cases: list[dict[str, Json]] = []
    ok = True
    for name in POLICIES if compare else (policy,):
        scenario = Scenario(
            ranks, rows, seed, depth=depth, policy=name, steps=steps, costs=step_costs
        )
        requests = _requests(scenario, workload, utilisation)
        outcome, wall_s = _run(scenario, requests, console)
        cases.append(_case(scenario, workload, outcome, wall_s))
        ok &= outcome.ok
        for error in outcome.errors:
            console.print(f"[red]{error}")
        if plot is not None:
            target = plot.with_stem(f"{plot.stem}-{name}") if compare else plot
            draw_timeline(outcome.record.spans, outcome.tail_ns, target)
            console.print(f"{target}: the ranks' steps", style="dim")
    _table(console, cases)
    config: dict[str, Json] = {
        "workload": workload,
        "seed": seed,
        "depth": depth,
        "steps": steps,
        "utilisation": utilisation,
        "costs": device.name if device else "",
    }
    found = report("simulate", config=config, cases=cases, ok=ok)
    publish(found, name="simulate", as_json=as_json)
    if not ok:
        raise typer.Exit(1)


def _requests(scenario: "Scenario", workload: str, utilisation: float) -> "Iterator[SimRequest]":
    from deepmesh.errors import UserError
    from services.scheduler.sim.traffic import WORKLOADS, arrivals
    from services.scheduler.sim.workload_file import read

    if workload in WORKLOADS:
        if not scenario.steps:
            raise UserError("a named workload has no end: say --steps")
        return arrivals(
            workload,
            seed=scenario.seed,
            ranks=scenario.ranks,
            rows=scenario.rows,
            costs=scenario.costs,
            utilisation=utilisation,
        )
    try:
        lines = Path(workload).read_text().splitlines()
    except OSError as error:
        names = ", ".join(WORKLOADS)
        raise UserError(f"{workload}: {error.strerror}; named workloads: {names}") from None
    # All of it is read first, so that a wrong line is found before the run and not within it.
    return iter(list(read(lines, name=workload, seed=scenario.seed)))


def _run(
    scenario: "Scenario", requests: "Iterator[SimRequest]", console: "Console"
) -> "tuple[Outcome, float]":
    from services.scheduler.sim.simulate import simulate as run

    start = time.monotonic()
    with progress_bar(console) as bar:
        task = bar.add_task(scenario.policy, total=scenario.steps or None)
        outcome = run(
            scenario,
            requests,
            progress=lambda steps, ended: bar.update(
                task, completed=steps, description=f"{scenario.policy}: {ended} requests ended"
            ),
        )
    return outcome, time.monotonic() - start


def progress_bar(console: "Console") -> "Progress":
    """On stderr, gone when it is done; nothing where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _case(
    scenario: "Scenario", workload: str, outcome: "Outcome", wall_s: float
) -> "dict[str, Json]":
    return {
        "policy": scenario.policy,
        "workload": workload,
        "ranks": scenario.ranks,
        "rows": scenario.rows,
        "depth": scenario.depth,
        "wall_s": wall_s,
        **outcome.figures,
        "oracle_mismatches": outcome.oracle_mismatches,
        "audit_failures": outcome.audit_failures,
        "unfinished": outcome.unfinished,
        "errors": [*outcome.errors],
        "event_log": outcome.digest,
    }


def _table(console: "Console", cases: "list[dict[str, Json]]") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for case in cases:
        table.add_column(str(case["policy"]), justify="right")
    for key in cases[0]:
        if key not in ("policy", "errors", "event_log"):
            table.add_row(key, *(_text(case[key]) for case in cases))
    console.print(table)


def _text(value: "Json") -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
