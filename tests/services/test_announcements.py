"""What cannot wait for a heartbeat does not: heartbeats here come once an hour."""

from pathlib import Path

from msgspec.structs import replace

from deepmesh.config import Config, LinksConfig
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import ServiceStats
from deepmesh.wire.sockets import Dialer, Identity, Listener
from tests.core.driver import words
from tests.services.test_scheduler_service import Mesh, config

__all__ = ["config"]  # the fixture
RARELY = LinksConfig(heartbeat_s=3600, timeout_s=7200)


def test_who_dials_in_learns_the_state_at_once_and_each_change_that_is_announced(
    tmp_path: Path,
) -> None:
    requests = [3]
    address, me = f"ipc://{tmp_path}/s", Identity.new("scheduler", "scheduler-0")
    listener = Listener(address, me, RARELY, lambda: ServiceStats(True, requests[0]))
    dialers = [Dialer(address, Identity.new("tokenizer", f"t-{n}"), RARELY) for n in range(2)]
    inbox = Inbox(listener, *dialers)

    def wait_told(count: int) -> None:
        for _ in range(200):
            if all(d.peer is not None and d.peer.stats.requests == count for d in dialers):
                return
            inbox.wait(0.05)
        raise AssertionError([d.peer for d in dialers])

    try:
        wait_told(3)
        requests[0] = 4
        listener.announce()
        wait_told(4)
    finally:
        inbox.close()


def test_a_scheduler_says_at_once_that_it_is_ready_and_that_it_drains(config: Config) -> None:
    mesh = Mesh(replace(config, links=RARELY))
    try:
        mesh.wait_ready()
        running = mesh.tokenizer.ask(1, words(40), 5)
        mesh.executor.hold = True  # so that it cannot drain before anyone looks
        mesh.service.stop()

        def drains() -> bool:
            peer = mesh.tokenizer.link.peer
            return peer is not None and any(r.draining for r in peer.stats.replicas)

        mesh.pump(drains)
        assert not running.terminals
    finally:
        mesh.close()
