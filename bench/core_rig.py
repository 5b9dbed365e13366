"""What `bench/core.py` measures with: requests that all decode, and answers to their steps."""

import gc
import time
from collections import deque

import numpy as np

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity, Generate, RowMode, StepResult, StepStatus, SubmitStep
from deepmesh.wire.packed import RESULT, ROW, pack_ids
from services.scheduler.core.events import ExecutorUp, Mail, Send, StepResults, Tick, TokenizerUp
from services.scheduler.core.scheduler import Scheduler

TIMEOUT_S = 300.0  # of links: all requests come at once, and the first steps are long
NUM_TOKENIZERS = 4  # what text of so many streams needs (docs/operations.md)
MAX_TOKENS = 3000
WARM_STEPS = 140  # by then every row has met a block edge and a grid point
TOKEN = 7  # what everybody always samples; it ends nothing


def config_of(rows: int) -> SchedulerConfig:
    """Room for all rows at once."""
    return SchedulerConfig(max_rows=rows, max_waiting=1 << 20, step_tokens=8192)


def capacity_of(rank: int, rows: int, engine_epoch: int = 1) -> Capacity:
    """A rank that never runs short."""
    blocks = rows * 60
    return Capacity(engine_epoch, rank, blocks, blocks, 4 * rows, rows + 8, 4096, 32_000, 128)


def requests_of(ranks: int, rows: int) -> list[tuple[str, Generate]]:
    """(tokenizer, request) for each row, of lengths that meet block edges at different steps."""
    found: list[tuple[str, Generate]] = []
    for number in range(ranks * rows):
        name, length = f"tokenizer-{number % NUM_TOKENIZERS}", 100 + number % 128
        rid, ids = number.to_bytes(16, "big"), pack_ids(range(length))
        found.append((name, Generate(rid, 1, name, ids, length, max_tokens=MAX_TOKENS)))
    return found


def answer(steps: list[SubmitStep]) -> list[StepResult]:
    """What the ranks would say to their parts of one step: each sampling row gives one token.

    All ranks in one pass: the answering side must not be the slow one.
    """
    sizes = [len(step.rows) // ROW.itemsize for step in steps]
    rows = np.frombuffer(b"".join([step.rows for step in steps]), ROW)
    found = np.zeros(len(rows), RESULT)
    for name in ("rid", "epoch", "slot", "gen"):
        found[name] = rows[name]
    found["kv_len"] = rows["start_hi"] + rows["q"]
    found["num_tokens"] = rows["sample"]
    is_dummy = rows["mode"] == RowMode.DUMMY
    data, ends = found.tobytes(), np.cumsum(sizes).tolist()
    tokens = np.concatenate([[0], np.cumsum(rows["sample"], dtype=np.int64)])
    results: list[StepResult] = []
    for rank, (step, size, end) in enumerate(zip(steps, sizes, ends, strict=True)):
        start = end - size
        count = int(tokens[end] - tokens[start])
        part = b"" if is_dummy[start] else data[RESULT.itemsize * start : RESULT.itemsize * end]
        results.append(
            StepResult(
                step.engine_epoch,
                step.step_id,
                rank,
                StepStatus.OK,
                part,
                pack_ids([TOKEN]) * count,
                gpu_done=step.step_id - 1,
            )
        )
    return results


class Rig:
    """A core without sockets, and executors that answer at once."""

    def __init__(self, ranks: int, rows: int) -> None:
        self.ranks = ranks
        self.core = Scheduler(config_of(rows), name="s", model="m", ranks=ranks, encodes_rows=True)
        self._steps: deque[list[SubmitStep]] = deque()
        for number in range(NUM_TOKENIZERS):
            self.core.handle(TokenizerUp(f"tokenizer-{number}", b"1"), 0)
        for rank in range(ranks):
            self.core.handle(ExecutorUp(f"executor-0-{rank}", rank), 0)
        for rank in range(ranks):
            self.core.handle(Mail(f"executor-0-{rank}", capacity_of(rank, rows)), 0)
        for name, generate in requests_of(ranks, rows):
            self.core.handle(Mail(name, generate), 0)
        self.plan()
        while self.core.stats().waiting_tokens:
            self.apply()
            self.plan()
        gc.collect()
        gc.freeze()

    def plan(self) -> float:
        """One Tick; ms."""
        start = time.perf_counter()
        actions = self.core.handle(Tick(), 0)
        took = time.perf_counter() - start
        sent = [action.message for action in actions if isinstance(action, Send)]
        steps = [message for message in sent if isinstance(message, SubmitStep)]
        for at in range(0, len(steps), self.ranks):
            self._steps.append(steps[at : at + self.ranks])
        return 1e3 * took

    def apply(self) -> float:
        """The results of the oldest step, all at once; ms."""
        results = answer(self._steps.popleft())
        event = StepResults([(f"executor-0-{result.rank}", result) for result in results])
        start = time.perf_counter()
        self.core.handle(event, 0)
        return 1e3 * (time.perf_counter() - start)
