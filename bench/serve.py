"""What a server of the OpenAI API does under load, seen by its clients.

`deepmesh bench serve --url http://HOST:PORT`: any such server, with a set number of requests at a
time (--concurrency) or as they come (--rate, a Poisson process). `--fake-executor` starts a mesh
whose executor answers at once: what HTTP, text and scheduling cost. `--mesh` starts one with the
model, its executor on a core of its own, and compares it with that executor alone: throughput,
first token on an idle mesh, times between tokens while long prompts arrive.
"""

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.load.drive import Client, LoadError, closed_loop, open_loop
from bench.load.figures import Limits, Window, case_of
from bench.load.mesh import Course, Plan, mesh_case
from bench.load.offline import Speed
from bench.load.options import arguments_of
from bench.load.pinned import (
    RigError,
    fake_config,
    model_config,
    offline,
    running,
    service_pids,
)
from bench.load.workload import Fit, PromptsError, Shape, from_file, synthetic
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report

SERVICES = ("gateway", "tokenizer", "scheduler")  # whose CPU time a token has a limit together
FAKE_TOKENS_PER_S, FAKE_CPU_US = 20_000.0, 35.0
MESH_SHARE, MESH_TTFT_MS, MESH_ITL_RISE = 0.9, 5.0, 0.2
Case = dict[str, Json]


# ------------------------------------------------------------ any server


async def drive(
    arguments: argparse.Namespace, url: str, pids: dict[str, int], bar: Callable[[float, str], None]
) -> Case:
    """One run against a server."""
    client = Client(
        url, api=arguments.api, api_key=arguments.api_key, timeout_s=arguments.timeout_s
    )
    shown = 0

    def progress(share: float, client: Client) -> None:
        bar(share, f"{client.num_open} open, {client.num_done - shown} done")

    try:
        shape = Shape(
            model=arguments.model or await client.first_model(),
            api=arguments.api,
            output_tokens=arguments.output_tokens,
            temperature=arguments.temperature,
            ignore_eos=arguments.ignore_eos,
        )
        bodies = await _bodies(arguments, client, shape)
        shown = client.num_done
        common = {"requests": arguments.requests, "seconds": arguments.seconds}
        common["warmup_s"] = arguments.warmup_s if arguments.seconds else 0.0
        if arguments.rate:
            window = await open_loop(
                client,
                bodies,
                rate=arguments.rate,
                seed=arguments.seed,
                pids=pids,
                on_progress=progress,
                **common,
            )
        else:
            window = await closed_loop(
                client,
                bodies,
                concurrency=arguments.concurrency,
                pids=pids,
                on_progress=progress,
                **common,
            )
    finally:
        client.close()
    return _server_case(arguments, url, shape, window)


async def _bodies(arguments: argparse.Namespace, client: Client, shape: Shape) -> Iterator[bytes]:
    if arguments.prompts is not None:
        return from_file(shape, arguments.prompts)
    fit: Fit = await client.fit(shape)
    least = max(1, round(arguments.input_tokens * (1 - arguments.input_spread)))
    most = max(least, round(arguments.input_tokens * (1 + arguments.input_spread)))
    return synthetic(shape, fit, tokens=lambda draw: draw.randint(least, most), seed=arguments.seed)


def _server_case(arguments: argparse.Namespace, url: str, shape: Shape, window: Window) -> Case:
    limits = Limits(arguments.limit_ttft_ms, arguments.limit_tpot_ms, arguments.limit_e2e_ms)
    case: Case = {"url": url, "model": shape.model, "mode": "open" if arguments.rate else "closed"}
    if arguments.rate:
        case["rate"] = arguments.rate
    else:
        case["concurrency"] = arguments.concurrency
    return case | {"limits": limits.as_json} | case_of(window, limits)


# ------------------------------------------------------------ meshes of its own


def run_fake(arguments: argparse.Namespace, bar: Callable[[float, str], None]) -> Case:
    """The path of a token from scheduler to client, and nothing behind it."""
    rows = arguments.concurrency
    with tempfile.TemporaryDirectory(prefix="dm-") as folder:
        config = fake_config(Path(folder) / "run", rows=rows, tracing=arguments.tracing)
        bar(0.0, "starting a mesh")
        with running(config) as mesh:
            case = uvloop.run(drive(arguments, mesh.url, service_pids(mesh), bar))
    used = case["cpu_us_per_token"]
    assert isinstance(used, dict)
    case["services_cpu_us_per_token"] = round(sum(float(str(used[s])) for s in SERVICES), 2)
    return case


def run_mesh(arguments: argparse.Namespace, bar: Callable[[float, str], None]) -> Case:
    """The model through the whole mesh, beside the executor alone, before and behind it."""
    plan = Plan(
        streams=arguments.concurrency,
        prompt_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        waves=arguments.waves,
        steady_s=arguments.seconds or Plan.steady_s,
    )
    if arguments.quick:
        plan = replace(plan, waves=1, firsts=4, long_tokens=300, steady_s=1.0)
    steps = itertools.count()
    total = 2 + 3 + plan.firsts + plan.waves + 3

    def say(words: str) -> None:
        bar(min(1.0, next(steps) / total), words)

    with tempfile.TemporaryDirectory(prefix="dm-") as folder:
        config = model_config(
            Path(folder) / "run",
            arguments.model_folder.resolve(),
            rows=plan.streams,
            prefill_share=arguments.prefill_share,
        )

        def alone() -> Speed:
            say("the executor alone")
            waves = max(1, -(-plan.waves // 2))
            return offline(
                config,
                Path(folder),
                rows=plan.streams,
                prompt=plan.prompt_tokens,
                outputs=plan.output_tokens,
                waves=waves,
                firsts=plan.firsts // 2,
            )

        speeds = [alone()]
        say("starting a mesh")
        with running(config, pin=True) as mesh:
            shape = Shape(config.served_model, arguments.api, ignore_eos=True)
            course = Course(mesh.url, shape, plan, service_pids(mesh), say)
            found = uvloop.run(course.run())
            url = mesh.url
        speeds.append(alone())
    case: Case = {"url": url, "model": shape.model, "mode": "mesh", "concurrency": plan.streams}
    return case | mesh_case(plan, found, speeds)


def targets(arguments: argparse.Namespace, case: Case) -> list[Json]:
    """The limits that were set for meshes of our own, and whether the figures keep them."""
    found: list[Json] = []

    def judge(key: str, limit: float, *, at_most: bool) -> None:
        value = case[key]
        assert isinstance(value, int | float), key
        met = value <= limit if at_most else value >= limit
        bound: dict[str, Json] = {"at_most" if at_most else "at_least": limit}
        found.append({"key": key, "value": value, **bound, "met": met})

    if arguments.fake_executor:
        judge("tokens_per_s", FAKE_TOKENS_PER_S, at_most=False)
        judge("services_cpu_us_per_token", FAKE_CPU_US, at_most=True)
    elif arguments.mesh:
        judge("share_of_offline", MESH_SHARE, at_most=False)
        judge("idle_ttft_over_ms", MESH_TTFT_MS, at_most=True)
        judge("long_itl_rise", MESH_ITL_RISE, at_most=True)
    return found


# ------------------------------------------------------------ command line


def show(case: Case, judged: list[Json]) -> None:
    """A table on stderr."""
    console = Console(stderr=True)
    table = Table("figure", "value")
    for key, value in case.items():
        table.add_row(key, str(value))
    console.print(table)
    for each in judged:
        console.print(each)


def main() -> int:
    """0 unless the benchmark could not run."""
    arguments = arguments_of(__doc__)
    steal = Steal()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as display:
            task = display.add_task("connecting", total=1.0)

            def bar(share: float, words: str) -> None:
                display.update(task, completed=share, description=words)

            if arguments.fake_executor:
                case = run_fake(arguments, bar)
            elif arguments.mesh:
                case = run_mesh(arguments, bar)
            else:
                case = uvloop.run(drive(arguments, arguments.url, arguments.pids, bar))
    except (LoadError, PromptsError, RigError) as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 1
    share = steal.take()
    judged = targets(arguments, case)
    case |= {"steal": round(share, 4), "valid": share <= MAX_STEAL}
    ok = not case.get("errors") and bool(case.get("requests"))
    config: dict[str, Json] = {
        "api": arguments.api,
        "input_tokens": arguments.input_tokens,
        "output_tokens": arguments.output_tokens,
        "ignore_eos": arguments.ignore_eos,
        "seed": arguments.seed,
        "warmup_s": arguments.warmup_s,
        "seconds": arguments.seconds,
        "tracing": arguments.tracing if arguments.fake_executor else True,
        "prefill_share": arguments.prefill_share if arguments.mesh else None,
        "load_average": round(os.getloadavg()[0], 2),
        "targets": judged,
    }
    found = report("bench serve", config=config, cases=[case], ok=ok)
    show(case, judged)
    publish(found, name="serve", as_json=arguments.json, store=not arguments.no_store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
