"""The EP group: its ranks, the numbered steps in flight, and the one descriptor of each step."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Capacity, Descriptor, StepKind

_STEP_BITS = 32


def make_step_id(engine_epoch: int, group_step: int) -> int:
    """Step ids are never reused: the engine epoch is in the high bits."""
    return engine_epoch << _STEP_BITS | group_step


def group_step_of(step_id: int) -> int:
    """The number of the group step behind a step id."""
    return step_id & ((1 << _STEP_BITS) - 1)


@dataclass(frozen=True, slots=True)
class Capture:
    """A row whose state is copied behind the step, to keep a resumable point at `position`."""

    row: int
    position: int
    state_block: int


@dataclass(slots=True, eq=False)
class RankStep:
    """One rank's rows of a step, as planned. Apply reads contributions here and nowhere else."""

    index: NDArray[np.intp]  # into the request table
    rid: NDArray[np.uint64]
    epoch: NDArray[np.uint32]
    gen: NDArray[np.uint32]
    q: NDArray[np.int64]
    least: NDArray[np.int64]  # positions the row is sure to make valid if it is alive
    sampled: NDArray[np.int64]  # output tokens the row is sure to bring if it is alive
    is_prefill: NDArray[np.bool_]
    num_logprobs: NDArray[np.int64]
    captures: list[Capture] = field(default_factory=list[Capture])

    def part(self, start: int, end: int) -> "RankStep":
        """The rows from `start` to `end`; captures belong to a rank and are added to it."""
        return RankStep(
            index=self.index[start:end],
            rid=self.rid[start:end],
            epoch=self.epoch[start:end],
            gen=self.gen[start:end],
            q=self.q[start:end],
            least=self.least[start:end],
            sampled=self.sampled[start:end],
            is_prefill=self.is_prefill[start:end],
            num_logprobs=self.num_logprobs[start:end],
        )

    @property
    def num_tokens(self) -> int:
        """Positions that the rows may write."""
        return int(self.q.sum())


@dataclass(slots=True, eq=False)
class StepRecord:
    """A group step from plan to the last rank's result."""

    step_id: int
    kind: StepKind
    ranks: list[RankStep]
    planned_ns: int
    pending: set[int]  # ranks whose result has not come
    begin_ns: int = 0
    end_ns: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all ranks, dummies left out."""
        return sum(len(rank.index) for rank in self.ranks)


def decide(rows: list[int], decode_tokens: list[int], prefill_tokens: list[int]) -> Descriptor:
    """The descriptor of a group step: a pure function of what each rank is about to run.

    Ranks without rows run a dummy of this shape.
    """
    has_decode, has_prefill = any(decode_tokens), any(prefill_tokens)
    kind = StepKind.DECODE
    if has_prefill:
        kind = StepKind.MIXED if has_decode else StepKind.PREFILL
    tokens = [sum(pair) for pair in zip(decode_tokens, prefill_tokens, strict=True)]
    return Descriptor(kind=kind, padded_tokens=max(1, *tokens), padded_rows=max(1, *rows))


class Group:
    """Membership and the pipeline. A group runs only while every rank is loaded."""

    def __init__(self, *, ranks: int, first_epoch: int) -> None:
        self.ranks = ranks
        self.engine_epoch = first_epoch
        self.group_epoch = first_epoch
        self.group_step = 0
        self.peers: dict[int, str] = {}
        self.capacities: dict[int, Capacity] = {}
        self.loaded: set[int] = set()
        self.told: dict[int, int] = {}  # the engine epoch each rank was last told
        self.unresolved: deque[StepRecord] = deque()
        self.applied: list[int] = [0] * ranks  # last step applied, by rank
        self.gpu_done: list[int] = [0] * ranks

    @property
    def ready(self) -> bool:
        """All ranks are linked and loaded."""
        return len(self.loaded) == self.ranks

    def next_step_id(self) -> int:
        """Number the next group step."""
        self.group_step += 1
        return make_step_id(self.engine_epoch, self.group_step)

    def oldest_for(self, rank: int) -> StepRecord | None:
        """The oldest step for which `rank` owes a result."""
        return next((step for step in self.unresolved if rank in step.pending), None)

    def abandon(self) -> list[StepRecord]:
        """A new engine epoch: no result of older steps will be applied."""
        steps = list(self.unresolved)
        self.unresolved.clear()
        self.engine_epoch += 1
        self.group_epoch += 1
        floor = make_step_id(self.engine_epoch, 0)
        self.applied = [floor] * self.ranks
        self.gpu_done = [floor] * self.ranks
        return steps
