"""The tokenizer process: links, threads for long prompts, and the loop around `Core`."""

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec.structs import replace

from deepmesh import log
from deepmesh.checksum import crc32
from deepmesh.config import Config
from deepmesh.health import Readiness
from deepmesh.recorder import Desk, Kind
from deepmesh.telemetry import Tracer
from deepmesh.wire.inbox import AsyncInbox, Endpoint
from deepmesh.wire.link import Identity, LinkEvent, Mail, PeerDown, PeerUp
from deepmesh.wire.messages import (
    Drain,
    ErrorCode,
    Failed,
    Finished,
    FlushCache,
    Generate,
    Record,
    ServiceStats,
    SetLogLevel,
    Shutdown,
    Submit,
    TokenBatch,
)
from deepmesh.wire.sockets import Dialer, Listener
from services.tokenizer.actions import Action, Prepare, ToGateway, ToScheduler, ToStore, Trace
from services.tokenizer.answers import Answer
from services.tokenizer.book import Clock
from services.tokenizer.core import Core
from services.tokenizer.generation import Generation
from services.tokenizer.jobs import Follow, Job
from services.tokenizer.panics import panics_as_errors
from services.tokenizer.prepare import Preparer
from services.tokenizer.refusal import Refusal
from services.tokenizer.request_log import note_placement, note_refusal
from services.tokenizer.spans import Stamps
from services.tokenizer.store_orders import Wanted

TICK_S = 0.25
MAX_ROWS = 2048  # token rows that are read in one go; about 10 ms
INLINE_BYTES = 32 << 10  # longer bodies are encoded in a thread (4.5k tokens take 5 ms)
MAX_PREPARING_BYTES = 32 << 20  # of bodies in threads or waiting for one; several seconds' work
DRAIN_S = 5.0  # after SIGTERM; the supervisor waits a little longer
BUSY_RETRY_S = 2.0
RECORD_S = 0.005  # from what happened to its span in the file
_log = logging.getLogger(__name__)

Prepared = Generation | Answer | Wanted | Job | Follow | Refusal


class Service:
    """Feeds mail to the core and carries out what it decides."""

    def __init__(self, config: Config, index: int, preparer: Preparer, tracer: Tracer) -> None:
        me = Identity.new("tokenizer", f"tokenizer-{index}", config)
        self._config = config
        self._preparer = preparer
        self._tracer = tracer
        self._desk = Desk(me, tracer)
        self._core = Core(me.name, config, preparer.vocabulary)
        self._threads = ThreadPoolExecutor(2, "encode")
        self._preparing_bytes = 0
        self._listener = Listener(config.tokenizer_address(index), me, config.links, self._stats)
        self._dialers: dict[str, Dialer] = {}  # by the name of the scheduler
        self._inbox = AsyncInbox(self._on_event, self._read)
        self._unread: deque[Mail] = deque()  # tokens and ends of schedulers
        self._spans: list[Trace] = []
        self._recorder: asyncio.TimerHandle | None = None
        self._inbox.add(self._listener)
        for scheduler in range(config.scheduler.count):
            address = config.scheduler_address(scheduler)
            self._inbox.add(Dialer(address, me, config.links, self._stats))
        self._router: Dialer | None = None
        if config.router_address:
            self._router = Dialer(config.router_address, me, config.links, self._stats)
            self._inbox.add(self._router)
        self._stores = [
            Dialer(config.kvstore_address(index), me, config.links, self._stats)
            for index in range(config.kvstore.count)
        ]
        for store in self._stores:
            self._inbox.add(store)
        self._ready = Readiness(config.mesh.run_dir, me.name, lambda: self._core.stats().ready)
        self._stop: asyncio.Event | None = None
        self._drain_until = 0.0
        self._error: Exception | None = None
        self._said = {""}  # why replicas get nothing, as logged

    @property
    def address(self) -> str:
        """Where gateways reach this process."""
        return self._listener.address

    async def run(self) -> None:
        """Until `stop`; then what runs may finish for a few seconds.

        Requests that have not ended by then are not lost: their gateways send them to another
        tokenizer, or to the next instance of this one, and their schedulers go on meanwhile.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._broken)
        self._stop = asyncio.Event()
        self._inbox.start(loop)
        try:
            while not self._is_drained():
                self._core.tick(_clock())
                self._act()
                self._ready.look()
                await self._pause()
            await asyncio.sleep(0.05)  # let the last messages leave
        finally:
            self._record()
            self._ready.close()
            self._inbox.close()
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._error is not None:
            raise self._error

    def stop(self, within_s: float = DRAIN_S) -> None:
        """Take nothing new, finish what is there, then end."""
        if not self._core.draining:
            _log.info("stops; %d requests run", self._core.num_live)
            self._core.draining = True
            self._listener.announce()  # gateways send new requests elsewhere from now on
        self._drain_until = time.monotonic() + within_s
        if self._stop is not None:
            self._stop.set()

    # ------------------------------------------------------------ loop

    async def _pause(self) -> None:
        assert self._stop is not None
        if self._core.draining:  # the event stays set: poll
            await asyncio.sleep(0.02)
            return
        try:
            await asyncio.wait_for(self._stop.wait(), TICK_S)
        except TimeoutError:
            return

    def _is_drained(self) -> bool:
        if not self._core.draining:
            return False
        return self._core.num_live == 0 or time.monotonic() >= self._drain_until

    def _on_event(self, endpoint: Endpoint, event: LinkEvent) -> None:
        if isinstance(endpoint, Dialer) and event.peer.service == "router":
            self._from_router(endpoint, event)
        elif isinstance(endpoint, Dialer) and event.peer.service == "kvstore":
            self._from_store(event)
        elif isinstance(endpoint, Dialer):
            self._from_scheduler(endpoint, event)
        else:
            self._from_gateway(event)
        self._act()

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: a bug. State may be half changed, so the process ends."""
        loop.default_exception_handler(context)
        error: object = context.get("exception")
        self._error = error if isinstance(error, Exception) else RuntimeError(context["message"])
        self.stop(0.0)

    def _from_scheduler(self, dialer: Dialer, event: LinkEvent) -> None:
        if isinstance(event, PeerUp | PeerDown):
            while self._unread:
                self._read_some()
        match event:
            case PeerUp(peer=peer):
                _log.info("%s is up", peer.name)
                self._dialers[peer.name] = dialer
                self._core.scheduler_up(peer, _clock())
            case PeerDown(peer=peer, reason=reason):
                _log.warning("%s is lost: %s", peer.name, reason)
                self._core.scheduler_down(peer.name, _clock())
            case Mail(message=TokenBatch() | Finished() | Failed()):
                self._unread.append(event)  # what comes together is read together
            case Mail(peer=peer, message=message):
                stamps = Stamps(peer.name, event.sent_ns, event.received_ns)
                self._core.scheduler_mail(message, stamps, _clock())

    def _read(self) -> None:
        """Tokens that have come, and the ends behind them, as much as fits a slice of the loop."""
        if not self._unread:
            return
        self._read_some()
        self._act()
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read)

    def _read_some(self) -> None:
        first, num_rows = self._unread[0], 0
        batches: list[TokenBatch] = []
        ends: list[Mail] = []
        while self._unread and self._unread[0].peer is first.peer and num_rows < MAX_ROWS:
            mail = self._unread.popleft()
            if isinstance(mail.message, TokenBatch):
                batches.append(mail.message)
                num_rows += len(mail.message.rows)
            else:
                ends.append(mail)
        clock = _clock()
        if batches:
            self._core.tokens(batches, _stamps(first), clock)
            step, now_ns = batches[-1].group_step, time.time_ns()
            self._desk.recorder.add((Kind.DETOKENISE, step, clock.wall_ns, now_ns, num_rows))
        for end in ends:
            self._core.scheduler_mail(end.message, _stamps(end), clock)

    def _from_router(self, dialer: Dialer, event: LinkEvent) -> None:
        match event:
            case PeerUp(peer=peer):
                _log.info("%s is up", peer.name)
                self._dialers[peer.name] = dialer
                self._core.router_up(peer.name, _clock())
            case PeerDown(peer=peer, reason=reason):
                _log.warning("%s is lost: %s", peer.name, reason)
                self._core.router_down(_clock())
            case Mail(peer=peer, message=message):
                stamps = Stamps(peer.name, event.sent_ns, event.received_ns)
                self._core.router_mail(message, stamps, _clock())

    def _from_store(self, event: LinkEvent) -> None:
        match event:
            case PeerUp(peer=peer):
                _log.info("%s is up", peer.name)
                self._core.store_up(_clock())
            case PeerDown(peer=peer, reason=reason):
                _log.warning("%s is lost: %s", peer.name, reason)
            case Mail(message=message):
                if isinstance(message, Record) and message.detail:
                    _log.warning("%s of %s: %s", message.status.name, message.id, message.detail)
                self._core.store_mail(message, _clock())

    def _from_gateway(self, event: LinkEvent) -> None:
        match event:
            case PeerUp(peer=peer):
                _log.info("%s is up", peer.name)
            case PeerDown(peer=peer, reason=reason):
                _log.info("%s is gone: %s", peer.name, reason)
                self._core.gateway_down(peer.name, _clock())
            case Mail(message=Drain(deadline_s=within_s)):
                self.stop(within_s)
            case Mail(message=FlushCache() | SetLogLevel() as order):
                if isinstance(order, SetLogLevel):
                    log.set_level(order.level)
                for dialer in self._dialers.values():
                    dialer.send(order)  # gateways reach schedulers through tokenizers only
            case Mail(message=Shutdown()):
                self._core.fail_all("the mesh is shutting down", _clock())
                self.stop(0.0)
            case Mail(peer=peer, message=message):
                stamps = Stamps(peer.name, event.sent_ns, event.received_ns)
                self._core.gateway_mail(message, stamps, _clock())

    # ------------------------------------------------------------ actions

    def _act(self) -> None:
        while actions := self._core.take():
            for action in actions:
                if isinstance(action, Trace):
                    end_ns = action.end_ns or time.time_ns()
                    self._spans.append(action._replace(end_ns=end_ns))
                else:
                    self._carry_out(action)
        if self._spans and self._recorder is None:
            loop = asyncio.get_running_loop()
            self._recorder = loop.call_later(RECORD_S, self._record)

    def _record(self) -> None:
        """Spans, a moment after the messages: these leave once the loop waits."""
        self._recorder = None
        spans, self._spans = self._spans, []
        for span in spans:
            self._carry_out(span)

    def _carry_out(self, action: Action) -> None:
        match action:
            case ToGateway(name=name, message=message):
                self._listener.send(name, message)  # False: it asks again when it is back
            case ToScheduler(name=name, message=message):
                if isinstance(message, Generate):
                    note_placement(name, message)
                if dialer := self._dialers.get(name):
                    dialer.send(message)  # False: PeerDown follows and settles it
            case ToStore(message=message):
                store = self._stores[crc32(message.id.encode()) % len(self._stores)]
                store.send(message)  # False: who waits for the answer is told in time
            case Prepare(submit=submit, record=record):
                self._prepare(submit, record)
            case Trace():
                self._tracer.record(
                    action.name,
                    action.parent,
                    action.start_ns,
                    action.end_ns,
                    action.attributes,
                    error=action.error,
                )

    def _prepare(self, submit: Submit, record: bytes | None) -> None:
        """Long bodies in a thread: the library gives up the interpreter while it encodes."""
        context = self._core.context(self._preparer.context)
        if len(submit.body) + len(record or b"") <= INLINE_BYTES:
            began_ns = time.time_ns()
            outcome = prepare(self._preparer, submit, context, record, self._core.fingerprints)
            self._decided(submit, outcome, began_ns)
            return
        began_ns = time.time_ns()
        if self._preparing_bytes and self._preparing_bytes + len(submit.body) > MAX_PREPARING_BYTES:
            detail = "too many long prompts are being encoded already; try again later"
            busy = Refusal(detail, code=ErrorCode.OVERLOADED, retry_after_s=BUSY_RETRY_S)
            self._decided(submit, busy, began_ns)
            return
        self._preparing_bytes += len(submit.body)
        loop = asyncio.get_running_loop()
        task = loop.run_in_executor(self._threads, prepare, self._preparer, submit, context, record)
        task.add_done_callback(lambda done: self._prepared(submit, began_ns, done))

    def _prepared(self, submit: Submit, began_ns: int, done: "asyncio.Future[Prepared]") -> None:
        self._preparing_bytes -= len(submit.body)
        if done.cancelled():
            return
        self._decided(submit, done.result(), began_ns)
        self._act()

    def _decided(self, submit: Submit, outcome: Prepared, began_ns: int) -> None:
        if isinstance(outcome, Refusal):
            note_refusal(submit.rid, outcome)
        self._core.prepared(submit.rid, outcome, began_ns, _clock())

    def _stats(self) -> ServiceStats:
        stats = self._core.stats()
        for reason in {replica.refused for replica in stats.replicas} - self._said:
            self._said.add(reason)
            _log.error("%s", reason)
        known = [store.peer.stats for store in self._stores if store.peer is not None]
        router = self._router.peer if self._router is not None else None
        return replace(
            stats,
            stores=[figures for each in known for figures in each.stores],
            router=router.stats.router if router is not None else None,
        )


def prepare(
    preparer: Preparer,
    submit: Submit,
    context: int,
    record: bytes | None = None,
    fingerprints: tuple[str, ...] = (),
) -> Prepared:
    """`Preparer.prepare` with its refusals as values."""
    try:
        with panics_as_errors():
            return preparer.prepare(submit, context, record, fingerprints)
    except Refusal as refusal:
        return refusal
    except Exception as error:  # a bug fails this request alone: it would be sent here again
        _log.exception("cannot prepare a %s request", submit.protocol)
        return Refusal(f"The request cannot be converted: {error}", code=ErrorCode.INTERNAL)


def _stamps(mail: Mail) -> Stamps:
    return Stamps(mail.peer.name, mail.sent_ns, mail.received_ns)


def _clock() -> Clock:
    return Clock(time.monotonic(), time.time_ns())
