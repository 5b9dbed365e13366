"""The last group steps with what their ranks reported: for the timeline, traces, and sums."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deepmesh.recorder import Kind, Slice
from deepmesh.wire.messages import (
    GAPS_S,
    PHASES_S,
    STEP_TOKENS,
    StepNote,
    StepResult,
    StepTotals,
)
from deepmesh.wire.sockets import Mail

from .core.events import RequestEnded, StepEnded
from .core.group import group_step_of
from .core.token_rows import RID_BYTES
from .recent import Recent

KEPT_STEPS = 4096
KEPT_ENDED = 8192  # numbers of requests that have ended
MAX_OPEN = 256  # steps with results that have not ended
MAX_NOTES = 2048  # steps in one answer
_GAPS_NS = [bound * 1e9 for bound in GAPS_S]
_PHASES_NS = [bound * 1e9 for bound in PHASES_S]


class RankTimes(NamedTuple):
    """One rank's part of a step, by our clock."""

    rank: int
    executor: str
    submitted_ns: int  # there
    enqueued_ns: int
    begin_ns: int  # 0: it did not run
    end_ns: int
    sent_ns: int  # its result
    received_ns: int


class SeenStep:
    """A group step that is over."""

    __slots__ = ("ended", "is_exported", "ranks")

    def __init__(self, ended: StepEnded, ranks: list[RankTimes]) -> None:
        self.ended, self.ranks, self.is_exported = ended, ranks, False


class StepsSeen:
    """Keeps what is there anyway; a step costs a few microseconds, whatever its rows."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, SeenStep] = OrderedDict()
        self._open: dict[int, list[RankTimes]] = {}
        self._ended = Recent(KEPT_ENDED, RID_BYTES)
        self._last_end_ns = 0  # on rank 0's device, of the step before, if work was left behind it
        self._last_step = 0
        self._num = [0] * 7  # steps, busy, gap, exposed, straggle (ns), rows, tokens
        self._gaps, self._sizes = [0] * (len(GAPS_S) + 1), [0] * (len(STEP_TOKENS) + 1)
        self._phases = [[0] * (len(PHASES_S) + 1) for _ in range(3)]  # queued, prefilled, decoded
        self._phases_ns = [0, 0, 0]
        self.plan_ns = 0

    def result(self, mail: Mail, result: StepResult) -> None:
        """A rank's result has come."""
        if len(self._open) > MAX_OPEN:
            self._open.clear()  # late results of abandoned steps
        times, ahead_ns = result.times, mail.peer.ahead_ns
        begin_ns = times.begin_ns - ahead_ns if times.begin_ns else 0
        self._open.setdefault(group_step_of(result.step_id), []).append(
            RankTimes(
                result.rank,
                mail.peer.name,
                times.received_ns - ahead_ns,
                times.enqueued_ns - ahead_ns,
                begin_ns,
                times.end_ns - ahead_ns,
                mail.sent_ns,
                mail.received_ns,
            )
        )

    def step(self, ended: StepEnded, *, is_busy: bool) -> None:
        """A step is over; `is_busy`: requests are there, so the next one is due."""
        ranks = self._open.pop(ended.group_step, [])
        self._steps[ended.group_step] = SeenStep(ended, ranks)
        if len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)
        if ended.error or not ranks:
            self._last_end_ns = 0
            return
        self._count(ended, min(ranks), is_busy=is_busy)

    def request(self, ended: RequestEnded) -> None:
        """Its steps are asked about later."""
        self._count_request(ended)
        if ended.number:
            self._ended.put(ended.number, ended.rid)

    def get(self, group_step: int) -> SeenStep | None:
        """A step, unless it was too long ago."""
        return self._steps.get(group_step)

    def totals(self) -> StepTotals:
        """For heartbeats."""
        steps, busy, gap, exposed, straggle, rows, tokens = self._num
        return StepTotals(
            steps=steps,
            busy_ns=busy,
            gap_ns=gap,
            exposed_ns=exposed,
            gaps=list(self._gaps),
            plan_ns=self.plan_ns,
            straggle_ns=straggle,
            rows=rows,
            tokens=tokens,
            sizes=list(self._sizes),
            queued=list(self._phases[0]),
            prefilled=list(self._phases[1]),
            decoded=list(self._phases[2]),
            phases_ns=(self._phases_ns[0], self._phases_ns[1], self._phases_ns[2]),
        )

    def notes(self, since_ns: int, live: Mapping[int, bytes]) -> list[StepNote]:
        """What the steps that ended since then held. `live`: requests by number."""
        notes: list[StepNote] = []
        for seen in self._since(since_ns):
            step = seen.ended
            numbers = dict.fromkeys(np.frombuffer(step.rids, "<u8").tolist())
            rids = [rid for n in numbers if (rid := live.get(n) or self._ended.get(n))]
            notes.append(StepNote(step.group_step, step.kind, step.num_rows, step.num_tokens, rids))
        return notes

    def slices(self, since_ns: int) -> list[Slice]:
        """Of the same steps: the way to each rank, and the wait for the last one."""
        found: list[Slice] = []
        for seen in self._since(since_ns):
            step, number = seen.ended, seen.ended.group_step
            for rank in seen.ranks:
                if rank.begin_ns:
                    at, to = step.planned_ns, rank.submitted_ns
                    found.append((Kind.SUBMIT, number, at, to, rank.rank))
            if step.ready_ns:
                at, to = step.ready_ns, step.applied_ns
                found.append((Kind.APPLY, number, at, to, step.last_rank))
        return found

    # ------------------------------------------------------------ inside

    def _since(self, since_ns: int) -> list[SeenStep]:
        found: list[SeenStep] = []
        for seen in reversed(self._steps.values()):
            if seen.ended.applied_ns < since_ns or len(found) == MAX_NOTES:
                break
            found.append(seen)
        found.reverse()
        return found

    def _count_request(self, ended: RequestEnded) -> None:
        """How long it waited, computed its prompt, and computed its output."""
        stamps = [ended.received_ns, ended.admitted_ns, ended.first_token_ns, ended.ended_ns]
        for phase in range(3):
            if not stamps[phase + 1]:
                return
            took_ns = max(0, stamps[phase + 1] - stamps[phase])
            self._phases_ns[phase] += took_ns
            self._phases[phase][bisect_left(_PHASES_NS, took_ns)] += 1

    def _count(self, ended: StepEnded, rank: RankTimes, *, is_busy: bool) -> None:
        num = self._num
        num[0] += 1
        num[1] += max(0, rank.end_ns - rank.begin_ns)
        num[4] += max(0, ended.applied_ns - ended.ready_ns)
        num[5] += ended.num_rows
        num[6] += ended.num_tokens
        self._sizes[bisect_left(STEP_TOKENS, ended.num_tokens)] += 1
        if self._last_end_ns and ended.group_step == self._last_step + 1:
            gap_ns = max(0, rank.begin_ns - self._last_end_ns)
            num[2] += gap_ns
            num[3] += max(0, rank.enqueued_ns - self._last_end_ns)
            self._gaps[bisect_left(_GAPS_NS, gap_ns)] += 1
        self._last_step = ended.group_step
        self._last_end_ns = rank.end_ns if is_busy else 0
