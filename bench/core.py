"""How long the scheduler takes for a steady decode step: plan, pack and apply; over sockets also
encode, send, receive and decode.

`deepmesh bench core --json`. Without sockets the core alone is timed, and results are made up
between the timed calls. With sockets it is the scheduler's own loop, linked to one process that
plays all executors and the tokenizers (`core_peer.py`) on the other core: the time of a step is
all the loop did for it, waiting left out. Tokens of 4 tokenizers are batched and sent, too. One
kernel thread; quote a quiet machine.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.core_rig import TIMEOUT_S, WARM_STEPS, Rig, config_of
from deepmesh import telemetry
from deepmesh.config import Config, ExecutorConfig, LinksConfig, MeshConfig, TelemetryConfig
from deepmesh.report import MAX_STEAL, ROOT, Json, Steal, publish, report
from services.scheduler.service import SchedulerService

SHAPES = [
    (1, 64, False),
    (1, 256, False),
    (8, 128, False),
    (32, 128, False),
    (128, 128, False),
    (32, 128, True),
    (128, 128, True),
]
LIMITS_MS = {(1, 256, False): 1.0, (128, 128, True): 15.0}
MAX_DEVIATION = 0.35  # from the straight line, of each shape without sockets
TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Measured:
    """Milliseconds of each measured step, and CPU milliseconds a step by who spent them."""

    parts: dict[str, list[float]]
    cpu: dict[str, float]

    @property
    def total(self) -> NDArray[np.float64]:
        """Of each step."""
        return np.array(list(self.parts.values())).sum(axis=0)


def measure_core(ranks: int, rows: int, steps: int) -> Measured:
    """The core alone."""
    rig = Rig(ranks, rows)
    plans: list[float] = []
    applies: list[float] = []
    cpu = 0.0
    for _ in range(WARM_STEPS + steps):
        before = time.thread_time()
        applies.append(rig.apply())
        plans.append(rig.plan())
        cpu += time.thread_time() - before
    parts = {"plan": plans[WARM_STEPS:], "apply": applies[WARM_STEPS:]}
    gc.unfreeze()
    return Measured(parts, {"main": 1e3 * cpu / (WARM_STEPS + steps)})


class Loop:
    """The scheduler's loop in this thread, timed but for its waiting."""

    def __init__(self, folder: str, ranks: int, rows: int) -> None:
        config = Config(
            mesh=MeshConfig(run_dir=folder),
            scheduler=config_of(rows),
            executor=ExecutorConfig(ranks=ranks),
            telemetry=TelemetryConfig(enabled=False),
            links=LinksConfig(timeout_s=TIMEOUT_S),
        )
        tracer = telemetry.setup("scheduler", "scheduler-0", config)
        self.service = SchedulerService(config, index=0, tracer=tracer)
        self.busy_ns = 0

    @property
    def num_applied(self) -> int:
        """Group steps that all ranks have answered."""
        group = self.service.core.group
        return group.group_step - len(group.unresolved)

    def turn(self) -> None:
        """Wait for mail, then one timed turn with all that is there."""
        inbox = self.service.inbox
        self.service.listener.sockets[0].poll(100)
        start = time.perf_counter_ns()
        self.service.turn(inbox.wait(0.0))
        self.busy_ns += time.perf_counter_ns() - start

    def run(self, steps: int) -> list[float]:
        """Busy milliseconds of so many steps."""
        found: list[float] = []
        applied, busy = self.num_applied, self.busy_ns
        while len(found) < steps:
            self.turn()
            done = self.num_applied - applied
            if done:
                found += [1e-6 * (self.busy_ns - busy) / done] * done
                applied, busy = self.num_applied, self.busy_ns
        return found[:steps]


def measure_sockets(ranks: int, rows: int, steps: int) -> Measured:
    """The scheduler's loop, with the mesh around it in another process."""
    with tempfile.TemporaryDirectory(prefix="dm-") as folder:
        loop = Loop(folder, ranks, rows)
        address = loop.service.listener.address
        command = [sys.executable, "-m", "bench.core_peer", address, str(ranks), str(rows)]
        peer = subprocess.Popen(command, cwd=ROOT)
        try:
            core = loop.service.core
            while len(core.registry.live) < ranks * rows or core.stats().waiting_tokens:
                loop.turn()
                if peer.poll() is not None:
                    raise RuntimeError("the process with the executors has ended")
            gc.collect()
            gc.freeze()
            loop.run(WARM_STEPS)
            before = (time.thread_time(), time.process_time(), _cpu_s(peer.pid))
            found = loop.run(steps)
            after = (time.thread_time(), time.process_time(), _cpu_s(peer.pid))
        finally:
            peer.kill()
            peer.wait()
            loop.service.inbox.close()
            gc.unfreeze()
    main, process, other = (1e3 * (b - a) / steps for a, b in zip(before, after, strict=True))
    return Measured({"loop": found}, {"main": main, "io": process - main, "peer": other})


def _cpu_s(pid: int) -> float:
    """CPU seconds of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def case_of(
    ranks: int, rows: int, sockets: bool, measured: Measured, steal: float
) -> dict[str, Json]:
    """One case of the report."""
    total, limit = measured.total, LIMITS_MS.get((ranks, rows, sockets))
    p50 = float(np.median(total))
    case: dict[str, Json] = {
        "ranks": ranks,
        "rows": rows,
        "depth": config_of(rows).depth,
        "sockets": sockets,
        "plan_apply_ms_p50": round(p50, 3),
        "plan_apply_ms_p99": round(float(np.percentile(total, 99)), 3),
        "limit_ms_p50": limit,
        "within_limit": limit is None or p50 <= limit,
        "cpu_ms": {name: round(ms, 3) for name, ms in measured.cpu.items()},
        "steal": round(steal, 4),
        "valid": steal <= MAX_STEAL,
        "samples_ms": [round(float(ms), 3) for ms in total],
    }
    for name, samples in measured.parts.items():
        case[f"{name}_ms_p50"] = round(float(np.median(samples)), 3)
    return case


def fit(cases: list[dict[str, Json]]) -> dict[str, Json] | None:
    """ms = base + per rank * ranks + per row * rows of all ranks, by least relative squares; None
    with fewer shapes than unknowns. Growth is linear if no shape is far from it."""
    shapes = [
        (float(str(c["ranks"])), float(str(c["rows"])), float(str(c["plan_apply_ms_p50"])))
        for c in cases
        if not c["sockets"]
    ]
    if len(shapes) < 4:
        return None
    ranks, rows, ms = np.array(shapes).T
    terms = np.stack([np.ones_like(ranks), ranks, ranks * rows], axis=1)
    found = np.linalg.lstsq(terms / ms[:, None], np.ones_like(ms), rcond=None)[0]
    deviation = float(np.abs(terms @ found / ms - 1).max())
    return {
        "base_ms": round(float(found[0]), 4),
        "ms_per_rank": round(float(found[1]), 5),
        "us_per_row": round(1e3 * float(found[2]), 4),
        "max_deviation": round(deviation, 3),
        "is_linear": deviation <= MAX_DEVIATION,
    }


def main() -> int:
    """Measure one shape, or all."""
    parser = argparse.ArgumentParser(prog="deepmesh bench core", description=__doc__)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0, help="a rank")
    parser.add_argument("--sockets", action="store_true", help="with --ranks or --rows")
    parser.add_argument("--steps", type=int, default=300, help="measured steps of each shape")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    arguments = parser.parse_args()
    shapes = SHAPES
    if arguments.ranks or arguments.rows:
        shapes = [(arguments.ranks or 1, arguments.rows or 256, arguments.sockets)]
    cases: list[dict[str, Json]] = []
    for ranks, rows, sockets in shapes:
        steal = Steal()
        measure = measure_sockets if sockets else measure_core
        case = case_of(ranks, rows, sockets, measure(ranks, rows, arguments.steps), steal.take())
        cases.append(case)
        shown = {key: value for key, value in case.items() if key != "samples_ms"}
        print(shown, file=sys.stderr, flush=True)
    growth = fit(cases)
    ok = all(case["within_limit"] for case in cases)
    ok &= growth is None or bool(growth["is_linear"])
    config: dict[str, Json] = {"steps": arguments.steps, "warm_steps": WARM_STEPS}
    found = report("bench core", config=config, cases=cases, ok=ok)
    found["fit"] = growth
    print(growth, file=sys.stderr)
    publish(found, name="core", as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
