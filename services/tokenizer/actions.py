"""What the core wants done, collected so that peers get one message per batch."""

from collections import defaultdict
from typing import NamedTuple

from deepmesh.wire.messages import (
    Abort,
    Ack,
    AckRow,
    Attach,
    Delta,
    DeltaBatch,
    DropRecord,
    Generate,
    GetRecord,
    PutRecord,
    ResponseFailed,
    ResponseFinished,
    StopAt,
    Submit,
)

Value = str | int | float | bool
REPORT_STEPS = 4
NOW = 0  # end of a span that lasts until the actions before it are carried out


class ToGateway(NamedTuple):
    """Send to a gateway."""

    name: str
    message: DeltaBatch | ResponseFinished | ResponseFailed


class ToScheduler(NamedTuple):
    """Send to a scheduler."""

    name: str
    message: Generate | Attach | Ack | StopAt | Abort


class ToStore(NamedTuple):
    """Send to the kvstore that keeps the records of this id."""

    message: PutRecord | GetRecord | DropRecord


class Prepare(NamedTuple):
    """Check, convert and encode; hand the outcome to `Core.prepared`."""

    submit: Submit
    record: bytes | None = (
        None  # what a kvstore has under the id that was asked for; empty: nothing
    )


class Trace(NamedTuple):
    """A finished span."""

    name: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    error: str = ""


Action = ToGateway | ToScheduler | ToStore | Prepare | Trace


class Outbox:
    """Actions of one event. Deltas go before ends, so that no event follows its stream's end."""

    def __init__(self) -> None:
        self._deltas: defaultdict[str, list[Delta]] = defaultdict(list)
        self._acks: defaultdict[str, list[AckRow]] = defaultdict(list)
        self._took: dict[str, int] = {}  # steps to report, by scheduler
        self._told: dict[str, int] = {}  # as last reported; a new scheduler counts anew
        self._rest: list[Action] = []

    def delta(self, gateway: str, delta: Delta) -> None:
        """Events of one stream."""
        self._deltas[gateway].append(delta)

    def ack(self, scheduler: str, row: AckRow) -> None:
        """Tokens that need not be kept."""
        self._acks[scheduler].append(row)

    def took(self, scheduler: str, group_step: int) -> None:
        """All token batches up to this step have been turned into events; 0 of a replay. Told
        every few steps: each report wakes the scheduler."""
        if group_step and abs(group_step - self._told.get(scheduler, 0)) >= REPORT_STEPS:
            self._told[scheduler] = self._took[scheduler] = group_step

    def add(self, action: Action) -> None:
        """Anything else, in order."""
        self._rest.append(action)

    def take(self) -> list[Action]:
        """Everything so far."""
        if not (self._deltas or self._acks or self._took or self._rest):
            return []
        deltas = [ToGateway(name, DeltaBatch(rows)) for name, rows in self._deltas.items()]
        acks = [
            ToScheduler(name, Ack(self._acks.get(name, []), self._took.get(name, 0)))
            for name in self._acks.keys() | self._took
        ]
        actions = [*deltas, *self._rest, *acks]
        self._deltas.clear()
        self._acks.clear()
        self._took.clear()
        self._rest = []
        return actions
