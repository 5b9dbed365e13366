"""The EP group: its ranks, the numbered steps in flight, and the one descriptor of each step."""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Capacity, Descriptor, StepKind

from .cache_counts import CacheCounts
from .draft_counts import DraftCounts, StepDrafts

_STEP_BITS = 32


def make_step_id(engine_epoch: int, group_step: int) -> int:
    """Step ids are never reused: the engine epoch is in the high bits."""
    return engine_epoch << _STEP_BITS | group_step


def group_step_of(step_id: int) -> int:
    """The number of the group step behind a step id."""
    return step_id & ((1 << _STEP_BITS) - 1)


@dataclass(slots=True, eq=False)
class Captures:
    """Rows whose state is copied behind the step, to keep a resumable point at `position`."""

    row: NDArray[np.intp]  # of the step, all ranks counted; ascending
    position: NDArray[np.int64]
    state_block: NDArray[np.int64]

    @staticmethod
    def none() -> "Captures":
        """Of most steps."""
        return Captures(np.empty(0, np.intp), np.empty(0, np.int64), np.empty(0, np.int64))

    def take(self, which: slice | NDArray[np.bool_]) -> "Captures":
        """Some of them."""
        return Captures(self.row[which], self.position[which], self.state_block[which])


@dataclass(slots=True, eq=False)
class StepRows:
    """Rows of a step as planned. Apply reads contributions here and nowhere else."""

    index: NDArray[np.intp]  # into the request table
    rid: NDArray[np.uint64]
    epoch: NDArray[np.uint32]
    gen: NDArray[np.uint32]
    q: NDArray[np.int64]
    least: NDArray[np.int64]  # positions the row is sure to make valid if it is alive
    sampled: NDArray[np.int64]  # output tokens the row is sure to bring if it is alive
    is_prefill: NDArray[np.bool_]  # the ids are known: a chunk, by whatever kernels
    num_logprobs: NDArray[np.int64]

    def take(self, rows: slice | NDArray[np.bool_]) -> "StepRows":
        """Some of the rows; a slice copies nothing."""
        return StepRows(
            index=self.index[rows],
            rid=self.rid[rows],
            epoch=self.epoch[rows],
            gen=self.gen[rows],
            q=self.q[rows],
            least=self.least[rows],
            sampled=self.sampled[rows],
            is_prefill=self.is_prefill[rows],
            num_logprobs=self.num_logprobs[rows],
        )


class StepState(IntEnum):
    """How far a group step has come; a step that was abandoned is FAILED."""

    PLANNED = 0
    SUBMITTED = 1
    TOKENS_READY = 2  # some ranks' results are here
    APPLIED = 3  # all are
    RETIRED = 4  # and all ranks have reached GPU_DONE: its fences are passed
    FAILED = 5


@dataclass(slots=True, eq=False)
class StepRecord:
    """A group step from plan to GPU_DONE of its last rank. Times are 0 while they lie ahead."""

    step_id: int
    kind: StepKind
    rows: StepRows  # of all ranks, rank by rank
    bounds: list[int]  # rank r has rows[bounds[r] : bounds[r + 1]]
    pending: set[int]  # ranks whose result has not come
    planned_ns: int
    captures: Captures = field(default_factory=Captures.none)
    state: StepState = StepState.PLANNED
    ready_ns: int = 0  # first result
    applied_ns: int = 0  # last result
    done_ns: int = 0  # GPU_DONE of the last rank
    begin_ns: int = 0  # on the device of the rank that began last
    end_ns: int = 0  # on the device of the rank that ended last
    last_rank: int = -1  # whose result came last
    placement: int = 0  # see Group.placement
    expert_rows: list[bytes] = field(default_factory=list[bytes])  # of ranks that have answered
    drafts: StepDrafts = field(default_factory=StepDrafts)  # the same

    def part(self, rank: int) -> StepRows:
        """One rank's rows."""
        return self.rows.take(slice(self.bounds[rank], self.bounds[rank + 1]))

    def captures_of(self, rank: int) -> Captures:
        """Those of one rank's rows."""
        start, end = np.searchsorted(self.captures.row, self.bounds[rank : rank + 2]).tolist()
        return self.captures.take(slice(start, end))

    @property
    def num_rows(self) -> int:
        """Rows of all ranks, dummies left out."""
        return len(self.rows.index)

    @property
    def num_tokens(self) -> int:
        """Positions that the rows may write."""
        return int(self.rows.q.sum())

    @property
    def pending_tokens(self) -> int:
        """Positions that rows of ranks without a result may write."""
        bounds = self.bounds
        return sum(int(self.rows.q[bounds[rank] : bounds[rank + 1]].sum()) for rank in self.pending)


@dataclass(slots=True)
class Waste:
    """Device work that brought nothing, since the start; each kind its own counter."""

    overrun_tokens: int = 0  # sampled behind an end, or for a request that had left
    null_rows: int = 0
    dummy_tokens: int = 0  # of ranks without rows
    pad_tokens: int = 0  # up to the widest rank of the step
    late_results: int = 0  # of an older engine epoch


def decide(
    rows: list[int],
    decode_tokens: list[int],
    prefill_tokens: list[int],
    decode_rows: list[int],
    walks: int = 0,
) -> Descriptor:
    """The descriptor of a group step: a pure function of what each rank is about to run.

    Ranks without rows run a dummy of this shape; without any row it is a step of dummies.

    Args:
        rows, decode_tokens, prefill_tokens, decode_rows: of each rank; tokens go by the kernels
            that compute them.
        walks: positions before the last one of the longest row of decode kernels.
    """
    has_decode, has_prefill = any(decode_tokens), any(prefill_tokens)
    kind = StepKind.DECODE if has_decode else StepKind.DUMMY
    if has_prefill:
        kind = StepKind.MIXED if has_decode else StepKind.PREFILL
    tokens = [sum(pair) for pair in zip(decode_tokens, prefill_tokens, strict=True)]
    return Descriptor(
        kind=kind,
        padded_tokens=max(1, *tokens),
        padded_rows=max(1, *rows),
        decode_rows=max(decode_rows),
        walks=walks,
        prefill_tokens=max(prefill_tokens),
    )


class Group:
    """Membership and the pipeline. A group runs only while every rank is loaded."""

    def __init__(self, *, ranks: int, first_epoch: int) -> None:
        self.ranks = ranks
        self.engine_epoch = first_epoch
        self.group_epoch = first_epoch
        self.group_step = 0
        self.placement = 0  # number of the PlaceExperts that the next step has in force
        self.peers: dict[int, str] = {}
        self.capacities: dict[int, Capacity] = {}
        self.loaded: set[int] = set()
        self.told: dict[int, int] = {}  # the engine epoch each rank was last told
        self.unresolved: deque[StepRecord] = deque()
        self.retiring: deque[StepRecord] = deque()  # applied, not yet GPU_DONE on all ranks
        self.inflight_tokens = 0  # Σ q over unresolved rows; moves by their contributions only
        self.waste, self.drafts, self.cache = Waste(), DraftCounts(), CacheCounts()
        self.shared_tokens = 0  # prompt tokens of chunks that all ranks computed together
        self.applied: list[int] = [0] * ranks  # last step applied, by rank
        self.gpu_done: list[int] = [0] * ranks

    @property
    def ready(self) -> bool:
        """All ranks are linked and loaded."""
        return len(self.loaded) == self.ranks

    @property
    def last_step_id(self) -> int:
        """The highest step that any rank of this epoch can know of."""
        return make_step_id(self.engine_epoch, self.group_step)

    def next_step_id(self) -> int:
        """Number the next group step."""
        self.group_step += 1
        return make_step_id(self.engine_epoch, self.group_step)

    def submit(self, step: StepRecord) -> None:
        """The step leaves: its rows are in flight from here on."""
        step.state = StepState.SUBMITTED
        self.inflight_tokens += step.num_tokens
        self.unresolved.append(step)

    def answered(self, step: StepRecord, rank: int, now: int) -> bool:
        """A rank's result has been applied; whether it was the last one."""
        step.state = StepState.TOKENS_READY
        step.ready_ns = step.ready_ns or now
        step.last_rank = rank
        self.applied[rank] = step.step_id
        step.pending.discard(rank)
        if step.pending:
            return False
        step.state, step.applied_ns = StepState.APPLIED, now
        self.unresolved.remove(step)
        self.retiring.append(step)
        return True

    def retire(self, now: int) -> None:
        """Forget applied steps whose tails are complete on all ranks."""
        while self.retiring and min(self.gpu_done) >= self.retiring[0].step_id:
            step = self.retiring.popleft()
            step.state, step.done_ns = StepState.RETIRED, now

    def abandon(self) -> list[StepRecord]:
        """A new engine epoch: no result of older steps will be applied."""
        steps = list(self.unresolved)
        for step in steps:
            step.state = StepState.FAILED
            self.inflight_tokens -= step.pending_tokens
        self.unresolved.clear()
        self.retiring.clear()
        self.engine_epoch += 1
        self.group_epoch += 1
        floor = make_step_id(self.engine_epoch, 0)
        self.applied = [floor] * self.ranks
        self.gpu_done = [floor] * self.ranks
        return steps
