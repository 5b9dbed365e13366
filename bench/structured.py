"""What structured output costs: throughput under grammars, and 64 new schemas at once.

Starts a mesh with the model that ships. `throughput`: 32 streams of equally many tokens, in turns
without and with grammars. `burst`: while 32 streams of plain text run, 64 requests arrive at once,
in turns without and with schemas that nobody has seen before; what that does to the times between
tokens of the 32, and how many rows sat out a step for want of a mask.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench.load.drive import Client, closed_loop
from bench.load.figures import Window
from bench.load.http import Answer
from bench.load.pinned import MODEL, RigError, model_config, running, service_pids
from deepmesh.config import SchedulerConfig
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from deepmesh.supervisor import Mesh

Case = dict[str, Json]
MIN_RATIO, MAX_NULL_SHARE, MAX_ITL_RISE = 0.85, 0.05, 0.2
METRICS_S = 10.0  # until metrics count what has ended
ITEMS = (
    {"type": "string", "maxLength": 12},
    {"type": "integer", "minimum": -500, "maximum": 500},
    {"type": "string", "pattern": "^[a-z]{3,9}$"},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "number"}}},
    {"enum": ["red", "green", "blue", 7, None]},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    {"type": "string", "minLength": 2, "maxLength": 30},
)


def _body(model: str, number: int, tokens: int, more: dict[str, Json]) -> bytes:
    plain: dict[str, Json] = {
        "model": model,
        "prompt": f"List {number}:",
        "max_tokens": tokens,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(plain | more)


def _long_list(number: int) -> dict[str, Json]:
    """A schema whose texts are far longer than what is generated."""
    item: Json = ITEMS[number % len(ITEMS)]  # type: ignore[assignment]  # a dict of Json
    return {"guided_json": {"type": "array", "items": item, "minItems": 2000}}


def _bodies(model: str, tokens: int, *, grammar: bool) -> Iterator[bytes]:
    for number in itertools.count():
        more = _long_list(number) if grammar else {"ignore_eos": True}
        yield _body(model, number, tokens, more)


def _new_schema(number: int) -> dict[str, Json]:
    names = [f"field_{number}_{i}" for i in range(6)]
    properties: dict[str, Json] = {
        name: {"type": "string", "maxLength": 8 + number % 7}
        if i % 2
        else {"type": "integer", "minimum": number}
        for i, name in enumerate(names)
    }
    schema: Json = {"type": "object", "properties": properties, "required": list[Json](names)}
    return {"guided_json": schema}


# ------------------------------------------------------------ throughput


async def throughput(mesh: Mesh, model: str, options: argparse.Namespace) -> Case:
    """Interleaved runs without and with grammars."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    windows: dict[bool, list[Window]] = {False: [], True: []}
    errors = 0
    client = Client(mesh.url, api="completions")
    pids = service_pids(mesh) | {"masks": _mask_worker(mesh)}
    for grammar in [False, True] * options.repeats:
        window = await closed_loop(
            client,
            _bodies(model, options.tokens, grammar=grammar),
            concurrency=options.streams,
            seconds=options.seconds,
            warmup_s=options.warmup_s,
            pids=pids,
        )
        rates[grammar].append(window.tokens / window.seconds)
        windows[grammar].append(window)
        errors += sum(bool(answer.error) for answer in window.answers)
    client.close()
    off, on = (statistics.median(rates[grammar]) for grammar in (False, True))
    return {
        "case": "throughput",
        "streams": options.streams,
        "tokens_per_s_off": off,
        "tokens_per_s_on": on,
        "ratio_to_off": on / off,
        "cpu_us_per_token_off": _cpu_us_per_token(windows[False]),
        "cpu_us_per_token_on": _cpu_us_per_token(windows[True]),
        "errors": errors,
        "samples_off": list[Json](rates[False]),
        "samples_on": list[Json](rates[True]),
        "ok": on / off >= MIN_RATIO and not errors,
    }


def _mask_worker(mesh: Mesh) -> int:
    """Its process; a child of the executor."""
    tasks = Path(f"/proc/{mesh.pids['executor-0-0']}/task")
    children = [int(pid) for file in tasks.glob("*/children") for pid in file.read_text().split()]
    for pid in children:
        if b"services.executor.masks" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise RigError("the executor has no mask worker")


def _cpu_us_per_token(windows: Sequence[Window]) -> dict[str, Json]:
    """By process."""
    tokens = max(1, sum(window.tokens for window in windows))
    names = windows[0].cpu_s
    return {n: round(1e6 * sum(w.cpu_s[n] for w in windows) / tokens, 1) for n in names}


# ------------------------------------------------------------ burst


async def burst(url: str, model: str, options: argparse.Namespace) -> Case:
    """Interleaved bursts without and with schemas, each time new ones."""
    client = Client(url, api="completions")
    numbers = itertools.count(1_000)
    p99: dict[bool, list[float]] = {False: [], True: []}
    null = rows = errors = whole = 0
    after = await _metrics(url)
    for grammar in [False, True] * options.repeats:
        before = after
        background, arrived, answers = await _one_burst(client, model, numbers, options, grammar)
        after = await _ended(url, before, len(background) + len(answers))
        gaps = np.concatenate([np.diff(answer.times) for answer in background])
        ends = np.concatenate([np.array(answer.times[1:]) for answer in background])
        last = max(answer.end_s for answer in answers)
        p99[grammar].append(float(np.quantile(gaps[(ends >= arrived) & (ends <= last)], 0.99)))
        errors += sum(bool(answer.error) for answer in (*answers, *background))
        if grammar:
            null += round(after["null_rows"] - before["null_rows"])
            rows += sum(answer.num_tokens for answer in answers)
            whole += sum(answer.num_tokens < options.tokens for answer in answers)
    client.close()
    off, on = (1e3 * statistics.median(p99[grammar]) for grammar in (False, True))
    share = null / max(1, null + rows)
    return {
        "case": "burst",
        "streams": options.streams,
        "new_schemas": options.burst,
        "itl_ms_p99_off": off,
        "itl_ms_p99_on": on,
        "itl_p99_rise": on / off - 1,
        "null_rows": null,
        "masked_rows": null + rows,
        "null_share": share,
        "whole": whole,
        "errors": errors,
        "ok": share < MAX_NULL_SHARE and on / off - 1 <= MAX_ITL_RISE and not errors,
    }


async def _one_burst(
    client: Client,
    model: str,
    numbers: Iterator[int],
    options: argparse.Namespace,
    grammar: bool,
) -> tuple[list[Answer], float, list[Answer]]:
    """Answers of the streams, when the burst came, and its answers."""
    free: dict[str, Json] = {"ignore_eos": True}
    background = [Answer(time.perf_counter()) for _ in range(options.streams)]
    long = [
        asyncio.create_task(client.ask(_body(model, next(numbers), options.background, free), a))
        for a in background
    ]
    while any(len(answer.times) < 20 for answer in background):
        await asyncio.sleep(0.02)
        if all(task.done() for task in long):
            break
    arrived = time.perf_counter()
    answers = [Answer(arrived) for _ in range(options.burst)]
    bodies = [
        _body(model, n, options.tokens, _new_schema(n) if grammar else free)
        for n in itertools.islice(numbers, options.burst)
    ]
    await asyncio.gather(*map(client.ask, bodies, answers))
    await asyncio.gather(*long)
    return background, arrived, answers


async def _ended(url: str, before: dict[str, float], count: int) -> dict[str, float]:
    """Metrics that count the ends of so many requests: they lag behind answers.

    Raises RigError after METRICS_S.
    """
    deadline = time.monotonic() + METRICS_S
    while time.monotonic() < deadline:
        found = await _metrics(url)
        ends = (found[name] - before[name] for name in ("replica_finished", "replica_failed"))
        if sum(ends) >= count:
            return found
        await asyncio.sleep(0.05)
    raise RigError(f"{url}/metrics does not count {count} ends within {METRICS_S:g} s")


async def _metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics", timeout=10)).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("deepmesh_").removesuffix("_total")
            found[name] = found.get(name, 0.0) + sample.value
    return found


# ------------------------------------------------------------ the command


def main() -> int:
    """Measure and report; 0 unless it could not run."""
    parser = argparse.ArgumentParser(prog="deepmesh bench structured", description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--burst", type=int, default=64, help="requests that arrive at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer at most")
    parser.add_argument("--background", type=int, default=400, help="tokens of each of the streams")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--warmup-s", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console, steal = Console(stderr=True), Steal()
    with tempfile.TemporaryDirectory(prefix="dm") as folder:
        rows = options.streams + options.burst
        share = SchedulerConfig().prefill_share
        config = model_config(Path(folder), MODEL, rows=rows, prefill_share=share)
        try:
            with running(config) as mesh, console.status("structured output"):
                model = config.served_model
                cases = [  # the burst counts what a fresh mesh tells
                    asyncio.run(burst(mesh.url, model, options)),
                    asyncio.run(throughput(mesh, model, options)),
                ]
        except RigError as error:
            print(f"deepmesh bench structured: {error}", file=sys.stderr)
            return 1
    stolen = steal.take()
    for case in cases:
        case["steal"], case["valid"] = stolen, stolen <= MAX_STEAL
        table = Table("", str(case["case"]), title_justify="left")
        for key, value in case.items():
            if not isinstance(value, list):
                table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
        console.print(table)
    found = report(
        "bench structured",
        config={key: value for key, value in vars(options).items() if key != "json"},
        cases=cases,
        ok=all(bool(case["ok"]) for case in cases),
    )
    publish(found, name="structured", as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
