"""A simulated tokenizer: places requests, asks again, attaches, acknowledges, stops and aborts."""

from collections.abc import Callable
from enum import Enum

from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    AckRow,
    Attach,
    ErrorCode,
    Failed,
    Finished,
    StopAt,
    TokenBatch,
    TokenRow,
)

from ..core.events import Incoming
from .clock import MS, Clock
from .link import Link
from .requests import SimRequest

ASKED_NS = 20 * MS  # an answer to Attach is waited for before the next gap asks again
REMIND_NS = 400 * MS  # a request without a word for so long is asked for
MOST_REMIND_NS = 16 * REMIND_NS


class State(Enum):
    """What the tokenizer believes about a request."""

    SENT = "sent"
    RUNNING = "running"


class SimTokenizer:
    """Believes only what arrives; every message it sends is idempotent."""

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        link: Link,
        to_core: Callable[[str, Incoming], None],
        on_end: Callable[[SimRequest], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.link = link
        self.incarnation = b"1"
        self.is_reading = True  # False: a slow client, nothing is acknowledged
        self.num_attached = 0
        self._clock = clock
        self._to_core = to_core
        self._on_end = on_end
        self._mine: dict[bytes, tuple[SimRequest, State]] = {}
        self._received: dict[bytes, int] = {}  # output tokens this incarnation has seen
        self._heard: dict[bytes, int] = {}
        self._asked: dict[bytes, int] = {}  # when it last attached

    def submit(self, request: SimRequest) -> None:
        """A new request of a client."""
        self._received[request.rid] = 0
        self._generate(request)
        if request.abort_ns:
            self._clock.at(request.abort_ns, lambda: self._abort(request))
        self._clock.at(REMIND_NS, lambda: self._remind(request))

    def knows(self, request: SimRequest) -> bool:
        """It is one of its requests, and has not ended."""
        return request.rid in self._mine

    def abort_now(self, request: SimRequest) -> None:
        """Its client goes in this very moment: nothing happens before the scheduler hears of it.
        Without a link the scheduler hears of it from another tokenizer, which knows no attempt."""
        request.is_aborted = True
        self._to_core(self.name, Abort(request.rid, request.attempt if self.link.is_up else 0))

    def link_up(self) -> None:
        """Ask for everything that has not ended."""
        for request, _ in list(self._mine.values()):
            self._attach(request)

    def restart(self) -> None:
        """Another process takes the name: it knows of no token, and asks for all of them."""
        self.incarnation += b"+"
        self.is_reading = True
        self._received = dict.fromkeys(self._received, 0)

    def read(self, *, is_reading: bool) -> None:
        """The clients take tokens, or do not."""
        self.is_reading = is_reading
        if is_reading:
            self._ack(list(self._mine))

    def receive(self, message: Accepted | TokenBatch | Finished | Failed) -> None:
        """Mail of the scheduler."""
        match message:
            case Accepted(rid=rid):
                self._hear(rid)
            case TokenBatch(rows=rows):
                for row in rows:
                    self._tokens(row)
                if self.is_reading:
                    self._ack([row.rid for row in rows])
            case Finished() | Failed():
                self._ended(message)

    # ------------------------------------------------------------ what arrives

    def _hear(self, rid: bytes) -> None:
        self._heard[rid] = self._clock.now
        if rid in self._mine:
            self._mine[rid] = (self._mine[rid][0], State.RUNNING)

    def _tokens(self, row: TokenRow) -> None:
        if row.rid not in self._mine:
            return  # it ended here before
        request, _ = self._mine[row.rid]
        self._hear(row.rid)
        received = self._received[row.rid]
        if row.pos > received:
            if self._clock.now - self._asked.get(row.rid, -ASKED_NS) >= ASKED_NS:
                self._attach(request)
            return
        request.take(row, self._clock.now)
        self._received[row.rid] = max(received, row.pos + len(row.ids) // 4)
        if request.stop_at and self._received[row.rid] >= request.stop_at:
            self._send(StopAt(row.rid, request.stop_at))

    def _ended(self, message: Finished | Failed) -> None:
        rid = message.rid
        if rid in self._mine:
            request, _ = self._mine[rid]
            if isinstance(message, Failed) and message.code == ErrorCode.UNKNOWN:
                self._generate(request)
                return
            if message.final_pos > self._received[rid]:
                self._attach(request)
                return
            request.end(message)
            request.ended_ns = self._clock.now
            self._on_end(request)
            del self._mine[rid]
        self._send(Ack([AckRow(rid, message.final_pos, done=True)]))

    # ------------------------------------------------------------ what leaves

    def _send(self, message: Incoming) -> None:
        self.link.send("back", lambda: self._to_core(self.name, message))

    def _ack(self, rids: list[bytes]) -> None:
        rows = [AckRow(rid, self._received[rid]) for rid in rids if rid in self._mine]
        if rows:
            self._send(Ack(rows))

    def _generate(self, request: SimRequest) -> None:
        request.attempt += 1
        self._mine[request.rid] = (request, State.SENT)
        self._send(request.generate(self.name))

    def _attach(self, request: SimRequest) -> None:
        self.num_attached += 1
        self._asked[request.rid] = self._clock.now
        received = self._received[request.rid]
        self._send(Attach(request.rid, request.attempt, self.name, received))

    def _abort(self, request: SimRequest) -> None:
        if request.rid in self._mine:
            request.is_aborted = True
            self._send(Abort(request.rid, request.attempt))

    def _remind(self, request: SimRequest, waited_ns: int = REMIND_NS) -> None:
        """Time alone: repeat what was not answered, more and more seldom."""
        if request.rid not in self._mine:
            return
        _, state = self._mine[request.rid]
        if request.is_aborted:
            self._send(Abort(request.rid, request.attempt))
        elif state is State.SENT:
            self._send(request.generate(self.name))
        elif self._clock.now - self._heard.get(request.rid, 0) >= REMIND_NS:
            self._attach(request)
        wait_ns = min(2 * waited_ns, MOST_REMIND_NS)
        self._clock.at(wait_ns, lambda: self._remind(request, wait_ns))
