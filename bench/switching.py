"""What long prompts cost the streams of a group that steps together, with and without alignment.

`deepmesh bench switching --json`: a mesh with --ranks executors for each --mode: "none" prefills in
whole chunks as prompts come; "hold" lets a lone prefill wait a step for prefill of other ranks;
"paced", the default of the scheduler, bounds the prefill of all ranks together by time. Streams
decode on all ranks; long prompts arrive one by one at the same drawn moments for all. Meshes take
turns; gaps of all rounds count together. `p99_lower_by` compares with "none".
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import uvloop

from bench.checkpoints import add_options, open_checkpoint
from bench.load.drive import Client, LoadError
from bench.load.figures import gaps_ms, percentile, ttft_ms
from bench.load.http import Answer
from bench.load.pinned import model_config, running
from bench.load.workload import Fit, Shape, synthetic
from bench.tables import CONSOLE, show
from deepmesh.config import Config
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report

SETTLE_EVENTS = 8  # of every stream, before anything is measured
START_S, LONG_S = 120.0, 300.0
STALL = 2.0  # a gap of so many times the streams' own median is a stall
MODES = {"none": (0, 1.0), "hold": (1, 1.0), "paced": (1, 0.1)}  # hold_steps, prefill_share
COLUMNS = ("mode", "itl_ms_p50", "itl_ms_p90", "itl_ms_p99", "itl_ms_max", "stall_share")
COLUMNS += ("steady_itl_ms_p50", "long_ttft_ms_p50", "long_ttft_ms_p99", "p99_lower_by")


@dataclass(frozen=True)
class Load:
    """Who decodes, and what arrives meanwhile."""

    streams: int
    prompts: int
    prompt_tokens: int
    gap_s: float  # between long prompts, on average
    seed: int

    def moments(self) -> list[float]:
        """Seconds from the start at which long prompts arrive."""
        rng, now = random.Random(self.seed), 0.0
        return [now := now + rng.expovariate(1 / self.gap_s) for _ in range(self.prompts)]


@dataclass
class Found:
    """Of one mode, ms."""

    steady: list[float] = field(default_factory=list[float])
    busy: list[float] = field(default_factory=list[float])
    long_ttft: list[float] = field(default_factory=list[float])

    def case(self, mode: str) -> dict[str, Json]:
        """Its figures."""
        hold_steps, prefill_share = MODES[mode]
        steady = percentile(self.steady, 50)
        stalls = sum(gap > STALL * (steady or 0.0) for gap in self.busy)
        return {
            "mode": mode,
            "hold_steps": hold_steps,
            "prefill_share": prefill_share,
            "itl_ms_p50": percentile(self.busy, 50),
            "itl_ms_p90": percentile(self.busy, 90),
            "itl_ms_p99": percentile(self.busy, 99),
            "itl_ms_max": percentile(self.busy, 100),
            "stall_share": round(stalls / max(1, len(self.busy)), 4),
            "steady_itl_ms_p50": steady,
            "steady_itl_ms_p99": percentile(self.steady, 99),
            "long_ttft_ms_p50": percentile(self.long_ttft, 50),
            "long_ttft_ms_p99": percentile(self.long_ttft, 99),
            "gaps": len(self.busy),
        }


async def measure(url: str, model: str, load: Load, found: Found, steady_s: float) -> None:
    """One mesh: streams alone, then with long prompts.

    Raises:
        LoadError: a request failed, or no token came in time.
    """
    shape = Shape(model, output_tokens=4000, ignore_eos=True)
    client = Client(url, api=shape.api)
    tasks: list[asyncio.Task[Answer]] = []
    try:
        fit = await client.fit(shape)
        bodies = synthetic(shape, fit, tokens=lambda _: 32, seed=load.seed)
        answers = [Answer(time.perf_counter()) for _ in range(load.streams)]
        tasks = [asyncio.create_task(client.ask(next(bodies), answer)) for answer in answers]
        async with asyncio.timeout(START_S):
            while not all(len(a.times) >= SETTLE_EVENTS for a in answers):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        start_s = time.perf_counter()
        await asyncio.sleep(steady_s)
        found.steady += gaps_ms(answers, start_s, time.perf_counter()).tolist()
        start_s, longs = time.perf_counter(), await _long_prompts(client, shape, fit, load)
        end_s = max(answer.times[-1] for answer in longs)
        found.busy += gaps_ms(answers, start_s, end_s).tolist()
        found.long_ttft += [ttft_ms(answer) for answer in longs]
        if any(task.done() for task in tasks):
            raise LoadError("a stream ended before the measurement did")
    except TimeoutError as error:
        raise LoadError("long prompts or streams got no token in time") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()


async def _long_prompts(client: Client, shape: Shape, fit: Fit, load: Load) -> list[Answer]:
    one = replace(shape, output_tokens=1)
    bodies = synthetic(one, fit, tokens=lambda _: load.prompt_tokens, seed=load.seed + 1)
    start_s = time.perf_counter()

    async def ask(moment: float) -> Answer:
        await asyncio.sleep(max(0.0, start_s + moment - time.perf_counter()))
        answer = await client.ask(next(bodies), Answer(start_s + moment))
        if answer.error or not answer.times:
            raise LoadError(f"a long prompt failed: {answer.error or 'no token came'}")
        return answer

    async with asyncio.timeout(LONG_S):
        return list(await asyncio.gather(*(ask(moment) for moment in load.moments())))


def config_of(folder: Path, model: Path, arguments: argparse.Namespace, mode: str) -> Config:
    """A mesh with that many executors, one compute thread each."""
    hold, share = MODES[mode]
    config = model_config(folder, model, rows=arguments.streams, prefill_share=share)
    scheduler = msgspec.structs.replace(
        config.scheduler, hold_steps=hold, chunk_tokens=arguments.chunk
    )
    executor = msgspec.structs.replace(config.executor, ranks=arguments.ranks)
    return msgspec.structs.replace(config, scheduler=scheduler, executor=executor)


def run(arguments: argparse.Namespace, model: Path) -> list[dict[str, Json]]:
    """All meshes in turns."""
    load = Load(
        arguments.streams, arguments.prompts, arguments.tokens, arguments.gap, arguments.seed
    )
    found = {mode: Found() for mode in arguments.mode}
    for number in range(arguments.rounds):
        for mode in arguments.mode:
            CONSOLE.print(f"round {number + 1} of {arguments.rounds}, {mode}")
            with tempfile.TemporaryDirectory(prefix="dm-") as folder:
                config = config_of(Path(folder) / "run", model, arguments, mode)
                with running(config) as mesh:
                    part = replace(load, seed=load.seed + number)
                    name, seconds = config.served_model, arguments.seconds
                    uvloop.run(measure(mesh.url, name, part, found[mode], seconds))
    cases = [figures.case(mode) for mode, figures in found.items()]
    without = next((case for case in cases if case["mode"] == "none"), None)
    for case in cases:
        p99, base = case["itl_ms_p99"], without and without["itl_ms_p99"]
        is_known = isinstance(p99, float) and isinstance(base, float) and base > 0
        case["p99_lower_by"] = round(1 - p99 / base, 4) if is_known else None  # type: ignore[operator]
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="deepmesh bench switching", description=__doc__)
    add_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mode", choices=list(MODES), nargs="+", default=list(MODES))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=12, help="long ones of a round")
    parser.add_argument("--tokens", type=int, default=1500, help="of a long prompt")
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between long prompts")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0, help="of streams alone, a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args(arguments)
    checkpoint, steal = open_checkpoint(parsed), Steal()
    try:
        cases = run(parsed, checkpoint.folder.resolve())
    except LoadError as error:
        print(f"bench switching: {error}", file=sys.stderr)
        return 1
    share = steal.take()
    show("streams while long prompts arrive", COLUMNS, cases)
    config: dict[str, Json] = {
        "model": checkpoint.name,
        **{
            key: getattr(parsed, key)
            for key in ("ranks", "streams", "prompts", "tokens", "gap", "chunk", "rounds", "seed")
        },
        "steal": round(share, 4),
        "valid": share <= MAX_STEAL,
    }
    publish(
        report("bench switching", config=config, cases=cases, ok=True),
        name="switching",
        as_json=parsed.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
