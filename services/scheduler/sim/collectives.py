"""The collectives of an EP group: who enters what, in which order, and when a step is over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from deepmesh.wire.messages import Descriptor, GroupFlag, SubmitStep

from .chunk_exchange import ChunkExchange
from .clock import Clock
from .shadow import ShadowError

Run = Callable[[int, int], None]  # begin and end of a step, ns


class Collective(NamedTuple):
    """One exchange that every rank of the group must enter."""

    kind: str  # dispatch, combine, swap
    layers: str  # which ones: experts of the model, or of the drafter
    tokens: int
    comm_mode: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.layers}, {self.tokens} tokens, mode {self.comm_mode}"


def trace_of(descriptor: Descriptor) -> tuple[Collective, ...]:
    """What a rank enters in one step, in order: a pure function of the descriptor it was sent."""
    return _trace(
        descriptor.padded_tokens,
        descriptor.padded_rows,
        descriptor.comm_mode,
        descriptor.n_draft_passes,
        descriptor.n_ubatch,
        is_split=descriptor.split is not None,
    )


@lru_cache(maxsize=1024)
def _trace(
    tokens: int, rows: int, mode: int, draft_passes: int, ubatches: int, *, is_split: bool
) -> tuple[Collective, ...]:
    def exchange(layers: str, count: int) -> list[Collective]:
        return [Collective(kind, layers, count, mode) for kind in ("dispatch", "combine")]

    forward = [*exchange("the model", -(-tokens // ubatches))] * ubatches
    if is_split:
        forward.insert(0, Collective("swap", "cache rows", tokens, mode))
    return (*forward, *(exchange("the drafter", rows) * draft_passes))


@dataclass(slots=True)
class _Meeting:
    """A group step that some ranks have entered and others not."""

    first: int  # the rank that came first
    trace: tuple[Collective, ...]
    descriptor: Descriptor
    lengths: dict[int, int] = field(default_factory=dict[int, int])  # own work by rank, ns
    runs: dict[int, Run] = field(default_factory=dict[int, Run])


@dataclass(frozen=True, slots=True)
class StepSpan:
    """When a group step ran on the devices, and how long each rank was busy in it."""

    group_step: int
    descriptor: Descriptor
    begin_ns: int
    end_ns: int
    busy_ns: tuple[int, ...]  # by rank


class Rendezvous:
    """Compares at once what real ranks would wait for in vain, and ends a step on all ranks
    together: none gets out of a collective before the last has entered it."""

    def __init__(self, clock: Clock, ranks: int) -> None:
        self.spans: list[StepSpan] | None = None  # kept if it is a list
        self.chunks = ChunkExchange(ranks)
        self.on_span: Callable[[StepSpan], None] = lambda _: None
        self._clock, self._ranks = clock, ranks
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._last: dict[int, tuple[int, int]] = {}  # (engine epoch, group step) by rank
        self._resumed = 0  # up to this step no PAUSE holds any more
        self._held: tuple[int, int, GroupFlag] | None = None  # epoch and step that hold, and why

    def enter(self, rank: int, step: SubmitStep, length_ns: int, run: Run) -> None:
        """A rank enters a step; `run` is called when it ends on all ranks.

        Raises:
            ShadowError: names both ranks and what each came with.
        """
        key = (step.engine_epoch, step.group_step)
        self._check_order(rank, step, key)
        trace = trace_of(step.descriptor)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(rank, trace, step.descriptor)
        self._compare(rank, step, trace, meeting)
        self._last[rank] = key
        meeting.lengths[rank], meeting.runs[rank] = length_ns, run
        if len(meeting.runs) == self._ranks:
            del self._meetings[key]
            begin = self._clock.now
            length = max(meeting.lengths.values())
            self._hold(step)
            self._clock.at(length, partial(self._over, step, meeting, begin))

    def leave(self, rank: int) -> None:
        """A rank abandons what it has entered."""
        self._last.pop(rank, None)
        for key in [key for key, meeting in self._meetings.items() if rank in meeting.runs]:
            del self._meetings[key].runs[rank]
            if not self._meetings[key].runs:
                del self._meetings[key]

    def resumed(self, group_step: int) -> None:
        """The group was told to go on when `group_step` was the last one submitted."""
        self._resumed = group_step
        self._held = None

    def _over(self, step: SubmitStep, meeting: _Meeting, begin: int) -> None:
        busy = tuple(meeting.lengths[rank] for rank in range(self._ranks))
        span = StepSpan(step.group_step, step.descriptor, begin, self._clock.now, busy)
        if self.spans is not None:
            self.spans.append(span)
        self.on_span(span)
        for rank in range(self._ranks):
            if rank in meeting.runs:
                meeting.runs[rank](begin, self._clock.now)

    def _check_order(self, rank: int, step: SubmitStep, key: tuple[int, int]) -> None:
        if self._held is not None and step.group_step > self._held[1]:
            epoch, held, flag = self._held
            drains = step.descriptor.flags & GroupFlag.DRAIN  # the last step, even in a pause
            if not drains if flag == GroupFlag.PAUSE else epoch == step.engine_epoch:
                text = f"I22 step {step.group_step} runs behind step {held}, which says {flag.name}"
                raise ShadowError(text)
        last = self._last.get(rank)
        if last is not None and last[0] == key[0] and last[1] + 1 != key[1]:
            raise ShadowError(f"I22 rank {rank} enters step {key[1]} behind step {last[1]}")
        for epoch, other in self._meetings:
            if epoch == key[0] and other < key[1] and rank not in self._meetings[epoch, other].runs:
                first = self._meetings[epoch, other].first
                raise ShadowError(
                    f"I22 rank {rank} enters step {key[1]}, rank {first} waits in step {other}"
                )

    def _compare(
        self, rank: int, step: SubmitStep, trace: tuple[Collective, ...], meeting: _Meeting
    ) -> None:
        for at in range(max(len(trace), len(meeting.trace))):
            mine = trace[at] if at < len(trace) else None
            theirs = meeting.trace[at] if at < len(meeting.trace) else None
            if mine != theirs:
                raise ShadowError(
                    f"I22 group step {step.group_step}, exchange {at}: rank {rank} enters "
                    f"{mine or 'nothing'}, rank {meeting.first} {theirs or 'nothing'}"
                )
        if step.descriptor != meeting.descriptor:
            raise ShadowError(
                f"I22 rank {rank} enters group step {step.group_step} with {step.descriptor}, "
                f"rank {meeting.first} with {meeting.descriptor}"
            )

    def _hold(self, step: SubmitStep) -> None:
        if not step.descriptor.flags:
            return
        for flag in (GroupFlag.DRAIN, GroupFlag.PAUSE):
            void = flag == GroupFlag.PAUSE and step.group_step <= self._resumed
            if step.descriptor.flags & flag and not void:
                self._held = (step.engine_epoch, step.group_step, flag)
