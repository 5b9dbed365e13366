"""How much of a device's time the host leaves unused, at depth 1 and 2.

`deepmesh bench overlap --json`. Real scheduler and executor processes over ZeroMQ; a sink in the
tokenizer's place sends requests and acks their tokens. The device is a clock of its own: a step
begins at the end of the one before it, or when it was enqueued if that was later, and the executor
waits for its end on a timer. Gap, lead and ratios are of that clock (docs/operations.md has the
definitions); ideal_ratio compares the run's throughput with that of its own steps sent once more,
all queued in advance. Runs of all cases take turns; figures are medians of the runs. CPU work that
is added to the scheduler's loop (--work) must cost nothing while it fits into a step.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.gpu.options import main as gpu_main
from bench.gpu.options import wants_gpu
from bench.rig.cases import Case, choose
from bench.rig.metrics import Window
from bench.rig.run import Run, run
from deepmesh.report import MAX_STEAL, Json, publish, report

WORKS = [0.3, 1.5]  # hidden; a positive control that cannot be
STEPS = {5.0: 80, 20.0: 30}
MAX_OTHERS = 0.1  # share of the CPU time for other processes, above which a run is not valid
QUICK_STEPS = 30


def case_figures(case: Case, runs: Sequence[Run]) -> dict[str, Json]:
    """Medians over the runs of one case; the worst gaps are those of all runs together."""

    def median(figure: Callable[[Run], float]) -> float:
        return statistics.median(figure(one) for one in runs)

    gaps = np.concatenate([one.window.gaps for one in runs]) / 1e3
    leads = np.concatenate([one.window.leads for one in runs]) / 1e6
    ideals = [one.ideal for one in runs if one.ideal is not None]
    paces = [_pace(ideal) for ideal in ideals]
    ratios = [_pace(one.window) / statistics.median(paces) for one in runs if paces]
    steal = max(one.load.steal for one in runs)
    others = max(one.load.others or 0.0 for one in runs)
    return {
        "device": "cpu",  # a clock stands for the device
        "step_ms": case.step_ms,
        "rows": case.rows,
        "depth": case.depth,
        "speculation": case.speculation,
        "grammar": case.grammar,
        "work": case.work,
        "scope": "mesh" if case.whole_mesh else "scheduler+executor",
        "gpu_gap_us_p50": round(float(np.median(gaps)), 1),
        "gpu_gap_us_p99": round(float(np.percentile(gaps, 99)), 1),
        "bubble_ratio": round(median(lambda r: _bubble(r.window)), 5),
        "exposed_cpu_us_mean": round(median(lambda r: _exposed(r.window)) / 1e3, 2),
        "ideal_ratio": round(statistics.median(ratios), 4) if ratios else None,
        "sync_calls": 0,
        "lead_ms_p50": round(float(np.median(leads)), 3),
        "lead_ms_p01": round(float(np.percentile(leads, 1)), 3),
        "exposed_share": round(float((leads < 0).mean()), 4),
        "busy_ms_mean": round(median(lambda r: float(r.window.busy.mean())) / 1e6, 4),
        "tokens_per_s": round(median(lambda r: 1e9 * r.window.tokens / r.window.span)),
        "tokens_per_step": round(median(lambda r: r.window.tokens / len(r.window.begin)), 2),
        "cpu_ms_per_step": {
            name: round(median(lambda r, name=name: r.load.cpu_ms[name]), 3)
            for name in runs[0].load.cpu_ms
        },
        "replay_same_tokens": all(one.same_tokens for one in runs),
        "replay_bubble_ratio": max((round(_bubble(one), 5) for one in ideals), default=None),
        "bubble_samples": [round(_bubble(one.window), 5) for one in runs],
        "steal": round(steal, 4),
        "others_cpu": round(others, 4),
        "valid": steal <= MAX_STEAL and others <= MAX_OTHERS,
    }


def _bubble(window: Window) -> float:
    gaps, busy = int(window.gaps.sum()), int(window.busy.sum())
    return gaps / (gaps + busy)


def _pace(window: Window) -> float:
    """Steps per ns: runs differ a little in what their steps hold, not in how long these take."""
    return len(window.begin) / window.span


def _exposed(window: Window) -> float:
    """ns a step, on average, that the host was late."""
    return float(np.maximum(0, -window.leads).mean())


def targets(cases: Sequence[Case], figures: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """The limits that were set, and whether the figures keep them."""
    found: list[dict[str, Json]] = []

    def judge(case: Case, key: str, value: float, limit: float, *, at_most: bool) -> None:
        met = value <= limit if at_most else value >= limit
        bound = {"at_most" if at_most else "at_least": limit}
        found.append({"case": str(case), "key": key, "value": value, **bound, "met": met})

    plain = {c: f for c, f in zip(cases, figures, strict=True) if not c.work}
    for case, figure in zip(cases, figures, strict=True):
        if case.whole_mesh:
            judge(case, "bubble_ratio", _number(figure, "bubble_ratio"), 0.01, at_most=True)
        elif case.work:
            base = plain.get(Case(case.rows, case.step_ms, case.depth))
            if base is None:
                continue
            ratio = _number(figure, "tokens_per_s") / _number(base, "tokens_per_s")
            figure["throughput_to_no_work"] = round(ratio, 4)
            # work beyond a step sets the pace; the loop's own comes on top of it
            limit = 0.98 if case.work < 1 else 1.05 / case.work
            judge(case, "throughput_to_no_work", round(ratio, 4), limit, at_most=case.work >= 1)
        elif case == Case(256, 5.0, 2):
            judge(case, "bubble_ratio", _number(figure, "bubble_ratio"), 0.01, at_most=True)
            if figure["ideal_ratio"] is not None:
                judge(case, "ideal_ratio", _number(figure, "ideal_ratio"), 0.98, at_most=False)
    return found


def _number(figure: dict[str, Json], key: str) -> float:
    value = figure[key]
    assert isinstance(value, int | float)
    return float(value)


def measure(cases: Sequence[Case], *, rounds: int, steps: int, replays: int) -> list[list[Run]]:
    """Every case `rounds` times, taking turns; the first `replays` rounds are replayed."""
    runs: list[list[Run]] = [[] for _ in cases]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=rounds * len(cases))
        for number in range(rounds):
            for case, into in zip(cases, runs, strict=True):
                bar.update(task, description=str(case))
                count = steps or STEPS.get(case.step_ms, max(30, int(1000 / case.step_ms)))
                into.append(run(case, count, with_replay=number < replays))
                bar.advance(task)
    return runs


def show(figures: Sequence[dict[str, Json]], judged: Sequence[dict[str, Json]]) -> None:
    """A table on stderr."""
    keys = ["step_ms", "rows", "depth", "speculation", "grammar", "work", "scope"]
    keys += ["gpu_gap_us_p50", "gpu_gap_us_p99", "bubble_ratio", "ideal_ratio", "lead_ms_p50"]
    keys += ["tokens_per_s", "steal", "others_cpu"]
    table = Table(*keys)
    for figure in figures:
        table.add_row(*(str(figure[key]) for key in keys))
    console = Console(stderr=True, width=180)
    console.print(table)
    for each in judged:
        console.print(each)


def main() -> int:
    """1 if a replay gave other tokens than its run; with `--device cuda`: bench/gpu/overlap.py."""
    if wants_gpu(sys.argv[1:]):
        from bench.gpu import overlap as gpu

        return gpu_main("overlap", gpu.__doc__, gpu.run, gpu.options)
    arguments = _arguments()
    cases = choose(
        rows=arguments.rows,
        step_ms=arguments.step_ms,
        depths=arguments.depth,
        speculation=arguments.speculation,
        grammar=arguments.grammar,
        works=arguments.work,
        with_mesh=arguments.mesh,
    )
    rounds, steps = arguments.runs, arguments.steps
    runs = measure(cases, rounds=rounds, steps=steps, replays=arguments.replays)
    figures = [case_figures(case, found) for case, found in zip(cases, runs, strict=True)]
    judged = targets(cases, figures)
    ok = all(bool(figure["replay_same_tokens"]) for figure in figures)
    config: dict[str, Json] = {
        "runs": rounds,
        "replays": arguments.replays,
        "steps": steps or {str(ms): count for ms, count in STEPS.items()},
        "device": "a clock beside the host; no CUDA, so nothing to synchronise with",
        "targets": list(judged),
    }
    found = report("bench overlap", config=config, cases=figures, ok=ok)
    show(figures, judged)
    publish(found, name="overlap", as_json=arguments.json, store=not arguments.no_store)
    return 0 if ok else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 20.0])
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 2], choices=[1, 2, 3])
    parser.add_argument("--speculation", type=_switch, nargs="+", default=[False, True])
    parser.add_argument("--grammar", type=_switch, nargs="+", default=[False, True])
    parser.add_argument("--work", type=float, nargs="*", default=WORKS, help="shares of a step")
    parser.add_argument("--mesh", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--runs", type=int, default=5, help="of each case")
    parser.add_argument("--replays", type=int, default=1, help="of each case")
    parser.add_argument("--steps", type=int, default=0, help="of a run; default: by step time")
    parser.add_argument("--quick", action="store_true", help="one short run of a few plain cases")
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.steps = 1, arguments.steps or QUICK_STEPS
        arguments.speculation = arguments.grammar = [False]
        arguments.work, arguments.mesh = [], False
    return arguments


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError("use on or off")
    return text == "on"


if __name__ == "__main__":
    sys.exit(main())
