"""The scheduler's process over real sockets, with a fake executor that speaks the wire."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepmesh import telemetry
from deepmesh.config import (
    Config,
    KvstoreConfig,
    LinksConfig,
    MeshConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from deepmesh.telemetry import new_traceparent
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    Ack,
    AckRow,
    AnyMessage,
    Failed,
    Finished,
    GpuDone,
    Load,
    Reset,
    ServiceStats,
    StoreFigures,
    SubmitStep,
    TokenBatch,
)
from deepmesh.wire.sockets import Dialer, Identity, LinkEvent, Listener, Mail
from services.scheduler.core.kv_stores import KvStores
from services.scheduler.service import SchedulerService
from services.scheduler.sim.device import Device
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import CAPACITY, VOCAB, words

PATIENCE_S = 60.0
LINKS = LinksConfig(heartbeat_s=0.05, timeout_s=20.0)


class FakeExecutor:
    """Loads at once; runs every step when it arrives, on shadow KV."""

    def __init__(self, config: Config) -> None:
        self.link = Dialer(
            config.scheduler_address(0), Identity.new("executor", "executor-0-0"), config.links
        )
        self.device = Device(CAPACITY, 0)
        self.num_steps = 0
        self.hold = False  # takes steps, runs none
        self._epoch = 0

    def take(self, message: AnyMessage) -> None:
        match message:
            case Load(engine_epoch=epoch):
                self._epoch = epoch
                self.link.send(replace(CAPACITY, engine_epoch=epoch))
            case Reset(engine_epoch=epoch):
                self._epoch = epoch
                self.device.reset()
            case SubmitStep() if message.engine_epoch == self._epoch and not self.hold:
                self.num_steps += 1
                self.link.send(self.device.body(message))
                done = self.device.tail()
                self.link.send(GpuDone(self._epoch, 0, self.device.gpu_done, done))
            case _:
                pass


class FakeTokenizer:
    """Sends requests, keeps what comes back, acknowledges."""

    def __init__(self, config: Config, name: str = "tokenizer-0") -> None:
        self.name = name
        self.link = Dialer(
            config.scheduler_address(0), Identity.new("tokenizer", name), config.links
        )
        self.requests: dict[bytes, SimRequest] = {}
        self.acks = True

    def ask(self, number: int, prompt: list[int], max_tokens: int, trace: str = "") -> SimRequest:
        rid = number.to_bytes(16, "big")
        request = SimRequest(rid, prompt, max_tokens, seed=number)
        self.requests[rid] = request
        assert self.link.send(replace(request.generate(self.name), traceparent=trace))
        return request

    def take(self, message: AnyMessage) -> None:
        match message:
            case TokenBatch(rows=rows):
                for row in rows:
                    self.requests[row.rid].take(row, 1)
                if self.acks:
                    self.ack([row.rid for row in rows])
            case Finished(rid=rid) | Failed(rid=rid):
                self.requests[rid].end(message)
                self.link.send(Ack([AckRow(rid, message.final_pos, done=True)]))
            case _:
                pass

    def ack(self, rids: list[bytes]) -> None:
        self.link.send(Ack([AckRow(rid, len(self.requests[rid].output)) for rid in rids]))


class Mesh:
    """One scheduler in a thread; the fakes run in the test's own thread."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tracer = telemetry.setup("scheduler", "scheduler-0", config)
        self.service = SchedulerService(config, index=0, tracer=self.tracer)
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()
        self.executor = FakeExecutor(config)
        self.tokenizer = FakeTokenizer(config)
        self.peers: list[FakeExecutor | FakeTokenizer] = [self.executor, self.tokenizer]
        self.inbox = Inbox(self.executor.link, self.tokenizer.link)

    def pump(self, until: Callable[[], bool]) -> None:
        """Deliver mail to the fakes until something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, "nothing happens any more"
            for event in self.inbox.wait(0.05):
                self._deliver(event)

    def _deliver(self, event: LinkEvent) -> None:
        if isinstance(event, Mail):
            for peer in self.peers:
                if peer.link.peer is event.peer:
                    peer.take(event.message)

    def wait_ready(self) -> None:
        def ready() -> bool:
            peer = self.tokenizer.link.peer
            return peer is not None and peer.stats.ready

        self.pump(ready)

    def replace_executor(self) -> None:
        """The executor's process is gone; another one takes its name."""
        self.inbox.endpoints.remove(self.executor.link)
        self.executor.link.close()
        self.peers.remove(self.executor)
        self.executor = FakeExecutor(self.config)
        self.peers.append(self.executor)
        self.inbox.add(self.executor.link)

    def close(self) -> None:
        self.service.stop()
        self.service.stop()
        while self.thread.is_alive():
            for event in self.inbox.wait(0.02):
                self._deliver(event)
        self.thread.join()
        self.inbox.close()
        self.tracer.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        mesh=MeshConfig(name="t", run_dir=str(tmp_path), model=str(tmp_path / "model")),
        links=LINKS,
        scheduler=SchedulerConfig(
            max_rows=8, step_tokens=64, chunk_tokens=32, orphan_s=0.3, audit=True
        ),
    )


@pytest.fixture
def mesh(config: Config) -> Iterator[Mesh]:
    mesh = Mesh(config)
    yield mesh
    mesh.close()


def test_requests_run_to_their_end_over_the_wire(mesh: Mesh) -> None:
    mesh.wait_ready()
    asked = [mesh.tokenizer.ask(n, words(10 + 20 * n, seed=n), 12) for n in range(6)]
    mesh.pump(lambda: all(request.terminals for request in asked))
    for request in asked:
        request.verify(VOCAB)


def test_at_debug_each_request_says_that_it_is_accepted_and_how_it_ended(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="services.scheduler")
    mesh.wait_ready()
    request = mesh.tokenizer.ask(1, words(40), 5)
    rid = request.rid.hex()[:12]

    def lines() -> list[str]:
        return [text for text in caplog.messages if text.startswith(rid)]

    mesh.pump(lambda: len(lines()) == 2)
    first, last = lines()
    assert first.startswith(f"{rid} of tokenizer-0 accepted")
    assert "prompt=40" in last
    assert "output=5" in last


def test_heartbeats_tell_the_state_of_the_replica(mesh: Mesh) -> None:
    mesh.wait_ready()
    request = mesh.tokenizer.ask(1, words(40), 5)

    def told() -> bool:
        assert mesh.tokenizer.link.peer is not None
        (stats,) = mesh.tokenizer.link.peer.stats.replicas
        free = sum(stats.free_blocks) + sum(stats.cached_blocks)
        return stats.finished == 1 and stats.output_tokens == 5 and free == sum(stats.total_blocks)

    mesh.pump(told)
    assert request.terminals


def test_a_failed_audit_is_told_in_heartbeats_and_stops_nothing(config: Config) -> None:
    audit_off = replace(config.scheduler, audit=False)
    mesh = Mesh(replace(config, scheduler=audit_off))

    def told() -> bool:
        assert mesh.tokenizer.link.peer is not None
        (stats,) = mesh.tokenizer.link.peer.stats.replicas
        return stats.failed_audits >= 1

    try:
        mesh.wait_ready()
        assert mesh.service.core.engine is not None
        mesh.service.core.engine.memories[0].pools[0].held[-1] += 1
        first = mesh.tokenizer.ask(1, words(40), 5)
        mesh.pump(told)
        second = mesh.tokenizer.ask(2, words(40), 5)
        mesh.pump(lambda: bool(first.terminals and second.terminals))
        second.verify(VOCAB)
    finally:
        mesh.close()


def test_a_request_that_comes_before_the_executor_waits_for_it(config: Config) -> None:
    mesh = Mesh(config)
    try:
        mesh.pump(lambda: mesh.tokenizer.link.peer is not None)
        request = mesh.tokenizer.ask(1, words(10), 4)
        mesh.pump(lambda: bool(request.terminals))
        request.verify(VOCAB)
    finally:
        mesh.close()


def test_an_executor_that_is_replaced_does_not_show_in_the_tokens(mesh: Mesh) -> None:
    mesh.wait_ready()
    asked = [mesh.tokenizer.ask(n, words(30, seed=n), 40) for n in range(3)]
    mesh.pump(lambda: all(len(request.output) > 5 for request in asked))
    mesh.replace_executor()
    mesh.pump(lambda: all(request.terminals for request in asked))
    assert mesh.executor.num_steps > 0
    for request in asked:
        request.verify(VOCAB)


def test_a_tokenizer_that_vanishes_leaves_orphans_that_are_aborted(mesh: Mesh) -> None:
    mesh.wait_ready()
    other = FakeTokenizer(mesh.config, "tokenizer-1")
    mesh.peers.append(other)
    mesh.inbox.add(other.link)
    mesh.pump(lambda: other.link.peer is not None)
    request = other.ask(9, words(10), 480)
    mesh.pump(lambda: len(request.output) > 2)
    mesh.executor.hold = True
    mesh.inbox.endpoints.remove(other.link)
    other.link.close()

    def gone() -> bool:
        assert mesh.tokenizer.link.peer is not None
        (stats,) = mesh.tokenizer.link.peer.stats.replicas
        return stats.running == 0 and stats.finished == 1

    mesh.pump(gone)
    assert not request.terminals


def test_a_reader_that_is_unacked_events_behind_stops_its_own_request(config: Config) -> None:
    mesh = Mesh(replace(config, tokenizer=TokenizerConfig(unacked_events=64)))
    mesh.wait_ready()
    mesh.tokenizer.acks = False
    request = mesh.tokenizer.ask(1, words(20), 200)

    def stopped() -> bool:
        assert mesh.tokenizer.link.peer is not None
        (stats,) = mesh.tokenizer.link.peer.stats.replicas
        return stats.output_tokens >= 64 and stats.inflight_tokens == 0

    mesh.pump(stopped)
    assert 64 <= len(request.output) <= 64 + config.scheduler.depth
    mesh.tokenizer.acks = True
    mesh.tokenizer.ack([request.rid])
    mesh.pump(lambda: bool(request.terminals))
    request.verify(VOCAB)
    mesh.close()


def test_stop_lets_running_requests_finish(config: Config) -> None:
    mesh = Mesh(config)
    mesh.wait_ready()
    request = mesh.tokenizer.ask(1, words(20), 60)
    mesh.pump(lambda: len(request.output) > 3)
    mesh.service.stop()
    mesh.pump(lambda: not mesh.thread.is_alive())
    request.verify(VOCAB)
    assert len(request.output) == 60
    mesh.close()


def test_each_stage_of_a_request_and_each_step_is_a_span(config: Config) -> None:
    mesh = Mesh(config)
    mesh.wait_ready()
    trace = new_traceparent()
    request = mesh.tokenizer.ask(1, words(40), 6, trace)
    mesh.pump(lambda: bool(request.terminals))
    mesh.close()
    path = Path(config.mesh.run_dir) / "traces" / "scheduler-0.jsonl"
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    text = path.read_text()
    assert trace[3:35] in text
    names = [span["name"] for span in spans if trace[3:35] in json.dumps(span)]
    assert sorted(names) == ["decode", "hop", "prefill", "queue"]
    numbers = [span["attributes"]["step"] for span in spans if span["name"] == "group step"]
    assert {1, mesh.executor.num_steps - 1} <= set(numbers), "its first and its last step"
    assert 2 <= len(numbers) <= 3, "its slowest, too, and no other"
    (end,) = [span for span in spans if span["name"] == "decode"]
    roots = [span for span in spans if span["name"] == "group step"]
    assert {link[3:35] for link in end["links"]} == {root["trace_id"] for root in roots}
    (decode,) = [line for line in text.splitlines() if '"decode"' in line]
    assert "slowest_steps" in decode


def test_the_core_is_told_how_much_a_kvstore_has(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(KvStores, "holds", lambda _, index, count: told.append((index, count)))
    config = replace(config, kvstore=KvstoreConfig(count=2))
    items = [0]

    def stats() -> ServiceStats:
        if not items[0]:  # a kvstore that does not count
            return ServiceStats(ready=True, stores=[StoreFigures("kvstore-1", [("puts", 3)])])
        values = [("memory_bytes", 99), ("memory_items", 1), ("disk_items", 2)]
        figures = StoreFigures("kvstore-1", [*values, ("shared_items", items[0])])
        return ServiceStats(ready=True, stores=[figures])

    me = Identity.new("kvstore", "kvstore-1")
    store = Listener(config.kvstore_address(1), me, config.links, stats)
    mesh = Mesh(config)
    try:
        mesh.inbox.add(store)
        mesh.pump(lambda: mesh.service.core.stores.is_up("kvstore-1"))
        for count in (4, 30):
            items[0] = count
            mesh.pump(lambda: bool(told) and told[-1] == (1, 3 + items[0]))
        assert set(told) == {(1, 7), (1, 33)}
    finally:
        mesh.close()


def test_the_process_starts_drains_on_sigterm_and_ends_with_zero(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[mesh]\nrun_dir = "{tmp_path}"\n[links]\nheartbeat_s = 0.05\n')
    command = [sys.executable, "-m", "services.scheduler", "--config", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "listening at ipc://" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_wrong_configuration_ends_the_process_and_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[scheduler]\ndepth = 9\n")
    command = [sys.executable, "-m", "services.scheduler", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "scheduler.depth" in done.stderr
