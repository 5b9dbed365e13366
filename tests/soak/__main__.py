"""`make soak`: a mesh of all services under steady load must not grow and not get slower.

The capacity for a mix of requests is measured first; then so much of it (80 %) is asked for at
random moments, for --minutes. Behind a warm-up, memory, file descriptors, sockets, threads and
mapped files of every process and the latencies of the clients are judged; the exit status is 1,
and the process is named, when one of them is not flat.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from bench.load.cpu import CpuMeter
from deepmesh.report import Json, Steal, publish, report
from tests.soak.judge import Judged, judge, table
from tests.soak.load import Load
from tests.soak.mesh import SoakMesh
from tests.soak.processes import Watch, with_children

LOAD = 0.8  # of the capacity
WARMUP, MOST_WARMUP = 0.2, 0.5  # of the time at that load
WARM_REQUESTS = 12_000  # behind them the rings of spans and steps, and all caches, are full
SAMPLES = 480


def main(argv: list[str]) -> int:
    """Run and print; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0, help="at the steady load")
    options.add_argument("--capacity-s", type=float, default=60.0, help="to measure the capacity")
    options.add_argument("--load", type=float, default=LOAD, help="share of the capacity")
    options.add_argument("--warm-requests", type=int, default=WARM_REQUESTS)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--kind", choices=("model", "fake"), default="model")
    options.add_argument("--watch", action="append", default=[], metavar="NAME=PID")
    options.add_argument("--samples", type=Path, metavar="FILE", help="of all processes, as JSON")
    options.add_argument("--folder", type=Path, help="keep logs and run folder there")
    options.add_argument("--json", action="store_true")
    given = options.parse_args(argv)
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        judged, found = run(given.folder.resolve(), given)
    else:
        with tempfile.TemporaryDirectory(prefix="dm-soak-") as folder:
            judged, found = run(Path(folder), given)
    print(table(judged), file=sys.stderr, flush=True)
    publish(found, name="soak", as_json=given.json)
    for problem in judged.problems:
        print(problem, file=sys.stderr)
    return 0 if judged.ok else 1


def run(folder: Path, given: argparse.Namespace) -> tuple[Judged, dict[str, Json]]:
    """The whole of it."""
    more = {name: int(pid) for name, _, pid in (each.partition("=") for each in given.watch)}
    with SoakMesh(folder, given.kind) as mesh:
        begun = mesh.pids
        judged = asyncio.run(soak(mesh, given, more))
        judged.restarts(begun, mesh.pids, mesh.restarts())
        judged.left(mesh.left())
    config: dict[str, Json] = {
        "minutes": given.minutes,
        "load": given.load,
        "seed": given.seed,
        "kind": given.kind,
    }
    return judged, report("make soak", config=config, cases=judged.cases, ok=judged.ok)


async def soak(mesh: SoakMesh, given: argparse.Namespace, more: dict[str, int]) -> Judged:
    """Load and samples."""
    seconds = given.minutes * 60
    model = mesh.config.served_model
    async with Load(mesh.url, model, given.seed) as load:
        say("capacity", 0, given.capacity_s, load)
        capacity = await load.capacity(given.capacity_s)
        rate = given.load * capacity
        shared = mesh.config.shared_dir
        assert shared is not None
        watch = Watch(with_children(mesh.pids) | {"redis": mesh.redis_pid} | more, shared)
        begin_s = time.perf_counter()
        sampler = asyncio.create_task(sample(watch, load, begin_s, seconds, given.warm_requests))
        steal, meter = Steal(), CpuMeter({n: s.pid for n, s in watch.series.items()})
        refused = sum(load.errors.values())
        await load.steady(rate, seconds, sampler.done)
        cpu_s, stolen = meter.take(), steal.take()
        from_s = await sampler
        if given.samples is not None:
            await asyncio.to_thread(given.samples.write_text, json.dumps(samples_of(watch)))
        return judge(
            watch,
            load,
            from_s=from_s,
            rate=rate,
            capacity=capacity,
            refused=sum(load.errors.values()) - refused,
            cpu_s=cpu_s,
            stolen=stolen,
            seconds=seconds,
        )


async def sample(
    watch: Watch, load: Load, begin_s: float, seconds: float, warm_requests: int
) -> float:
    """Look at all processes until the time is over, behind the warm-up; returns when that was over:
    a fifth of the time at least, so many requests, half of the time at most."""
    pause_s, from_s = max(0.1, seconds / SAMPLES), 0.0
    while (now := time.perf_counter()) < begin_s + seconds:
        share = (now - begin_s) / seconds
        has_asked = sum(load.done.values()) >= warm_requests or share >= MOST_WARMUP
        if not from_s and share >= WARMUP and has_asked:
            from_s = now
        if from_s:
            await asyncio.to_thread(watch.take, now)
        say("measured" if from_s else "warm-up", now - begin_s, seconds, load)
        await asyncio.sleep(pause_s)
    return from_s


def say(phase: str, now_s: float, seconds: float, load: Load) -> None:
    """The progress line."""
    done, bad = sum(load.done.values()), sum(load.errors.values())
    words = f"{phase} {now_s:5.0f} of {seconds:.0f} s  {done} done  {load.num_open} open  {bad} bad"
    end = "\r" if sys.stderr.isatty() else "\n"
    print(words.ljust(78), end=end, file=sys.stderr, flush=True)


def samples_of(watch: Watch) -> dict[str, Json]:
    """For a plot."""
    return {
        name: {
            "times_s": [*series.times_s],
            "uss_bytes": [*series.uss_bytes],
            "pss_bytes": [*series.pss_bytes],
            **{what: [*values] for what, values in series.counts.items()},
        }
        for name, series in watch.series.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
