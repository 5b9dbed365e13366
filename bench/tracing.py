"""What tracing costs: CPU of all services for a request and for a token, by the share sampled.

`deepmesh bench tracing`: two meshes with an executor that answers at once, one with tracing off and
one that exports to a collector in another process, serve the same streams in turns. Which requests
are sampled is said by the client's traceparent, so all shares run in the same processes. Short and
long answers in turns tell apart what a request costs and what a token does.

What a sampled request costs more than an unsampled one is a small part of it, so that is measured
by pairs: slices of requests, sampled and not, in the order ABBA, each until its spans are with the
collector. The mean of many pairs comes with its standard error.
"""

import argparse
import asyncio
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench.load.drive import Client
from bench.load.http import Answer
from bench.load.pinned import fake_config, running
from bench.load.workload import Fit, Shape, synthetic
from bench.rig.collector import collector
from deepmesh import telemetry
from deepmesh.config import Config, MeshConfig
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from deepmesh.telemetry import Value
from deepmesh.trace_context import new_traceparent

SETTLE_S = 1.4  # a batch of spans leaves a second after its first
SHARES = (0.0, 0.01, 0.1, 1.0)
OFF = -1.0  # a mesh without tracing
OUTPUTS = (4, 68)  # tokens of a short and of a long answer
PROMPT_TOKENS = 40
MAX_REQUEST_US = 150.0  # a sampled request may cost more than an unsampled one

Case = dict[str, Json]
Samples = dict[float, dict[int, list[float]]]  # us a request, by share and tokens


class TracedClient(Client):
    """Says with each request whether it is sampled."""

    share = 1.0
    _draw = random.Random(5)

    def _request(self, method: str, path: str, body: bytes, more: str = "") -> bytes:
        traceparent = new_traceparent(self._draw.random() < self.share)
        return super()._request(method, path, body, f"{more}traceparent: {traceparent}\r\n")


class Mesh:
    """One that runs, with a client and the bodies for both lengths."""

    def __init__(self, url: str, pids: Mapping[str, int]) -> None:
        self.client, self.pids = TracedClient(url, api="chat"), dict(pids)

    async def prepare(self, seed: int) -> None:
        """Find out what the server calls its model."""
        model = await self.client.first_model()
        shapes = [Shape(model=model, output_tokens=n, ignore_eos=True) for n in OUTPUTS]
        fit: Fit = await self.client.fit(shapes[0])
        self.bodies = {
            shape.output_tokens: synthetic(shape, fit, tokens=lambda draw: PROMPT_TOKENS, seed=seed)
            for shape in shapes
        }

    async def slice(
        self, share: float, tokens: int, *, requests: int, streams: int, settle_s: float = SETTLE_S
    ) -> float:
        """CPU of all services for that many requests, us each, with the export of their spans."""
        self.client.share = max(0.0, share)
        before, left = self.cpu_ns(), itertools.count()

        async def stream() -> None:
            while next(left) < requests:
                answer = Answer(time.perf_counter())
                await self.client.ask(next(self.bodies[tokens]), answer)
                if answer.error or answer.num_tokens != tokens:
                    raise RuntimeError(answer.error or f"{answer.num_tokens} of {tokens} tokens")

        await asyncio.gather(*(stream() for _ in range(streams)))
        await asyncio.sleep(settle_s)  # exporters' threads are not done yet
        return (self.cpu_ns() - before) / 1e3 / requests

    def cpu_ns(self) -> int:
        """Of all threads of all processes so far."""
        return sum(_cpu_ns(pid) for pid in self.pids.values())


def _cpu_ns(pid: int) -> int:
    """Time on a CPU as the scheduler of the kernel counts it, to the nanosecond."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except OSError:
            continue  # it has ended
    return total


def measure(arguments: argparse.Namespace, console: Console) -> list[Case]:
    """All shares in turns, short and long answers each."""
    with ExitStack() as stack:
        url = stack.enter_context(collector())
        stack.enter_context(_exporting_to(url))
        meshes: list[Mesh] = []
        for is_on in (False, True):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dm-"))
            config = fake_config(Path(folder) / "run", rows=arguments.streams, tracing=is_on)
            mesh = stack.enter_context(running(config))
            meshes.append(Mesh(mesh.url, mesh.pids))
        samples, pairs = uvloop.run(_all(arguments, meshes, url, console))
    cases = [case_of(share, samples[share], samples) for share in (OFF, *SHARES)]
    return [*cases, span_case(), pairs]


@contextmanager
def _exporting_to(url: str) -> Iterator[None]:
    """The processes of a mesh inherit our environment."""
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
    try:
        yield
    finally:
        del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]


async def _all(
    arguments: argparse.Namespace, meshes: list[Mesh], url: str, console: Console
) -> tuple[Samples, Case]:
    samples = await _rounds(arguments, meshes, console)
    pairs = await _pairs(arguments, meshes[1], url, console)
    for mesh in meshes:
        mesh.client.close()
    return samples, pairs


async def _pairs(arguments: argparse.Namespace, mesh: Mesh, url: str, console: Console) -> Case:
    """What a sampled request costs more, and how sure that is."""
    requests, streams = arguments.requests, arguments.streams
    spans = [await _spans(mesh, url, tokens, streams) for tokens in OUTPUTS]
    more: list[float] = []
    for number in range(arguments.pairs):
        if number % 10 == 0:
            console.print(f"pair {number + 1} of {arguments.pairs}", style="dim")
        used: dict[float, float] = {}
        for share in (0.0, 1.0) if number % 2 else (1.0, 0.0):
            used[share] = await mesh.slice(share, OUTPUTS[0], requests=requests, streams=streams)
        more.append(used[1.0] - used[0.0])
    kept = sorted(more)[len(more) // 10 : len(more) - len(more) // 10]  # others on the machine
    return {
        "sampling": "pairs",
        "pairs_us": [round(value, 1) for value in more],
        "more_us_per_sampled_request": round(statistics.fmean(kept), 1),
        "standard_error_us": round(statistics.stdev(kept) / math.sqrt(len(kept)), 1),
        "spans_per_request": spans[0],
        "spans_per_long_request": spans[1],
    }


async def _spans(mesh: Mesh, url: str, tokens: int, streams: int) -> float:
    """Spans that the collector gets of a request with so many tokens."""
    await asyncio.sleep(SETTLE_S)
    before = num_collected(url)
    await mesh.slice(1.0, tokens, requests=10 * streams, streams=streams)
    return round((num_collected(url) - before) / (10 * streams), 2)


def num_collected(url: str) -> int:
    """Spans that the collector has got so far."""
    return int(httpx.get(url, trust_env=False).text)


async def _rounds(arguments: argparse.Namespace, meshes: list[Mesh], console: Console) -> Samples:
    found: Samples = {share: {n: [] for n in OUTPUTS} for share in (OFF, *SHARES)}
    for mesh in meshes:
        await mesh.prepare(arguments.seed)
        for tokens in OUTPUTS:  # caches, first uses
            await mesh.slice(1.0, tokens, requests=40, streams=arguments.streams)
    turns = [(share, n) for share in (OFF, *SHARES) for n in OUTPUTS]
    draw = random.Random(arguments.seed)
    for number in range(arguments.rounds):
        console.print(f"round {number + 1} of {arguments.rounds}", style="dim")
        for share, tokens in draw.sample(turns, len(turns)):
            mesh = meshes[0] if share == OFF else meshes[1]
            requests = max(arguments.streams, arguments.requests // (4 if tokens > 9 else 1))
            used = await mesh.slice(share, tokens, requests=requests, streams=arguments.streams)
            found[share][tokens].append(used)
    return found


def case_of(share: float, mine: dict[int, list[float]], samples: Samples) -> Case:
    """Medians over the rounds; what a token costs is the slope from short answers to long ones."""
    short, long = OUTPUTS
    unsampled = samples[0.0]
    token_us = _token_us(mine)
    request_us = statistics.median(mine[short]) - short * token_us
    extra = [a - b for n in OUTPUTS for a, b in zip(mine[n], unsampled[n], strict=True)]
    case: Case = {
        "sampling": "off" if share == OFF else share,
        "cpu_us_per_request": round(request_us, 1),
        "cpu_us_per_token": round(token_us, 2),
        "short_us": [round(value, 1) for value in mine[short]],
        "long_us": [round(value, 1) for value in mine[long]],
        "ratio_to_off": round(statistics.median(mine[long]) / _median(samples[OFF][long]), 4),
    }
    if share > 0:
        more_us = statistics.median(extra) / share
        case["more_us_per_sampled_request"] = round(more_us, 1)
        case["more_us_per_token"] = round(token_us - _token_us(unsampled), 3)
    return case


def span_case(num_spans: int = 20_000, rounds: int = 5) -> Case:
    """From below: CPU of one span in one process, its file's thread included."""
    found: Case = {"sampling": "one span"}
    attributes: dict[str, Value] = {"message": "Generate", "from": "tokenizer-0", "tokens": 12}
    with tempfile.TemporaryDirectory(prefix="dm-") as folder:
        config = Config(mesh=MeshConfig(run_dir=folder))
        for name, sampled in (("sampled", True), ("unsampled", False)):
            times, parent = list[float](), ""
            for _ in range(rounds):
                tracer = telemetry.setup("gateway", "gateway-0", config)
                began = time.process_time()
                for number in range(num_spans):
                    if number % 20 == 0:
                        parent = new_traceparent(sampled)
                        tracer.flush()
                    tracer.record("hop", parent, number, number + 1, attributes)
                tracer.shutdown()
                times.append((time.process_time() - began) / num_spans * 1e6)
            found[f"us_per_span_{name}"] = round(statistics.median(times), 2)
    return found


def _token_us(mine: dict[int, list[float]]) -> float:
    short, long = OUTPUTS
    return (_median(mine[long]) - _median(mine[short])) / (long - short)


def _median(values: list[float]) -> float:
    return float(np.median(values))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="deepmesh bench tracing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of all shares")
    parser.add_argument("--pairs", type=int, default=40, help="of sampled and unsampled slices")
    parser.add_argument("--requests", type=int, default=1280, help="short ones of a slice")
    parser.add_argument("--streams", type=int, default=64, help="at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    console, steal = Console(stderr=True, highlight=False), Steal()
    cases = measure(arguments, console)
    stolen, pairs = steal.take(), cases[-1]
    config: dict[str, Json] = {
        "rounds": arguments.rounds,
        "pairs": arguments.pairs,
        "requests": arguments.requests,
        "streams": arguments.streams,
        "output_tokens": list(OUTPUTS),
        "steal": round(stolen, 4),
        "valid": stolen <= MAX_STEAL,
        "load": round(os.getloadavg()[0], 2),
        "max_us_per_sampled_request": MAX_REQUEST_US,
    }
    more = pairs["more_us_per_sampled_request"]
    assert isinstance(more, float)
    # A span more for some: one that names a step which others have named, too, is sent once.
    is_flat = (
        float(str(pairs["spans_per_long_request"])) <= float(str(pairs["spans_per_request"])) + 2
    )
    ok = more <= MAX_REQUEST_US and is_flat
    console.print(table(cases))
    publish(
        report("bench tracing", config=config, cases=cases, ok=ok),
        name="tracing",
        as_json=arguments.json,
    )
    return 0


def table(cases: list[Case]) -> Table:
    """For people."""
    shown = Table("sampled", "us a request", "us a token", "more a sampled one", "more a token")
    for case in cases:
        if "cpu_us_per_request" not in case:
            continue
        keys = ("sampling", "cpu_us_per_request", "cpu_us_per_token")
        more = ("more_us_per_sampled_request", "more_us_per_token")
        shown.add_row(*(str(case[key]) for key in keys), *(str(case.get(key, "-")) for key in more))
    span, pairs = cases[-2:]
    shown.caption = (
        f"a sampled request costs {pairs['more_us_per_sampled_request']} us more "
        f"(standard error {pairs['standard_error_us']}) with {pairs['spans_per_request']} spans, "
        f"a long one {pairs['spans_per_long_request']}; one span in a file: "
        f"{span['us_per_span_sampled']} us, unsampled {span['us_per_span_unsampled']}"
    )
    return shown


if __name__ == "__main__":
    sys.exit(main())
