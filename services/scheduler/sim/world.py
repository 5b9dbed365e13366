"""Deterministic discrete-event simulation of the real core: virtual time, one seed, no threads."""

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    AckRow,
    Capacity,
    Failed,
    Finished,
    GpuDone,
    Load,
    Reset,
    StopAt,
    SubmitStep,
    TokenBatch,
)

from ..core.audit import audit
from ..core.events import Event, ExecutorDown, ExecutorUp, Incoming, Mail, Send, Tick, TokenizerUp
from ..core.scheduler import Scheduler
from .device import Device
from .requests import SimRequest
from .writer import ExternalWriter

TOKENIZER = "tokenizer-0"
US = 1000
MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Times:
    """The time model, in ns."""

    link: int = 100 * US
    jitter: int = 80 * US
    step: int = 1 * MS
    token: int = 5 * US
    tail: int = 300 * US
    load: int = 5 * MS


@dataclass(slots=True)
class _Rank:
    device: Device
    up: bool = False
    free_at: int = 0
    incarnation: int = 0
    epoch: int = 0


class World:
    """Drives one core, its executors and one tokenizer until nothing happens any more."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        *,
        seed: int,
        ranks: int = 1,
        times: Times | None = None,
        check: bool = True,
        mask_miss: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.times = times or Times()
        self.now = 0
        self.core = Scheduler(config, name="scheduler-0", model="sim", ranks=ranks)
        self.requests: dict[bytes, SimRequest] = {}
        self.log = hashlib.sha256()
        self.num_events = 0
        self.writer = ExternalWriter()
        self.free_at_tokens_ready = False  # a fault: results claim that the step's tail is done
        self._check = check
        self._mask_miss = mask_miss
        self._capacity = capacity
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._link_free: dict[tuple[str, str], int] = {}
        self._ranks = [_Rank(Device(capacity, rank)) for rank in range(ranks)]
        self._feed(TokenizerUp(TOKENIZER, b"t"))
        for rank in range(ranks):
            self.at(0, lambda rank=rank: self._executor_up(rank))

    # ------------------------------------------------------------ the clock

    def at(self, delay: int, action: Callable[[], None]) -> None:
        """Do something `delay` ns from now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, action))

    def run(self, until_ns: int = 10**15) -> None:
        """Until the heap is empty of all but timers and every request has ended."""
        while self._heap and self._heap[0][0] <= until_ns:
            if self._ended() and self._idle():
                return
            self.now, _, action = heapq.heappop(self._heap)
            action()
            self.num_events += 1

    def submit(self, request: SimRequest) -> None:
        """Let a request arrive at its time."""
        self.requests[request.rid] = request
        self.at(max(0, request.arrival_ns - self.now), lambda: self._arrive(request))

    def kill_executor(self, rank: int, back_after_ns: int) -> None:
        """The executor dies now and is back, empty, later."""
        state = self._ranks[rank]
        if not state.up:
            return
        state.up = False
        state.incarnation += 1
        self._trace("kill", f"executor {rank}")
        self._feed(ExecutorDown(f"executor-0-{rank}", rank))
        self.at(back_after_ns, lambda: self._executor_up(rank, fresh=True))

    # ------------------------------------------------------------ checks

    def verify(self) -> None:
        """Every request ended once, with the oracle's tokens."""
        for request in self.requests.values():
            request.verify(self._capacity.vocab_size)

    @property
    def digest(self) -> str:
        """Hash of the event log: equal seeds give equal digests."""
        return self.log.hexdigest()

    # ------------------------------------------------------------ the core

    def _feed(self, event: Event) -> None:
        """One event into the core, a Tick behind it, actions out over the links."""
        for each in (event, Tick()):
            for action in self.core.handle(each, self.now):
                if isinstance(action, Send):
                    self._trace("send", f"{action.peer} {type(action.message).__name__}")
                    self._post(action)
            self.writer.observe(self.core, [rank.device for rank in self._ranks])
        if self._check:
            audit(self.core)

    def _post(self, send: Send) -> None:
        message = send.message
        match message:
            case Load() | SubmitStep() | Reset():
                rank = int(send.peer.rsplit("-", 1)[1])
                born = self._ranks[rank].incarnation
                self._deliver(send.peer, lambda: self._to_rank(rank, born, message))
            case Accepted() | TokenBatch() | Finished() | Failed():
                self._deliver(send.peer, lambda: self._to_tokenizer(message))

    def _deliver(self, link: str, action: Callable[[], None], *, back: bool = False) -> None:
        """FIFO links with jitter."""
        key = (link, "back" if back else "there")
        delay = self.times.link + self.random.randrange(self.times.jitter + 1)
        arrival = max(self._link_free.get(key, 0), self.now + delay)
        self._link_free[key] = arrival
        self.at(arrival - self.now, action)

    def _mail(self, peer: str, message: Incoming) -> None:
        self._trace("mail", f"{peer} {type(message).__name__}")
        self._feed(Mail(peer, message))

    def _trace(self, kind: str, text: str) -> None:
        self.log.update(f"{self.now} {kind} {text}\n".encode())

    # ------------------------------------------------------------ executors

    def _executor_up(self, rank: int, *, fresh: bool = False) -> None:
        state = self._ranks[rank]
        state.up = True
        state.free_at = self.now
        if fresh:
            state.device = Device(self._capacity, rank)
        self._feed(ExecutorUp(f"executor-0-{rank}", rank))

    def _to_rank(self, rank: int, born: int, message: Load | SubmitStep | Reset) -> None:
        state, peer = self._ranks[rank], f"executor-0-{rank}"
        if born != state.incarnation or not state.up:
            return
        match message:
            case Load():
                state.epoch = message.engine_epoch
                capacity = replace(self._capacity, rank=rank, engine_epoch=message.engine_epoch)
                self.at(
                    self.times.load,
                    lambda: self._answer(rank, born, state.epoch, peer, capacity),
                )
            case Reset():
                state.epoch = message.engine_epoch
                state.device.reset()
                state.free_at = self.now
            case SubmitStep():
                if message.engine_epoch == state.epoch:
                    self._schedule_step(rank, born, message)

    def _schedule_step(self, rank: int, born: int, step: SubmitStep) -> None:
        """Queue a step on the device stream: body, then tail, behind what runs already."""
        state = self._ranks[rank]
        begin = max(self.now, state.free_at)
        tokens = step.descriptor.padded_tokens
        length = self.times.step + tokens * self.times.token
        end = begin + length + self.random.randrange(length // 4 + 1)
        state.free_at = end + self.times.tail
        self.at(end - self.now, lambda: self._body(rank, born, step))
        self.at(state.free_at - self.now, lambda: self._tail(rank, born, step))

    def _alive(self, rank: int, born: int, epoch: int) -> bool:
        state = self._ranks[rank]
        return state.up and born == state.incarnation and epoch == state.epoch

    def _body(self, rank: int, born: int, step: SubmitStep) -> None:
        if not self._alive(rank, born, step.engine_epoch):
            return
        result = self._ranks[rank].device.body(
            step, unmasked=lambda _: self.random.random() < self._mask_miss
        )
        if self.free_at_tokens_ready:
            result = replace(result, gpu_done=step.step_id)
        self._answer(rank, born, step.engine_epoch, f"executor-0-{rank}", result)

    def _tail(self, rank: int, born: int, step: SubmitStep) -> None:
        if not self._alive(rank, born, step.engine_epoch):
            return
        device = self._ranks[rank].device
        done = device.tail()
        message = GpuDone(step.engine_epoch, rank, device.gpu_done, done)
        self._answer(rank, born, step.engine_epoch, f"executor-0-{rank}", message)

    def _answer(self, rank: int, born: int, epoch: int, peer: str, message: Incoming) -> None:
        if self._alive(rank, born, epoch):
            self._deliver(
                peer,
                lambda: self._mail(peer, message) if self._alive(rank, born, epoch) else None,
                back=True,
            )

    # ------------------------------------------------------------ the tokenizer

    def _arrive(self, request: SimRequest) -> None:
        self._mail_back(request.generate(TOKENIZER))
        if request.abort_ns:
            self.at(request.abort_ns, lambda: self._mail_back(Abort(request.rid, 1)))

    def _mail_back(self, message: Incoming) -> None:
        self._deliver(TOKENIZER, lambda: self._mail(TOKENIZER, message), back=True)

    def _to_tokenizer(self, message: Accepted | TokenBatch | Finished | Failed) -> None:
        match message:
            case Accepted():
                return
            case TokenBatch():
                self._tokens(message)
            case Finished() | Failed():
                request = self.requests[message.rid]
                request.terminals.append(message)
                request.ended_ns = self.now
                self._mail_back(Ack([AckRow(message.rid, len(request.output), True)]))

    def _tokens(self, batch: TokenBatch) -> None:
        acks: list[AckRow] = []
        for row in batch.rows:
            request = self.requests[row.rid]
            before = len(request.output)
            request.take(row, self.now)
            acks.append(AckRow(row.rid, len(request.output)))
            if request.stop_at and before < request.stop_at <= len(request.output):
                self._mail_back(StopAt(row.rid, request.stop_at))
        self._mail_back(Ack(acks))

    def _ended(self) -> bool:
        return all(request.terminals for request in self.requests.values())

    def _idle(self) -> bool:
        """Every step is applied, and every watermark has arrived."""
        group = self.core.group
        return not group.unresolved and all(
            self.core.engine is None or done >= applied
            for done, applied in zip(group.gpu_done, group.applied, strict=True)
        )
