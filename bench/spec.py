"""What drafts are worth: tokens per second with each policy against none, batch by batch.

`deepmesh bench spec --json`. The scheduler's core and the executor in one process. Runs of all
policies take turns, each with a run without drafts beside it, and are counted while all their
requests decode, for as many steps as `least_steps` at least; ratios come with a 95 % interval.
Fixed lengths verify all drafts in every step; length 0 is no drafts against no drafts, which shows
the noise; "adaptive" is the policy that serves. `ok`: it is never a loss, and as good as the best
fixed length, at every batch; not so if a length was left out. `roofline_ratio` is what a step as
long as the reading of its weights would give: of the length itself, for "adaptive" of the best one.

`--record FILE` writes how often the drafts of a checkpoint with a trained draft head are right, by
place and confidence; `--acceptance FILE` gives another checkpoint, whose weights know nothing,
drafts that are right as often: its steps and draft passes cost what they cost.

`--device cuda` runs the executor of a GPU, on a slice of the preset's shapes with weights made on
the device; `--device host` the same on this host (slow).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.checkpoints import add_options, open_checkpoint
from bench.determinism.jobs import Job
from bench.gpu.spec import DevicePolicies, HostPolicies, open_slice
from bench.spec_acceptance import Acceptance, read_acceptance
from bench.spec_runs import (
    ADAPTIVE,
    ANSWER_TOKENS,
    LEAST_TOKENS,
    LENGTHS,
    NONE,
    ZERO,
    Policies,
    Run,
    held_out_jobs,
    random_jobs,
)
from bench.spec_verdict import holds, verdict
from bench.spec_window import EmptyWindow
from deepmesh.report import Json, publish, report

RECORDED = Path(__file__).with_name("spec_acceptance_tiny.json")  # on the tiny model
BATCHES = (1, 4, 16, 64, 256)
PAIRS, FEWER_PAIRS = 15, 5  # of the adaptive policy, of each fixed length
TOKENS = 96  # of each request
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# Of Student, by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 29: 2.045}


@dataclass
class Measured:
    """Pairs of one policy at one batch."""

    ratios: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    least_steps: list[int] = field(default_factory=list)  # counted, of either run of a pair

    def add(self, run: Run, plain: Run) -> None:
        """A run, and the one without drafts beside it."""
        self.ratios.append(run.rate / plain.rate)
        self.runs.append(run)
        self.least_steps.append(min(run.counts.steps, plain.counts.steps))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean with its 95 % interval."""
    logs = np.log(ratios)
    mean = float(logs.mean())
    if len(logs) < 2:
        return float(np.exp(mean)), float(np.exp(mean)), float(np.exp(mean))
    near = min(T_95, key=lambda freedom: abs(freedom - (len(logs) - 1)))
    half = T_95[near] * statistics.stdev(logs.tolist()) / len(logs) ** 0.5
    return float(np.exp(mean - half)), float(np.exp(mean)), float(np.exp(mean + half))


def case(
    batch: int, policy: str, found: Measured, roofline: float | None, device: str = "cpu"
) -> dict[str, Json]:
    """The report's entry."""
    low, ratio, high = interval(found.ratios)
    verified = sum(run.verified for run in found.runs)
    by_run = [run.counts.accepted for run in found.runs]
    accepted = [sum(column) for column in zip_longest(*by_run, fillvalue=0)]
    steps = sum(run.verifying for run in found.runs)
    return {
        "device": device,
        "batch": batch,
        "policy": policy,
        "draft_len": round(verified / steps, 3),
        "tokens_per_s": round(statistics.median(run.rate for run in found.runs), 1),
        "ratio_to_off": round(ratio, 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "mean_accepted": round(sum(accepted) / steps, 3),
        "roofline_ratio": None if roofline is None else round(roofline, 4),
        "pairs": len(found.ratios),
        "least_steps": min(found.least_steps),
        "verified": verified,
        "accepted": list(accepted),
        "samples": [round(value, 4) for value in found.ratios],
    }


def measure(policies: Policies, jobs: Sequence[Job], wanted: dict[str, int]) -> dict[str, Measured]:
    """`wanted`: pairs of each policy. They take turns, so that what the machine does hits all."""
    plain_outputs = policies.learn(jobs)
    found = {policy: Measured() for policy in wanted}
    for policy in (*wanted, NONE):  # the first run of an engine loads and measures
        policies.run(policy, jobs)
    for number in range(max(wanted.values())):
        order = [policy for policy, pairs in wanted.items() if number < pairs]
        order = order[number % len(order) :] + order[: number % len(order)]
        for place, policy in enumerate(order):
            policies.deal(number + 1)
            pair = (NONE, policy) if (number + place) % 2 == 0 else (policy, NONE)
            runs = {name: policies.run(name, jobs) for name in pair}
            _check(policy, runs[policy], plain_outputs)
            found[policy].add(runs[policy], runs[NONE])
    return found


def _check(policy: str, run: Run, wanted: dict[int, list[int]]) -> None:
    for index, ids in run.outputs.items():
        if ids != wanted[index][: len(ids)]:
            raise RuntimeError(f"{policy}: other tokens than without drafts")


def show(cases: Sequence[dict[str, Json]]) -> None:
    """A table on stderr."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "policy", "ratio", "95 %", "roofline", "drafts", "accepted", "steps"):
        table.add_column(name, justify="right")
    for entry in cases:
        bounds = f"{entry['ratio_low']:.3f} to {entry['ratio_high']:.3f}"
        bound = entry["roofline_ratio"]
        figures = (
            *(f"{entry['ratio_to_off']:.3f}", bounds, "" if bound is None else f"{bound:.2f}"),
            *(f"{entry['draft_len']:.2f}", f"{entry['mean_accepted']:.2f}"),
            str(entry["least_steps"]),
        )
        table.add_row(str(entry["batch"]), str(entry["policy"]), *figures)
    Console(stderr=True).print(table)


def roofline_of(
    policies: Policies, acceptance: Acceptance | None, batch: int, policy: str
) -> float | None:
    """None: how many drafts are right is not known beforehand."""
    if acceptance is None:
        return None
    roofline = policies.roofline
    tokens = [acceptance.tokens(length) for length in (0, *LENGTHS)]
    if policy == ZERO:
        return 1.0
    if policy == ADAPTIVE:
        return roofline.best_ratio(batch, tokens)
    return roofline.ratio(batch, int(policy), tokens[int(policy)])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--batch", type=int, action="append", help="rows; several may be given")
    parser.add_argument("--policy", action="append", choices=[ZERO, *map(str, LENGTHS), ADAPTIVE])
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of the adaptive policy")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"of each request, {LEAST_TOKENS} at least"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--acceptance",
        type=Path,
        help="made by --record; a preset of random weights has that of the tiny model unless told",
    )
    parser.add_argument("--record", type=Path, help="write this file, and no more")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: of this process, on a busy machine",
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "host"), default="cpu")
    parser.add_argument("--layers", type=int, default=8, help="of a slice on a device")
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is here: use --device cpu", file=sys.stderr)
        return 2
    if arguments.device != "cpu" and arguments.record:
        parser.error("--record: drafts are recorded on a CPU, whose tokens are the same")
    with ExitStack() as stack:
        return _run(arguments, stack)


def _run(arguments: argparse.Namespace, stack: ExitStack) -> int:
    is_device = arguments.device != "cpu"
    is_slice = is_device and arguments.model is None and arguments.preset != "tiny"
    if is_slice:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dm-")))
        checkpoint = open_slice(folder / "slice", arguments.preset, arguments.layers)
    else:
        checkpoint = open_checkpoint(arguments)
    if arguments.record:
        jobs = held_out_jobs(checkpoint.folder)
        policies = Policies(checkpoint, None, len(jobs), ANSWER_TOKENS)
        acceptance = policies.record(jobs)
        policies.close()
        acceptance.write(arguments.record)
        shares = ", ".join(f"{share:.3f}" for share in acceptance.by_place)
        mean = f"{acceptance.tokens(max(LENGTHS)):.2f} tokens a verify step"
        print(f"{arguments.record}: right by place {shares}; {mean}", file=sys.stderr)
        return 0
    path: Path | None = arguments.acceptance
    if path is None and arguments.model is None and arguments.preset != "tiny":
        path = RECORDED
    acceptance = None if path is None else read_acceptance(path)
    batches = arguments.batch or list(BATCHES)
    chosen = arguments.policy or [ZERO, *map(str, LENGTHS), ADAPTIVE]
    fewer = min(arguments.pairs, FEWER_PAIRS)
    wanted = {policy: arguments.pairs if policy == ADAPTIVE else fewer for policy in chosen}
    tokens, clock = max(LEAST_TOKENS, arguments.tokens), CLOCKS[arguments.clock]
    make = Policies
    if is_device:
        make = HostPolicies if arguments.device == "host" else DevicePolicies
    policies = make(checkpoint, acceptance, max(batches), tokens, clock)
    cases, failed = list[dict[str, Json]](), list[str]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=len(batches))
            for batch in batches:
                bar.update(task, description=f"batch {batch}")
                jobs = random_jobs(checkpoint.config, batch, tokens, arguments.temperature)
                try:
                    measured = measure(policies, jobs, wanted)
                except EmptyWindow as error:
                    failed.append(f"batch {batch}: {error}")
                    measured = {}
                for policy, found in measured.items():
                    bound = roofline_of(policies, acceptance, batch, policy)
                    cases.append(case(batch, policy, found, bound, arguments.device))
                bar.advance(task)
    finally:
        policies.close()
    show(cases)
    for problem in failed:
        print(problem, file=sys.stderr)
    kept = verdict(cases)
    described: dict[str, Json] = {
        "model": checkpoint.name,
        "temperature": arguments.temperature,
        "tokens": tokens,
        "clock": arguments.clock,
        "device": arguments.device,
        "layers": checkpoint.config.num_hidden_layers,
        "acceptance": None if acceptance is None else list(acceptance.by_place),
        "adaptive": dict(kept),
        "failed": list(failed),
    }
    ok = not failed and holds(kept, batches)
    found_all = report("bench spec", config=described, cases=cases, ok=ok)
    store = not arguments.no_store
    publish(found_all, name="spec", as_json=arguments.json, store=store)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
