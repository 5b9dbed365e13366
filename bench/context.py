"""First token of a long prompt on an idle group: computed by its own rank, or by all together.

`deepmesh bench context --json`: two meshes of --ranks executors with one compute thread each, one
with `scheduler.context_parallel_tokens` 0 and one with --part. Prompts of --tokens take turns
between them, one at a time; `ttft_ratio` is the median time together by that alone. `work` is the
counted multiply-adds of each part, as a share of the least, in the layers that all of a prompt runs
through, over the chunks of such a prompt.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from bench.checkpoints import add_options, open_checkpoint
from bench.load.drive import Client, LoadError
from bench.load.figures import percentile, ttft_ms
from bench.load.http import Answer
from bench.load.pinned import model_config, running
from bench.load.workload import Shape, synthetic
from bench.tables import CONSOLE, show
from deepmesh.config import Config
from deepmesh.context_cut import cut
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from services.executor.context_parallel import prompt_work, token_work
from services.executor.model_config import ModelConfig

PROMPT_S = 120.0
MODES = ("alone", "together")
COLUMNS = ("mode", "ttft_ms_p50", "ttft_ms_min", "ttft_ms_max", "ttft_ratio")


def config_of(folder: Path, model: Path, arguments: argparse.Namespace, mode: str) -> Config:
    """A mesh with that many executors, one compute thread each."""
    config = model_config(folder, model, rows=4, prefill_share=0.1)
    scheduler = msgspec.structs.replace(
        config.scheduler,
        chunk_tokens=arguments.chunk,
        step_tokens=max(arguments.chunk, config.scheduler.step_tokens),
        context_parallel_tokens=arguments.part if mode == "together" else 0,
    )
    executor = msgspec.structs.replace(config.executor, ranks=arguments.ranks)
    mesh = msgspec.structs.replace(config.mesh, name=mode)
    return msgspec.structs.replace(config, mesh=mesh, scheduler=scheduler, executor=executor)


def work_shares(model: ModelConfig, tokens: int, chunk: int, ranks: int) -> list[float]:
    """Counted work of each part's place over all whole chunks of a prompt, by the least of them."""
    told, sums = prompt_work(model), np.zeros(ranks)
    for start in range(0, tokens - chunk * ranks + 1, chunk * ranks):
        positions = np.arange(start, start + chunk * ranks)
        guessed = np.interp(positions, told.positions, told.work)
        bounds = cut(guessed, start, ranks, least=model.sliding_window, align=told.align)
        work = token_work(model, start, bounds[-1]).encoder
        sums += [int(work[a - start : b - start].sum()) for a, b in pairwise(bounds)]
    return (sums / sums.min()).round(4).tolist()


async def measure(
    urls: dict[str, str], model: str, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Milliseconds to each prompt's first token by mode.

    Raises:
        LoadError: a request failed, or no token came in time.
    """
    shape = Shape(model, output_tokens=4, ignore_eos=True)
    clients = {mode: Client(url, api=shape.api) for mode, url in urls.items()}
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    try:
        fit = await clients["alone"].fit(shape)
        bodies = synthetic(shape, fit, tokens=lambda _: arguments.tokens, seed=arguments.seed)
        for number in range(1 + arguments.prompts):  # the first one warms up
            body = next(bodies)
            for mode in MODES if number % 2 else MODES[::-1]:
                answer = Answer(time.perf_counter())
                async with asyncio.timeout(PROMPT_S):
                    await clients[mode].ask(body, answer)
                if answer.error or not answer.times:
                    raise LoadError(f"a prompt failed: {answer.error or 'no token came'}")
                found[mode] += [ttft_ms(answer)] * bool(number)
    except TimeoutError as error:
        raise LoadError("a prompt got no token in time") from error
    finally:
        for client in clients.values():
            client.close()
    return found


def run(arguments: argparse.Namespace, model: Path) -> list[dict[str, Json]]:
    """Both meshes at once, one of them idle at any time."""
    name = ""
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for mode in MODES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dm-")))
            config = config_of(folder / "run", model, arguments, mode)
            urls[mode] = stack.enter_context(running(config)).url
            name = config.served_model
        CONSOLE.print(f"{arguments.prompts} prompts of {arguments.tokens} tokens")
        found = uvloop.run(measure(urls, name, arguments))
    alone = percentile(found["alone"], 50)
    return [
        {
            "mode": mode,
            "ttft_ms_p50": (median := percentile(times, 50)),
            "ttft_ms_min": percentile(times, 0),
            "ttft_ms_max": percentile(times, 100),
            "ttft_ratio": round(median / alone, 4) if median and alone else None,
        }
        for mode, times in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="deepmesh bench context", description=__doc__)
    add_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt")
    parser.add_argument("--chunk", type=int, default=512, help="of a rank")
    parser.add_argument("--part", type=int, default=256, help="least tokens of a rank's part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args(arguments)
    checkpoint, steal = open_checkpoint(parsed), Steal()
    try:
        cases = run(parsed, checkpoint.folder.resolve())
    except LoadError as error:
        print(f"bench context: {error}", file=sys.stderr)
        return 1
    share = steal.take()
    show("the first token of a long prompt", COLUMNS, cases)
    keys = ("ranks", "prompts", "tokens", "chunk", "part", "seed")
    config: dict[str, Json] = {
        "model": checkpoint.name,
        **{key: getattr(parsed, key) for key in keys},
        "work": [*work_shares(checkpoint.config, parsed.tokens, parsed.chunk, parsed.ranks)],
        "steal": round(share, 4),
        "valid": share <= MAX_STEAL,
    }
    publish(
        report("bench context", config=config, cases=cases, ok=True),
        name="context",
        as_json=parsed.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
