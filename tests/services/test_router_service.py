"""The router over real sockets, between a fake tokenizer and fake schedulers."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepmesh.config import (
    Config,
    KvstoreConfig,
    MeshConfig,
    RouterConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from deepmesh.telemetry import setup
from deepmesh.wire.link import Identity
from deepmesh.wire.messages import (
    Accepted,
    Ack,
    AckRow,
    AnyMessage,
    BlockEvents,
    Drain,
    Generate,
    KvItem,
    KvKind,
    PrefixEvents,
)
from deepmesh.wire.packed import pack_ids
from deepmesh.wire.sockets import Dialer, Listener
from services.router.prefixes import Grid
from services.router.service import RouterService
from tests.fakes import LINKS, FakePeer, FakeScheduler, Stage


class FakeTokenizer(FakePeer):
    """A tokenizer's link to the router."""

    def __init__(self, stage: Stage, address: str) -> None:
        super().__init__(stage)
        self.endpoint = Dialer(address, Identity.new("tokenizer", "tokenizer-0"), LINKS)
        stage.add(self.endpoint, self.take)
        stage.until(lambda: self.is_up, "the router")

    def send(self, message: AnyMessage) -> None:
        assert self.endpoint.send(message)


class FakeStore(FakePeer):
    """A kvstore that the router dials."""

    def __init__(self, stage: Stage, address: str) -> None:
        super().__init__(stage)
        self.endpoint = Listener(address, Identity.new("kvstore", "kvstore-0"), LINKS)
        stage.add(self.endpoint, self.take)


class Bench:
    """One router, one tokenizer, two schedulers, one kvstore."""

    def __init__(self, run_dir: Path) -> None:
        self.config = Config(
            mesh=MeshConfig(run_dir=str(run_dir)),
            links=LINKS,
            router=RouterConfig(count=1),
            scheduler=SchedulerConfig(count=2),
            kvstore=KvstoreConfig(count=1),
            telemetry=TelemetryConfig(enabled=False),
        )
        self.stage = Stage()
        self.schedulers = [self.scheduler(index) for index in range(2)]
        self.store = FakeStore(self.stage, self.config.kvstore_address(0))
        self.service = RouterService(self.config, tracer=setup("router", "router-0", self.config))
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()
        self.tokenizer = FakeTokenizer(self.stage, self.config.router_address)
        self.stage.until(lambda: all(s.is_up for s in self.schedulers), "the schedulers' links")

    def scheduler(self, index: int) -> FakeScheduler:
        address, name = self.config.scheduler_address(index), f"scheduler-{index}"
        return FakeScheduler(self.stage, address, name=name, tokenizer="router-0")

    def arrived(self) -> list[list[int]]:
        """The numbers of the requests that each scheduler has got so far."""
        return [
            [int.from_bytes(m.rid, "big") for m in s.mail if isinstance(m, Generate)]
            for s in self.schedulers
        ]

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.tokenizer.send(generate(number))

    def close(self) -> None:
        self.service.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.stage.close()


def generate(number: int, attempt: int = 1) -> Generate:
    return Generate(number.to_bytes(16, "big"), attempt, "tokenizer-0", b"\0" * 8, 2)


def long(number: int, tokens: int = 2000) -> Generate:
    """The same prompt each time but for its end."""
    ids = pack_ids([*range(tokens), number])
    return Generate(number.to_bytes(16, "big"), 1, "tokenizer-0", ids, tokens + 1)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def wait_ready(mesh: Bench, count: int = 2) -> None:
    """Until so many replicas have said in a heartbeat that they are ready."""
    is_open = mesh.service.placements.replicas.is_open
    mesh.stage.until(lambda: sum(is_open(s.name) for s in mesh.schedulers) == count, "heartbeats")


def test_requests_are_spread_and_arrive_unchanged(mesh: Bench) -> None:
    wait_ready(mesh)
    mesh.send(*range(6))
    mesh.stage.until(lambda: sum(map(len, mesh.arrived())) == 6, "six requests")
    assert sorted(mesh.arrived()) == [[0, 2, 4], [1, 3, 5]]
    assert mesh.schedulers[0].expect(Generate) in [generate(n) for n in range(6)]


def test_requests_before_the_first_heartbeat_wait(mesh: Bench) -> None:
    mesh.send(1, 2, 3)
    mesh.stage.until(lambda: sum(map(len, mesh.arrived())) == 3, "three requests")


def test_a_dead_replica_s_requests_go_to_the_other_unless_accepted(mesh: Bench) -> None:
    wait_ready(mesh)
    mesh.send(*range(6))
    mesh.stage.until(lambda: sum(map(len, mesh.arrived())) == 6, "six requests")
    first, second = mesh.schedulers
    lost = mesh.arrived()[0]
    before = mesh.arrived()[1]
    mesh.tokenizer.send(Ack([AckRow(generate(lost[0]).rid, 0)]))
    mesh.tokenizer.send(generate(lost[0] + 100))  # behind the Ack: once it is there, that is, too
    mesh.stage.until(lambda: sum(map(len, mesh.arrived())) == 7, "the Ack")
    extra = [n for numbers in mesh.arrived() for n in numbers if n >= 100]
    first.die()
    mesh.stage.until(lambda: set(lost[1:]) <= set(mesh.arrived()[1]), "the failover")
    assert set(mesh.arrived()[1]) - set(extra) == {*before, *lost[1:]}
    second.die()
    mesh.send(50)
    mesh.schedulers[0] = mesh.scheduler(0)
    mesh.stage.until(lambda: 50 in mesh.arrived()[0], "the replica that came back")


def test_what_schedulers_and_kvstores_have_decides_and_is_told(mesh: Bench) -> None:
    """A prompt goes to the scheduler that says that it has it; heartbeats say why."""
    wait_ready(mesh)
    chain = Grid("weights").chain(long(0))
    for scheduler in mesh.schedulers:
        assert scheduler.endpoint.send("router-0", PrefixEvents(True, "weights", 64, 128))
    has = mesh.schedulers[1].endpoint
    assert has.send("router-0", PrefixEvents(False, "weights", 64, 128, chain[9]))
    mesh.stage.until(lambda: mesh.store.is_up, "the kvstore's link")
    item = KvItem(chain[4], KvKind.POINT)
    assert mesh.store.endpoint.send("router-0", BlockEvents(True, [item], []))
    replicas = mesh.service.placements.replicas
    mesh.stage.until(lambda: replicas.num_points() == (1, 1), "both reports")
    for number in range(1, 4):
        mesh.tokenizer.send(long(number))
    mesh.stage.until(lambda: sum(map(len, mesh.arrived())) == 3, "three requests")
    assert mesh.arrived()[1][0] == 1
    router = mesh.tokenizer.endpoint

    def told() -> bool:
        stats = router.peer.stats.router if router.peer is not None else None
        return stats is not None and sum(count for _, count in stats.decisions) == 3

    mesh.stage.until(told, "a heartbeat that tells it")
    assert router.peer is not None
    stats = router.peer.stats.router
    assert stats is not None
    assert (stats.known_points, stats.stored_points, stats.resyncs) == (1, 1, 3)
    assert dict(stats.decisions)["hit"] >= 1
    assert stats.hit_tokens >= 1280
    assert [name for name, _ in stats.loads] == ["scheduler-0", "scheduler-1"]


def test_other_mail_is_ignored_and_drain_ends_it(mesh: Bench) -> None:
    wait_ready(mesh)
    mesh.tokenizer.send(Accepted(b"r" * 16, 1, "scheduler-0"))
    mesh.send(1)
    mesh.stage.until(lambda: sum(map(len, mesh.arrived())) == 1, "the request")
    mesh.tokenizer.send(Drain())
    mesh.thread.join(60)
    assert not mesh.thread.is_alive()
