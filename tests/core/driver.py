"""Drives the core step by step: the test says when results arrive and when the device is done.

Behind it is the simulator's device, so every step is also checked against shadow KV, and after
every event the external writer fills what became free and `audit` looks at all invariants.
"""

import hashlib
from collections import deque
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    AckRow,
    Attach,
    Capacity,
    ErrorCode,
    Failed,
    Finished,
    GpuDone,
    Load,
    Reset,
    StepResult,
    StopAt,
    SubmitStep,
    TokenBatch,
)
from deepmesh.wire.packed import ROW
from services.scheduler.core.alignment import ChooseKind
from services.scheduler.core.audit import audit
from services.scheduler.core.events import (
    Action,
    Event,
    ExecutorDown,
    ExecutorUp,
    Mail,
    RequestEnded,
    Send,
    StepEnded,
    Tick,
    TokenizerDown,
    TokenizerUp,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.sim.device import Device
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.writer import ExternalWriter

TOKENIZER, EXECUTOR = "tokenizer-0", "executor-0-0"
SECOND = 1_000_000_000
VOCAB = 97
M = TypeVar("M")

CAPACITY = Capacity(
    engine_epoch=1,
    rank=0,
    num_global_blocks=64,
    num_window_blocks=64,
    num_state_blocks=32,
    num_slots=12,
    max_model_len=512,
    vocab_size=VOCAB,
    window=16,
    block_size=8,
    chunk_align=16,
    fingerprint="weights",
    has_masks=True,  # the simulated device misses one at times
)
CONFIG = SchedulerConfig(max_rows=8, step_tokens=64, chunk_tokens=32)


class Driver:
    """One core, one device, one tokenizer; nothing happens unless the test says so."""

    def __init__(
        self,
        config: SchedulerConfig = CONFIG,
        *,
        max_unacked: int = 2048,
        load: bool = True,
        kvstores: int = 0,
        choose_kind: ChooseKind | None = None,
        **capacity: int | bool | str,
    ) -> None:
        self.capacity = replace(CAPACITY, **capacity)
        self.core = Scheduler(
            config,
            name="scheduler-0",
            model="m",
            served_model="tiny",
            max_unacked=max_unacked,
            kvstores=kvstores,
            choose_kind=choose_kind,
        )
        self.device = Device(self.capacity, 0)
        self.now = SECOND
        self.requests: dict[bytes, SimRequest] = {}
        self.steps: deque[SubmitStep] = deque()  # submitted, body not run
        self.all_steps: list[SubmitStep] = []
        self.tails: deque[SubmitStep] = deque()  # body run, tail not run
        self.sent: list[Send] = []
        self.reports: list[Action] = []
        self.writer = ExternalWriter()
        self.lost = False  # the tokenizer's link is down: what is sent to it is lost
        self.unknown: list[bytes] = []  # attached to, but forgotten by the core
        self.audits = True  # after every event
        self._count = 0
        self.feed(TokenizerUp(TOKENIZER, b"t"))
        if load:
            self.load()

    def load(self) -> None:
        """The executor connects and loads."""
        self.feed(ExecutorUp(EXECUTOR, 0))
        epoch = self.last(Load).engine_epoch
        self.mail(replace(self.capacity, engine_epoch=epoch), EXECUTOR)

    # ------------------------------------------------------------ events

    def feed(self, event: Event) -> None:
        """One event, with all checks behind it."""
        for action in self.core.handle(event, self.now):
            if isinstance(action, Send):
                self.sent.append(action)
                self._route(action)
            else:
                self.reports.append(action)
        if self.audits:
            audit(self.core)
        self.writer.observe(self.core, [self.device])

    def mail(self, message: object, peer: str = TOKENIZER) -> None:
        """A message to the core."""
        self.feed(Mail(peer, message))  # type: ignore[arg-type]

    def tick(self, *, seconds: float = 0.0) -> None:
        """Plan; time passes before."""
        self.now += int(seconds * SECOND)
        self.feed(Tick())

    def body(self) -> StepResult:
        """The oldest step runs up to TOKENS_READY, and its result arrives."""
        step = self.steps.popleft()
        self.now += 1_000_000
        result = self.device.body(step)
        self.tails.append(step)
        self.mail(result, EXECUTOR)
        return result

    def tail(self) -> None:
        """The step whose body ran last is done on the device, and the watermark arrives."""
        step = self.tails.popleft()
        done = self.device.tail()
        self.mail(GpuDone(step.engine_epoch, 0, self.device.gpu_done, done), EXECUTOR)

    def step(self) -> None:
        """Plan, then run the oldest step to its end."""
        self.tick()
        if self.tails:
            self.tail()
        if self.steps:
            self.body()
            self.tail()

    def run(self, limit: int = 2000, *, to_end: bool = True) -> None:
        """Until nothing is in flight and nothing can be planned."""
        for _ in range(limit):
            self.step()
            if not self.steps and not self.tails:
                self.tick()
                if not self.steps:
                    return
        assert not to_end, "it does not come to an end"

    def lose_executor(self) -> None:
        """The executor dies, and with it what it had."""
        self.device = Device(self.capacity, 0)
        self.steps.clear()
        self.tails.clear()
        self.feed(ExecutorDown(EXECUTOR, 0))

    # ------------------------------------------------------------ the tokenizer

    def ask(self, prompt: list[int] | int, max_tokens: int = 8, **fields: object) -> SimRequest:
        """A new request; an int stands for a prompt of that length, different each time."""
        self._count += 1
        if isinstance(prompt, int):
            prompt = words(prompt, seed=self._count)
        rid = hashlib.blake2b(str(self._count).encode(), digest_size=16).digest()
        request = SimRequest(rid, prompt, max_tokens, seed=self._count, **fields)  # type: ignore[arg-type]
        self.requests[rid] = request
        self.mail(request.generate(TOKENIZER))
        return request

    def abort(self, request: SimRequest, attempt: int = 0) -> None:
        """The client is gone."""
        self.mail(Abort(request.rid, attempt or request.attempt))

    def ack(self, request: SimRequest, pos: int | None = None, *, done: bool = False) -> None:
        """The client took what there is."""
        pos = len(request.output) if pos is None else pos
        self.mail(Ack([AckRow(request.rid, pos, done)]))

    def attach(self, request: SimRequest, from_pos: int, reply_to: str = TOKENIZER) -> None:
        """Ask for its tokens again."""
        self.mail(Attach(request.rid, request.attempt, reply_to, from_pos), reply_to)

    def stop_at(self, request: SimRequest, n_keep: int) -> None:
        """A stop string was found."""
        self.mail(StopAt(request.rid, n_keep))

    def lose_tokenizer(self) -> None:
        """Its link is down: what is sent to it is lost."""
        self.lost = True
        self.feed(TokenizerDown(TOKENIZER))

    def regain_tokenizer(self, incarnation: bytes = b"t") -> None:
        """The link is back, and the tokenizer asks for its requests; or it is another process,
        which knows of none."""
        self.lost = False
        self.feed(TokenizerUp(TOKENIZER, incarnation))
        if incarnation != b"t":
            return
        forgotten = len(self.unknown)
        for request in self.requests.values():
            if not request.terminals:
                self.attach(request, len(request.output))
        for rid in self.unknown[forgotten:]:
            self.requests[rid].attempt += 1
            self.mail(self.requests[rid].generate(TOKENIZER))

    # ------------------------------------------------------------ what was seen

    def messages(self, kind: type[M]) -> list[M]:
        """All messages of a kind that the core sent."""
        return [send.message for send in self.sent if isinstance(send.message, kind)]

    def last(self, kind: type[M]) -> M:
        """The latest message of a kind."""
        return self.messages(kind)[-1]

    def ended(self) -> list[RequestEnded]:
        """Reports of requests that ended."""
        return [report for report in self.reports if isinstance(report, RequestEnded)]

    def steps_ended(self) -> list[StepEnded]:
        """Reports of steps that ended."""
        return [report for report in self.reports if isinstance(report, StepEnded)]

    def rows(self, at: int = -1) -> NDArray[np.void]:
        """Rows of a submitted step."""
        return np.frombuffer(self.all_steps[at].rows, ROW)

    def blocks(self, pool: int) -> tuple[int, int, int, int]:
        """free, evictable, fenced, held."""
        assert self.core.engine is not None
        blocks = self.core.engine.memories[0].pools[pool]
        return blocks.num_free, blocks.num_evictable, blocks.num_fenced, blocks.num_held

    def is_resident(self, request: SimRequest) -> bool:
        """It holds a slot."""
        live = self.core.registry.live.get(request.rid)
        return live is not None and live.slot >= 0

    def assert_clean(self) -> None:
        """I12: all requests ended rightly, and nothing of them is left."""
        for request in self.requests.values():
            request.verify(VOCAB)
            ends = sum(report.rid == request.rid for report in self.ended())
            assert ends == 1 + self.unknown.count(request.rid)
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.inflight_tokens) == (0, 0, 0)
        for pool in range(3):
            free, evictable, fenced, held = self.blocks(pool)
            assert (fenced, held) == (0, 0)
            assert free + evictable == stats.total_blocks[pool]

    def _route(self, send: Send) -> None:
        match send.message:
            case SubmitStep():
                self.steps.append(send.message)
                self.all_steps.append(send.message)
            case Reset():
                self.device.reset()
                self.steps.clear()
                self.tails.clear()
            case TokenBatch(rows=rows) if not self.lost:
                for row in rows:
                    self.requests[row.rid].take(row, self.now)
            case Failed(rid=rid, code=ErrorCode.UNKNOWN):
                self.unknown.append(rid)
            case Finished(rid=rid) | Failed(rid=rid) if not self.lost and rid in self.requests:
                self.requests[rid].end(send.message)
            case Accepted() | _:
                pass


def words(count: int, seed: int = 0) -> list[int]:
    """A prompt of `count` tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
