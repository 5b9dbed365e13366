"""What a process did lately: a ring of slices of time, and how its peers ask for it.

A slice is a tuple appended at the end of a piece of work, about 0.3 us; nothing is encoded before
somebody asks (decision 0030).
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from deepmesh.telemetry import Tracer
from deepmesh.wire.link import Identity
from deepmesh.wire.messages import GetRecords, KeepTrace, Records, StepNote
from deepmesh.wire.process import Observed, Process

MAX_SLICES = 16_384  # of a process; about 2 MB
MAX_ANSWER = 8192  # slices, the newest: a loop stands still for their encoding, about 2 ms
MAX_ASKED = 64

Slice = tuple[int, int, int, int, int]  # kind, step, start_ns, end_ns, value


class Kind(IntEnum):
    """What a slice of time went into; `value` in brackets."""

    PLAN = 1  # scheduler: applying results and planning (steps planned)
    SUBMIT = 2  # scheduler: planned to received by the rank (rank)
    APPLY = 3  # scheduler: first rank's result to the last one's, applied (rank that came last)
    QUEUED = 4  # executor: enqueued to begun on the device (steps that waited before it)
    DEVICE = 5  # executor: begin to end on the device (rows)
    COLLECTIVE = 6  # executor: in a collective of the group (bytes)
    READBACK = 7  # executor: end on the device to the result on the host (tokens)
    DETOKENISE = 8  # tokenizer: token batches to events (rows)
    LOAD = 9  # executor: blocks from a kvstore (blocks)
    STORE = 10  # executor: blocks to a kvstore (blocks)


class Work(Protocol):
    """What a device has computed."""

    @property
    def peaks(self) -> tuple[float, float]:
        """FLOPs and bytes a second that it could do at most; 0: not known."""
        ...

    def of_steps(self, first: int) -> list[tuple[int, float, float]]:
        """Step, FLOPs and bytes of steps from this one on."""
        ...


class Recorder:
    """The ring of one process."""

    def __init__(self, max_slices: int = MAX_SLICES) -> None:
        self._slices: deque[Slice] = deque(maxlen=max_slices)
        self.add = self._slices.append  # one call less

    def since(self, since_ns: int) -> list[Slice]:
        """Slices that ended since then, oldest first."""
        found: list[Slice] = []
        for piece in reversed(self._slices):
            if piece[3] < since_ns - 1_000_000_000 or len(found) == MAX_ANSWER:
                break  # slices end about in the order in which they are appended
            if piece[3] >= since_ns:
                found.append(piece)
        found.reverse()
        return found


class Desk:
    """Answers for the past of a process, and passes on what peers ask of those behind it."""

    def __init__(
        self,
        me: Identity,
        tracer: Tracer,
        *,
        rank: int = 0,
        recorder: Recorder | None = None,
        steps: Callable[[int], list[StepNote]] = lambda since_ns: [],
        slices: Callable[[int], list[Slice]] = lambda since_ns: [],
        work: Work | None = None,
        on_records: Callable[[Records], None] = lambda records: None,
    ) -> None:
        """
        Args:
            rank: of an executor.
            recorder: that others fill, too; None: one of its own.
            steps: of a scheduler: what steps that ended since then held.
            slices: those that are made only now, beside the recorder's. Both by our clock.
            work: of an executor.
            on_records: of a gateway: answers to what it asked.
        """
        self.recorder = recorder or Recorder()
        self._me, self._tracer, self._rank = me, tracer, rank
        self._steps, self._slices, self._on_records = steps, slices, on_records
        self._work = work
        self._asked: OrderedDict[int, str] = OrderedDict()  # op_id -> name of the peer
        if me.process is not None:
            tracer.clock = me.process.clock
            me.process.observer = self

    @property
    def num_dropped(self) -> int:
        """Spans that no exporter took."""
        return self._tracer.num_dropped

    def take(self, message: Observed, peer: str, process: Process) -> None:
        """See `wire.process.Observer`."""
        match message:
            case GetRecords(op_id=op_id):
                if op_id in self._asked:
                    return  # by another way
                self._asked[op_id] = peer
                if len(self._asked) > MAX_ASKED:
                    self._asked.popitem(last=False)
                process.send(peer, self.answer(message))
                process.pass_on(message)
            case Records(op_id=op_id):
                if asker := self._asked.get(op_id):
                    process.send(asker, message)
                else:
                    self._on_records(message)
            case KeepTrace(trace_id=trace_id):
                self._tracer.keep(trace_id)
                process.pass_on(message)

    def answer(self, order: GetRecords) -> Records:
        """What this process has."""
        ahead_ns = self._tracer.clock.ahead_ns
        slices: list[Slice] = []
        steps: list[StepNote] = []
        if order.since_ns:
            since_ns = order.since_ns + ahead_ns
            slices = self.recorder.since(since_ns) + self._slices(since_ns)
            steps = self._steps(since_ns)
        work, peaks = list[tuple[int, float, float]](), (0.0, 0.0)
        if self._work is not None and slices:
            work, peaks = self._work.of_steps(min(piece[1] for piece in slices)), self._work.peaks
        if ahead_ns:
            slices = [(k, s, a - ahead_ns, b - ahead_ns, v) for k, s, a, b, v in slices]
        return Records(
            order.op_id,
            self._me.name,
            self._me.service,
            slices,
            steps,
            self._tracer.spans_of(order.trace_id) if order.trace_id else b"",
            self._rank,
            work,
            peaks,
        )
