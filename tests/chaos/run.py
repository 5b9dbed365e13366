"""One run: fault after fault, the next as soon as the last is over, and what came of it."""

import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import TimeoutError as StillRunning
from pathlib import Path
from typing import NamedTuple

from deepmesh.report import Json
from tests.chaos.answers import Cut, Refused
from tests.chaos.faults import FAULTS, LIMITS_S, Scene
from tests.chaos.leaks import Footprint, after_stop, fat, socket_files, told, while_idle
from tests.chaos.load import Load
from tests.chaos.mesh import ChaosMesh
from tests.chaos.plan import KINDS, Step, steps
from tests.chaos.requests import NUM_LONG

STREAMS, AT_LEAST = 24, 16  # kept open; in flight when a fault comes
BACK_WITHIN_S = 90.0  # or the run ends: what has not come back by then will not
# How a process may end that gets no memory.
OUT_OF_MEMORY = ("MemoryError", "Cannot allocate memory", "can't start new thread", "bad_alloc")


class Took(NamedTuple):
    """One fault."""

    step: Step
    what: str
    back_s: float  # until all processes were well and a new request was served
    flowing_s: float  # and all streams that were in flight went on


class Limits(NamedTuple):
    """When a run ends."""

    seconds: float
    faults: int = 0  # 0: as many as there is time for, but each kind once


class Run:
    """Everything of one run. AssertionError: a promise is broken, in words."""

    def __init__(self, folder: Path, seed: int, *, has_namespace: bool, slack: float = 1.0) -> None:
        """`slack`: the limits are so many times longer, on a machine that has more to do."""
        self._folder, self._seed, self._slack = folder, seed, slack
        self._patience_s = BACK_WITHIN_S * slack
        self._mesh = ChaosMesh(folder, has_namespace=has_namespace)
        self._took: list[Took] = []
        self._problems: list[str] = []
        self._least_in_flight = STREAMS
        self._leaks: list[str] = []

    def go(self, limits: Limits, kinds: Sequence[str] = KINDS) -> dict[str, Json]:
        """Start, hurt, check, stop. The figures; `problems` is empty when all promises hold."""
        with self._mesh as mesh:
            load = Load(mesh.url, streams=STREAMS, seed=self._seed)
            with load:
                self._warm(load)
                before, sockets = Footprint(mesh), socket_files(mesh.mesh.run_dir)
                try:
                    self._hurt(load, limits, kinds, before)
                    load.finish(2 * self._patience_s)
                except (AssertionError, StillRunning, Cut, Refused) as error:
                    self._problems.append(f"{type(error).__name__}: {error}")
            if not self._problems and load.goes_on:
                self._leaks += while_idle(mesh, self._folder, before, sockets)
            now = Footprint(mesh)
        self._leaks += after_stop(mesh, self._folder)
        return self._report(load, before, now, told(mesh.mesh.run_dir / "logs"))

    def _warm(self, load: Load) -> None:
        """Every kind of answer has been given, and every cache has something."""
        self._mesh.wait(
            lambda: load.counts["whole"] >= 2 * STREAMS or not load.goes_on,
            "streams",
            2 * self._patience_s,
        )

    def _hurt(self, load: Load, limits: Limits, kinds: Sequence[str], before: Footprint) -> None:
        end_s = time.monotonic() + limits.seconds
        for step in steps(self._seed, kinds):
            least = limits.faults or len(kinds)
            is_late = time.monotonic() > end_s
            if step.number >= least and (limits.faults or is_late):
                return
            if is_late and limits.faults:
                self._problems.append(f"{step.number} of {limits.faults} faults by the end")
                return
            took = self._one(load, step)
            self._took.append(took)
            self._tell(took)
            if found := fat(before, Footprint(self._mesh)):
                self._problems.append(f"memory after {step}: {found}")
            if not load.goes_on:
                return

    def _one(self, load: Load, step: Step) -> Took:
        self._mesh.wait(
            lambda: len(load.in_flight()) >= AT_LEAST or not load.goes_on,
            f"{AT_LEAST} streams in flight",
            self._patience_s,
        )
        in_flight = load.in_flight()
        self._least_in_flight = min(self._least_in_flight, len(in_flight))
        scene = Scene(self._mesh, load, step.target, random.Random(step.seed))
        began_s = time.monotonic()
        what = FAULTS[step.kind](scene)
        after = f"after {step.kind} of {what}"
        self._mesh.wait(self._mesh.is_whole, f"the mesh {after}", self._patience_s)
        self._serves(load, step)
        whole_s = time.monotonic()

        def all_flow() -> bool:
            return all(a.is_over or a.times[-1] > whole_s for a in in_flight) or not load.goes_on

        self._mesh.wait(all_flow, f"streams {after}", self._patience_s)
        return Took(step, what, whole_s - began_s, time.monotonic() - began_s)

    def _serves(self, load: Load, step: Step) -> None:
        """A new request is served."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                load.run(load.ask_right(NUM_LONG), self._patience_s)
                return
            except (Cut, Refused) as error:
                if time.monotonic() > deadline_s:
                    raise AssertionError(f"no request is served after {step}: {error}") from error

    # ------------------------------------------------------------ what is told

    def _tell(self, took: Took) -> None:
        step = took.step
        line = f"{step.number + 1:>4} {step.kind:<13} {step.target:<10} {took.what:<42}"
        line += f" back {took.back_s:5.1f} s, streams {took.flowing_s:5.1f} s"
        print(line, file=sys.stderr, flush=True)

    def _report(
        self, load: Load, before: Footprint, now: Footprint, tracebacks: dict[str, int]
    ) -> dict[str, Json]:
        recovery = self._recovery()
        strange = {
            text: count
            for text, count in tracebacks.items()
            if not any(word in text for word in OUT_OF_MEMORY)
        }
        problems = [*self._problems, *load.lost, *load.wrong, *self._leaks, *map(str, strange)]
        problems += [
            f"{name}: took {row['max']} s, limit {row['limit']} s"
            for name, row in recovery.items()
            if row["limit"] is not None and float(row["max"]) > float(row["limit"])  # type: ignore[arg-type]
        ]
        if self._least_in_flight < AT_LEAST:
            problems.append(f"only {self._least_in_flight} streams in flight at a fault")
        return {
            "faults": len(self._took),
            "lost_requests": len(load.lost),
            "wrong_tokens": len(load.wrong),
            "leaks": len(self._leaks),
            "recovery_s": dict(recovery),
            "recovery_by_target_s": dict(self._recovery(by_target=True)),
            "least_in_flight": self._least_in_flight,
            "answers": load.counts["whole"],
            "events": load.counts["events"],
            "asked_again": load.counts["asked again"],
            "refused": {k: n for k, n in load.counts.items() if k.startswith("refused")},
            "longest_gap_s": round(load.longest_gap_s, 2),
            "tracebacks": dict(tracebacks),
            "rss_mib": {s: [before.rss_bytes[s] >> 20, n >> 20] for s, n in now.rss_bytes.items()},
            "descriptors": {s: [before.num_files[s], n] for s, n in now.num_files.items()},
            "problems": list[Json](problems),
        }

    def _recovery(self, *, by_target: bool = False) -> dict[str, dict[str, Json]]:
        found: dict[str, list[Took]] = defaultdict(list)
        for took in self._took:
            step = took.step
            found[f"{step.kind} {step.target}".strip() if by_target else step.kind].append(took)
        rows: dict[str, dict[str, Json]] = {}
        for name, all_took in sorted(found.items()):
            times = sorted(took.back_s for took in all_took)
            flowing = sorted(took.flowing_s for took in all_took)
            limit = None if by_target else LIMITS_S.get(name)
            rows[name] = {
                "count": len(times),
                "p50": round(times[len(times) // 2], 2),
                "max": round(times[-1], 2),
                "limit": None if limit is None else limit * self._slack,
                "streams_p50": round(flowing[len(times) // 2], 2),
                "streams_max": round(flowing[-1], 2),
            }
        return rows
