"""How long the scheduler core takes for a steady decode step: plan, pack and apply.

`make bench NAME=core ARGS="--ranks 1 --rows 256 --json"`. No sockets and no executors: results are
made up between the timed calls. One kernel thread; quote the p50 of a quiet machine.
"""

import argparse
import gc
import json
import time
from collections import deque

import numpy as np

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity, Generate, RowMode, StepResult, StepStatus, SubmitStep
from deepmesh.wire.packed import RESULT, ROW, pack_ids
from services.scheduler.core.events import ExecutorUp, Mail, Send, Tick, TokenizerUp
from services.scheduler.core.scheduler import Scheduler

PROMPT_TOKENS = 100
WARM_STEPS = 40


class Rig:
    """A core full of requests that all decode, and executors that answer at once."""

    def __init__(self, ranks: int, rows: int) -> None:
        self.ranks = ranks
        config = SchedulerConfig(max_rows=rows, max_waiting=1 << 20, step_tokens=8192)
        self.core = Scheduler(config, name="s", model="m", ranks=ranks)
        self.steps: deque[list[SubmitStep]] = deque()
        self.core.handle(TokenizerUp("t", b"1"), 0)
        for rank in range(ranks):
            self.core.handle(ExecutorUp(f"e-0-{rank}", rank), 0)
        for rank in range(ranks):
            blocks = rows * 70
            capacity = Capacity(1, rank, blocks, blocks, 4 * rows, rows + 8, 4096, 32_000, 128)
            self.core.handle(Mail(f"e-0-{rank}", capacity), 0)
        for number in range(ranks * rows):
            rid = number.to_bytes(16, "big")
            length = PROMPT_TOKENS + number % 128  # block edges are met at different steps
            ids = pack_ids(range(length))
            self.core.handle(Mail("t", Generate(rid, 1, "t", ids, length, max_tokens=2000)), 0)

    def plan(self) -> float:
        """One Tick; ms."""
        start = time.perf_counter()
        actions = self.core.handle(Tick(), 0)
        took = time.perf_counter() - start
        sent = [a.message for a in actions if isinstance(a, Send)]
        steps = [message for message in sent if isinstance(message, SubmitStep)]
        for at in range(0, len(steps), self.ranks):
            self.steps.append(steps[at : at + self.ranks])
        return 1e3 * took

    def apply(self) -> float:
        """The results of the oldest step; ms."""
        results = [answer(step, rank) for rank, step in enumerate(self.steps.popleft())]
        mail = [Mail(f"e-0-{rank}", result) for rank, result in enumerate(results)]
        start = time.perf_counter()
        for message in mail:
            self.core.handle(message, 0)
        return 1e3 * (time.perf_counter() - start)


def answer(step: SubmitStep, rank: int) -> StepResult:
    """What an executor would say: each sampling row gives one token that ends nothing."""
    rows = np.frombuffer(step.rows, ROW)
    rows = rows[rows["mode"] != RowMode.DUMMY]
    result = np.zeros(len(rows), RESULT)
    for name in ("rid", "epoch", "slot", "gen"):
        result[name] = rows[name]
    result["kv_len"] = rows["start_hi"] + rows["q"]
    result["num_tokens"] = rows["sample"]
    tokens = np.full(int(result["num_tokens"].sum()), 7, np.int32)
    return StepResult(
        step.engine_epoch,
        step.step_id,
        rank,
        StepStatus.OK,
        result.tobytes(),
        tokens.tobytes(),
        gpu_done=step.step_id - 1,
    )


def measure(ranks: int, rows: int, steps: int) -> dict[str, float]:
    """p50 and p99 of a steady step, in ms."""
    rig = Rig(ranks, rows)
    rig.plan()
    while rig.core.stats().waiting_tokens:
        rig.apply()
        rig.plan()
    gc.collect()
    gc.freeze()
    plans, applies = [], []
    for _ in range(WARM_STEPS + steps):
        applies.append(rig.apply())
        plans.append(rig.plan())
    plan, apply = np.array(plans[WARM_STEPS:]), np.array(applies[WARM_STEPS:])
    total = plan + apply
    return {
        "ranks": ranks,
        "rows": rows,
        "plan_pack_ms_p50": round(float(np.median(plan)), 3),
        "apply_ms_p50": round(float(np.median(apply)), 3),
        "total_ms_p50": round(float(np.median(total)), 3),
        "total_ms_p99": round(float(np.percentile(total, 99)), 3),
    }


def main() -> None:
    """Measure one shape, or a series that shows the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0, help="a rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shapes = [(1, 64), (1, 256), (8, 128), (32, 128)]
    if arguments.ranks or arguments.rows:
        shapes = [(arguments.ranks or 1, arguments.rows or 256)]
    for ranks, rows in shapes:
        found = measure(ranks, rows, arguments.steps)
        print(json.dumps(found) if arguments.json else found, flush=True)


if __name__ == "__main__":
    main()
