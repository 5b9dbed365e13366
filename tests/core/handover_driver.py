"""Drives a decode side and a prefill side; the test says when their messages and copies arrive."""

from collections import deque

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    HandOff,
    HandOffDone,
    HandOffRefused,
    HandOffRenew,
    KvStatus,
    LoadBlocks,
    OpDone,
    PrefillFor,
    ReleaseBlocks,
    Reset,
    StoreBlocks,
)
from services.scheduler.core.events import DecoderDown, PrefillerDown, PrefillerUp, Send
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.store import Order, SimArea, Truth, begin
from tests.core.driver import CONFIG, EXECUTOR, Driver

PREFILLER, DECODER = "scheduler-1", "scheduler-0"
BETWEEN = (PrefillFor, HandOff, HandOffRefused, HandOffRenew, HandOffDone)
Between = PrefillFor | HandOff | HandOffRefused | HandOffRenew | HandOffDone


class Side(Driver):
    """One of the two groups: what it says to the other and orders of its executor waits."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.said: deque[Between] = deque()
        self.ops: list[Order] = []
        self.area = SimArea()
        super().__init__(config)

    def say(self, kind: type[Between]) -> Between:
        """Take the oldest message to the other side, which must be of this kind."""
        message = self.said.popleft()
        assert isinstance(message, kind), message
        return message

    def answer(self, op: Order, done: OpDone) -> None:
        """The executor says how an op has ended."""
        self.ops.remove(op)
        self.mail(done, EXECUTOR)

    def _route(self, send: Send) -> None:
        match send.message:
            case StoreBlocks() | LoadBlocks():
                begin(send.message, self.device.kv)
                self.ops.append(send.message)
            case ReleaseBlocks(op_ids=op_ids):
                self.area.release(op_ids)
            case Reset():
                self.ops.clear()
                self.area.clear()
                super()._route(send)
            case message if isinstance(message, BETWEEN):
                self.said.append(message)
            case _:
                super()._route(send)


class HandoverDriver:
    """`decode` has the clients, `prefill` computes their prompts."""

    def __init__(self, config: SchedulerConfig = CONFIG) -> None:
        self.decode, self.prefill = Side(config), Side(config)
        self.truth = Truth(self.decode.capacity, self.decode.requests)
        self.decode.feed(PrefillerUp(PREFILLER))

    def ask(self, prompt: list[int] | int, max_tokens: int = 8, **fields: object) -> SimRequest:
        """A request whose prompt the other side is to compute."""
        return self.decode.ask(prompt, max_tokens, prefill_at=PREFILLER, **fields)

    def deliver(self, message: Between) -> None:
        """A message reaches whom it is for."""
        if isinstance(message, PrefillFor | HandOffRenew | HandOffDone):
            self.prefill.mail(message, DECODER)
        else:
            self.decode.mail(message, PREFILLER)

    def talk(self) -> None:
        """All messages arrive."""
        while self.decode.said or self.prefill.said:
            for side in (self.decode, self.prefill):
                if side.said:
                    self.deliver(side.said.popleft())

    def copy(self, *, is_full: bool = False) -> None:
        """The prefill side's executor makes the oldest copy."""
        op = self.prefill.ops[0]
        assert isinstance(op, StoreBlocks)
        area, kv = self.prefill.area, self.prefill.device.kv
        self.prefill.answer(op, area.keep(op, kv, self.truth, is_full=is_full))
        self.prefill.tick()

    def load(self, *, lost: frozenset[int] = frozenset()) -> None:
        """The decode side's executor pulls for the oldest load; moves in `lost` fail."""
        op = self.decode.ops[0]
        assert isinstance(op, LoadBlocks)
        self.decode.answer(op, self.prefill.area.load(op, self.decode.device.kv, lost))

    def offered(self, request: SimRequest) -> HandOff:
        """Bring a request to where its prompt is computed and copied; the offer, undelivered."""
        self.decode.tick()
        self.deliver(self.decode.say(PrefillFor))
        self.prefill.run()
        self.copy()
        offer = self.prefill.say(HandOff)
        assert isinstance(offer, HandOff)
        assert not request.terminals
        return offer

    def loading(self, request: SimRequest) -> LoadBlocks:
        """Bring a request to where its prompt is being pulled."""
        self.deliver(self.offered(request))
        self.decode.tick()
        op = self.decode.ops[0]
        assert isinstance(op, LoadBlocks)
        return op

    def finish(self) -> None:
        """Everything that waits ends well; then both sides must be clean."""
        for _ in range(200):
            self.talk()
            for side in (self.decode, self.prefill):
                side.run(to_end=False)
            if self.prefill.ops:
                self.copy()
            if self.decode.ops:
                self.load()
            self.talk()
            if not (self.decode.ops or self.prefill.ops or self.decode.core.registry.live):
                break
        self.talk()
        self.decode.assert_clean()
        assert self.prefill.core.handovers.offers.num_open == 0
        assert self.decode.core.handovers.asks.num_open == 0
        assert self.prefill.area.num_copies == 0

    def cut(self) -> None:
        """The link between the schedulers is lost, with what was on its way."""
        self.decode.said.clear()
        self.prefill.said.clear()
        self.decode.feed(PrefillerDown(PREFILLER))
        self.prefill.feed(DecoderDown(DECODER))


def failed(op: Order) -> OpDone:
    """The executor could not move anything."""
    return OpDone(op.op_id, op.engine_epoch, KvStatus.ERROR, bytes(len(op.moves)))
