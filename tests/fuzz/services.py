"""Each service's receive path under damaged mail: nothing may escape it, and it serves on.

The services are the real ones, without their threads: mail is handed to the method that their loop
hands it to.
"""

import atexit
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from deepmesh import telemetry
from deepmesh.config import (
    Config,
    ExecutorConfig,
    KvstoreConfig,
    LinksConfig,
    MeshConfig,
    RouterConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from deepmesh.telemetry import Tracer
from deepmesh.wire import messages as m
from deepmesh.wire.link import Peer, PeerDown, PeerUp
from services.executor.fake import FakeEngine
from services.executor.service import ExecutorService
from services.executor.stream import StreamExecutor
from services.gateway.exposition import Exposition
from services.gateway.live_figures import Figures
from services.gateway.live_mesh import MeshMap
from services.gateway.metrics import Metrics
from services.gateway.streams import StreamLimits, Streams
from services.gateway.tokenizers import Tokenizers
from services.kvstore.service import KvStoreService
from services.router.service import RouterService
from services.scheduler.service import SchedulerService
from services.tokenizer.actions import Prepare
from services.tokenizer.book import Clock
from services.tokenizer.core import Core
from services.tokenizer.prepare import Preparer
from services.tokenizer.service import prepare
from services.tokenizer.spans import Stamps
from tests.core.driver import CAPACITY
from tests.fuzz.mail import mail, messages
from tests.fuzz.source import Source
from tests.wire.examples import EXAMPLES, RID

MODEL = Path(__file__).parents[2] / "models" / "tiny"
IDS = b"\x05\x00\x00\x00"
PROMPT = IDS * 20
GENERATE = m.Generate(RID, 1, "tokenizer-0", PROMPT, 20, max_tokens=8, stop_ids=b"\x01\x00\x00\x00")
CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
SUBMIT = m.Submit(RID, "chat", CHAT, 5, created_s=1)
ROWS = m.TokenBatch(1, 1, [m.TokenRow(RID, 0, IDS * 3)])
# a link answers these itself, and a service that is told to end does
LINK = (m.Hello, m.Welcome, m.Refused, m.Heartbeat, m.Drain, m.Shutdown)
KNOWN: tuple[m.AnyMessage, ...] = (
    *(example for example in EXAMPLES if not isinstance(example, LINK)),
    *(GENERATE, GENERATE, SUBMIT, SUBMIT, ROWS, ROWS),
)
MOST_STATS = 4


@contextmanager
def logging_nothing() -> Iterator[None]:
    """Refusals of all that is thrown at services would be a line each."""
    loggers = [logging.getLogger(name) for name in ("services", "deepmesh")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _peer(service: str, name: str) -> Peer:
    return Peer(service, name, name, b"i" * 8)


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))  # short: sockets lie in it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _config() -> Config:
    return Config(
        mesh=MeshConfig(run_dir=str(_folder()), model=str(MODEL)),
        links=LinksConfig(),
        scheduler=SchedulerConfig(max_rows=8, step_tokens=64, chunk_tokens=32, count=2),
        executor=ExecutorConfig(kind="fake", global_blocks=16, window_blocks=16),
        router=RouterConfig(count=1),
        kvstore=KvstoreConfig(count=1, memory_bytes=1 << 20, shared_dir="off", disk_bytes=1 << 20),
        telemetry=TelemetryConfig(enabled=False),
    )


@cache
def _tracer() -> Tracer:
    return telemetry.setup("gateway", "gateway-0", _config())


def _heartbeats(source: Source) -> list[m.ServiceStats]:
    example = next(each for each in EXAMPLES if isinstance(each, m.Heartbeat))
    found = messages([example], source, MOST_STATS)
    return [beat.stats for beat in found if isinstance(beat, m.Heartbeat)]


def scheduler(data: bytes) -> None:
    """A scheduler with an engine and a request, and one peer that goes mad."""
    source = Source(data)
    service = SchedulerService(_config(), index=0, tracer=_tracer())
    names = ("executor-0-0", "tokenizer-0", "router-0", "kvstore-0", "scheduler-1", "operator-0")
    peers = {name: _peer(name.split("-")[0], name) for name in names}
    try:
        service.turn([PeerUp(peer) for peer in peers.values()])
        epoch = service.core.group.engine_epoch
        service.turn([mail(peers["executor-0-0"], replace(CAPACITY, engine_epoch=epoch))])
        service.turn([mail(peers["tokenizer-0"], GENERATE)])
        liar = peers[source.pick(names)]
        for message in messages(KNOWN, source):
            service.turn([mail(liar, message)])
        service.turn([PeerDown(liar, "mad")])
        service._stats()
    finally:
        service._ready.close()
        service._planning.close()
        service.inbox.close()


@cache
def _preparer() -> Preparer:
    return Preparer(_config())


def tokenizer(data: bytes) -> None:
    """A tokenizer with a stream, between peers of which one goes mad."""
    source = Source(data)
    core, preparer = Core("tokenizer-0", _config()), _preparer()
    clock, stats = Clock(1000.0, 10**18), m.ServiceStats(True, 0, [m.ReplicaStats("s", True)])
    engine = _peer("scheduler", "scheduler-0")
    engine.stats = stats

    def act() -> None:
        for action in core.take():
            if isinstance(action, Prepare):
                found = prepare(preparer, action.submit, core.context(512), action.record)
                core.prepared(action.submit.rid, found, 1, clock)

    core.scheduler_up(engine, clock)
    core.router_up("router-0", clock) if source.below(2) else None
    core.gateway_mail(SUBMIT, Stamps("gateway-0", 1, 2), clock)
    act()
    hears = source.pick(
        (core.gateway_mail, core.scheduler_mail, core.scheduler_mail, core.router_mail)
    )
    for message in messages(KNOWN, source):
        hears(message, Stamps("scheduler-0", 1, 2), clock)
        core.store_mail(message, clock)
        act()
    for stats in _heartbeats(source):
        engine.stats = stats
        core.stats()
    core.scheduler_down("scheduler-0", clock)
    core.gateway_down("gateway-0", clock)
    core.tick(Clock(clock.now + 1000, clock.wall_ns))
    core.fail_all("over", clock)
    core.take()


def router(data: bytes) -> None:
    """A router with a replica and a kvstore."""
    source = Source(data)
    service = RouterService(_config(), tracer=_tracer())
    names = ("tokenizer-0", "scheduler-0", "kvstore-0", "scheduler-1")
    peers = [_peer(name.split("-")[0], name) for name in names]
    try:
        for peer in peers:
            service._take(PeerUp(peer))
            if peer.service == "scheduler":
                service._by_name[peer.name] = service._dialers[0]
        liar = source.pick(peers)
        for stats in _heartbeats(source):
            service._send(service.placements.heartbeat("scheduler-0", stats, time.monotonic()))
        for message in messages(KNOWN, source):
            service._take(mail(liar, message))
        service._take(mail(peers[0], GENERATE))
        service._take(PeerDown(liar, "mad"))
        service._stats()
    finally:
        service._ready.close()
        service._inbox.close()


def kvstore(data: bytes) -> None:
    """A kvstore with memory, disk and records."""
    source = Source(data)
    service = KvStoreService(_config(), index=0, tracer=_tracer())
    peers = [_peer("executor", "executor-0-0"), _peer("tokenizer", "t"), _peer("operator", "o")]
    try:
        liar = source.pick(peers)
        service._on_event(PeerUp(liar))
        for message in messages(KNOWN, source):
            service._on_event(mail(liar, message, [source.take(64)] * source.below(3)))
        service._on_event(PeerDown(liar, "mad"))
        service._orders.tick(time.monotonic() + 1e4)
        service.tiers.expire()
        service.records.expire(time.time() + 1e9)
        service._report_blocks()
        service._stats()
    finally:
        service.close()


def executor(data: bytes) -> None:
    """An executor's loop, up to its device: a step of nonsense is the device's to refuse."""
    source, config = Source(data), _config()

    def make(on_result: object, on_progress: object) -> StreamExecutor:
        return StreamExecutor(FakeEngine(config))

    service = ExecutorService(config, make, index=0, rank=0, tracer=_tracer())
    peer = _peer("scheduler", "scheduler-0")
    try:
        service._on_event(PeerUp(peer))
        for message in messages(KNOWN, source):
            if not isinstance(message, m.Load):  # reads files: its folder is the scheduler's word
                service._on_event(mail(peer, message))
        service._send_results()
        service._send_transfers()
        service._send_compiled()
    finally:
        service._ready.close()
        service._display.close()
        if service._transfers is not None:
            service._transfers.close()
        service._executor.close()
        service._inbox.close()


class _Link:
    """A dialler whose other end takes everything."""

    def __init__(self, peer: Peer) -> None:
        self.peer: Peer | None = peer

    def send(self, message: m.AnyMessage) -> bool:
        return True


def gateway(data: bytes) -> None:
    """A gateway's streams, metrics and page under a tokenizer that goes mad."""
    source = Source(data)
    peer = _peer("tokenizer", "tokenizer-0")
    tokenizers = Tokenizers([_Link(peer)])
    streams, metrics = Streams(tokenizers, StreamLimits()), Metrics()
    exposition = Exposition(metrics, streams, tokenizers, "tiny")
    figures, mesh = Figures(metrics), MeshMap(_config(), "gateway-0")
    stream = streams.open(SUBMIT)
    for message in messages(KNOWN, source):
        streams.handle(mail(peer, message))
    for stats in _heartbeats(source):
        peer.stats = stats
        assert len(exposition.text()) < 1 << 20
        figures.tick(exposition.known_replicas(), time.monotonic())
        mesh.tick(stats.links, time.monotonic())
        assert isinstance(tokenizers.problem, str)
        assert tokenizers.is_ready in (True, False)
    streams.handle(PeerDown(peer, "mad"))
    streams.sweep()
    streams.close(stream)
