"""A core with several ranks whose executors answer at once: what runs where, not what it computes.

Tokens are made up; the simulator checks tokens, KV and order. Here a test looks at placement.
"""

from collections import deque

import numpy as np
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Capacity,
    Failed,
    Finished,
    Generate,
    RowSource,
    StepResult,
    StepStatus,
    SubmitStep,
)
from deepmesh.wire.packed import RESULT, ROW, pack_ids
from services.scheduler.core.audit import audit
from services.scheduler.core.events import Event, ExecutorUp, Mail, Send, Tick, TokenizerUp
from services.scheduler.core.scheduler import Scheduler
from tests.core.driver import CAPACITY

ROOMY = replace(CAPACITY, num_global_blocks=4096, num_window_blocks=1024, num_slots=64)
ROOMY = replace(ROOMY, num_state_blocks=512, max_model_len=4096)
CONFIG = SchedulerConfig(max_rows=32, step_tokens=256, chunk_tokens=64, depth=1)


class Ranks:
    """One core, several ranks; every step runs to its end before the next is planned."""

    def __init__(
        self,
        capacities: list[Capacity],
        config: SchedulerConfig = CONFIG,
        *,
        is_checked: bool = True,
    ) -> None:
        self.core = Scheduler(config, name="s", model="m", ranks=len(capacities))
        self.ended: dict[int, Finished | Failed] = {}
        self.prefilled: list[int] = [0] * len(capacities)  # tokens of known ids, by rank
        self.places: dict[int, list[int]] = {}  # number of the request -> ranks it has been on
        self.capacities = capacities
        self._is_checked = is_checked
        self.waiting: deque[list[SubmitStep]] = deque()
        self._numbers: dict[int, int] = {}  # the core's rid -> number
        self._count = 0
        self.feed(TokenizerUp("t", b"1"))
        for rank in range(len(capacities)):
            self.feed(ExecutorUp(f"e-0-{rank}", rank))
        for rank, capacity in enumerate(capacities):
            self.feed(Mail(f"e-0-{rank}", replace(capacity, rank=rank)))

    def feed(self, event: Event) -> None:
        """One event, with the audit behind it."""
        steps: list[SubmitStep] = []
        for action in self.core.handle(event, 1):
            if isinstance(action, Send):
                if isinstance(action.message, SubmitStep):
                    steps.append(action.message)
                elif isinstance(action.message, Finished | Failed):
                    self.ended[int.from_bytes(action.message.rid, "big")] = action.message
        ranks = len(self.capacities)
        self.waiting.extend(steps[at : at + ranks] for at in range(0, len(steps), ranks))
        if self._is_checked:
            audit(self.core)

    def ask(self, prompt: list[int], max_tokens: int = 8, sub_index: int = 0) -> int:
        """A new request; its number."""
        number, self._count = self._count, self._count + 1
        rid = number.to_bytes(16, "big")
        ids, length = pack_ids(prompt), len(prompt)
        message = Generate(
            rid, 1, "t", ids, length, max_tokens=max_tokens, sub_index=sub_index, seed=5
        )
        self._numbers[number + 1] = number
        self.feed(Mail("t", message))
        return number

    def step(self) -> bool:
        """Plan and run one group step; whether there was one."""
        self.feed(Tick())
        if not self.waiting:
            return False
        for rank, step in enumerate(self.waiting.popleft()):
            for init in step.init:
                self.places.setdefault(self._numbers[init.rid], []).append(rank)
            rows = np.frombuffer(step.rows, ROW)
            rows = rows[rows["rid"] > 0]
            known = rows["source"] == RowSource.HOST
            self.prefilled[rank] += int(rows["q"][known].sum())
            self.feed(Mail(f"e-0-{rank}", answer(step, rank, rows)))
        return True

    def run(self) -> None:
        """Until nothing is left to plan."""
        for _ in range(5000):
            if not self.step():
                return
        raise AssertionError("it does not come to an end")


def answer(step: SubmitStep, rank: int, rows: np.ndarray) -> StepResult:
    """Each row that samples brings the same token."""
    result = np.zeros(len(rows), RESULT)
    for name in ("rid", "epoch", "slot", "gen"):
        result[name] = rows[name]
    result["kv_len"] = rows["start_hi"] + rows["q"]
    result["num_tokens"] = rows["sample"]
    tokens = pack_ids([7] * int(rows["sample"].sum()))
    return StepResult(
        engine_epoch=step.engine_epoch,
        step_id=step.step_id,
        rank=rank,
        status=StepStatus.OK,
        rows=result.tobytes(),
        tokens=tokens,
        gpu_done=step.step_id,
    )
