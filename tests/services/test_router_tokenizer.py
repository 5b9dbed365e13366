"""A tokenizer that sends new requests to a router and does everything else with the schedulers."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deepmesh.config import RouterConfig, SchedulerConfig
from deepmesh.wire.link import Identity
from deepmesh.wire.messages import (
    Abort,
    Ack,
    Attach,
    Cancel,
    ErrorCode,
    Failed,
    Generate,
    ResponseFailed,
    Rid,
)
from deepmesh.wire.sockets import Listener
from tests.fakes import LINKS, FakeGateway, FakePeer, FakeScheduler, Stage
from tests.services.tokenizer_harness import EOS, HI, PLAIN, Running, ids_of, make_config

OUTPUT = [*ids_of("One, two, three and so on"), EOS]
CHAT = {"model": "tiny", "messages": HI, "stream": True, **PLAIN}


class FakeRouter(FakePeer):
    """Takes Generates and does what the test says."""

    def __init__(self, stage: Stage, address: str) -> None:
        super().__init__(stage)
        self.endpoint = Listener(address, Identity.new("router", "router-0"), LINKS)
        stage.add(self.endpoint, self.take)

    def expect_ack(self, rid: Rid, *, done: bool) -> None:
        self.expect(Ack, lambda ack: any(row.rid == rid and row.done == done for row in ack.rows))


class Bench:
    """One tokenizer between a router, two schedulers and a gateway."""

    def __init__(self, run_dir: Path) -> None:
        self.config = msgspec.structs.replace(
            make_config(run_dir), router=RouterConfig(count=1), scheduler=SchedulerConfig(count=2)
        )
        self.stage = Stage()
        self.first, self.second = (
            FakeScheduler(self.stage, self.config.scheduler_address(i), name=f"scheduler-{i}")
            for i in range(2)
        )
        self.router = FakeRouter(self.stage, self.config.router_address)
        self.running = Running(self.config)
        self.gateway = FakeGateway(self.stage, self.config.tokenizer_address(0))
        self.stage.until(
            lambda: self.first.is_up and self.second.is_up and self.router.is_up, "all links"
        )
        for peer in (self.first, self.second, self.router):  # heartbeats: it knows the links, too
            endpoint = peer.endpoint
            self.stage.until(lambda e=endpoint: e.peers["tokenizer-0"].stats.ready, "a heartbeat")

    def routed(self) -> Generate:
        """A request that has gone to the router."""
        rid = self.gateway.submit("chat", CHAT)
        generate = self.router.expect(Generate)
        assert generate.rid == rid
        return generate

    def close(self) -> None:
        self.running.stop()
        self.stage.close()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_new_requests_go_to_the_router_and_answers_come_from_anywhere(mesh: Bench) -> None:
    generate = mesh.routed()
    mesh.second.accept(generate)
    mesh.router.expect_ack(generate.rid, done=False)
    mesh.second.answer(generate, OUTPUT)
    mesh.gateway.reply(generate.rid)
    mesh.router.expect_ack(generate.rid, done=True)
    mesh.second.expect(Ack, lambda ack: any(row.done for row in ack.rows))
    assert not mesh.first.mail
    assert not mesh.second.has(Generate)


def test_a_lost_router_is_gone_around(mesh: Bench) -> None:
    generate = mesh.routed()
    mesh.stage.remove(mesh.router.endpoint)
    for scheduler in (mesh.first, mesh.second):  # it may have left the router, or not
        assert scheduler.expect(Attach).rid == generate.rid
        scheduler.send(Failed(generate.rid, ErrorCode.UNKNOWN, "no"))
    mesh.stage.until(lambda: mesh.first.has(Generate) or mesh.second.has(Generate), "Generate")
    chosen = mesh.first if mesh.first.has(Generate) else mesh.second
    again = chosen.expect(Generate)
    assert (again.rid, again.attempt) == (generate.rid, 2)
    chosen.answer(again, OUTPUT)
    mesh.gateway.reply(generate.rid)


def test_a_lost_router_that_had_sent_it_on_changes_nothing(mesh: Bench) -> None:
    generate = mesh.routed()
    mesh.stage.remove(mesh.router.endpoint)
    mesh.first.expect(Attach)
    mesh.first.send(Failed(generate.rid, ErrorCode.UNKNOWN, "no"))
    mesh.second.expect(Attach)
    mesh.second.answer(generate, OUTPUT)
    mesh.gateway.reply(generate.rid)
    assert not mesh.first.has(Generate)
    assert not mesh.second.has(Generate)


def test_the_router_s_refusal_reaches_the_client(mesh: Bench) -> None:
    generate = mesh.routed()
    failed = Failed(generate.rid, ErrorCode.OVERLOADED, "full", retry_after_s=2.0)
    assert mesh.router.endpoint.send("tokenizer-0", failed)
    end = mesh.gateway.reply(generate.rid).end
    assert isinstance(end, ResponseFailed)
    assert (end.code, end.detail, end.retry_after_s) == (ErrorCode.OVERLOADED, "full", 2.0)


def test_of_two_schedulers_with_one_request_the_second_is_stopped(mesh: Bench) -> None:
    generate = mesh.routed()
    mesh.first.accept(generate)
    mesh.router.expect_ack(generate.rid, done=False)
    mesh.second.accept(generate)
    assert mesh.second.expect(Abort).rid == generate.rid
    mesh.second.finish(generate.rid, 0)
    mesh.second.expect(Ack, lambda ack: ack.rows[0].done)
    mesh.first.answer(generate, OUTPUT)
    mesh.gateway.reply(generate.rid)
    assert not mesh.first.has(Abort)


def test_a_client_that_leaves_early_is_aborted_wherever_its_request_is(mesh: Bench) -> None:
    generate = mesh.routed()
    mesh.gateway.send(Cancel(generate.rid))
    for scheduler in (mesh.first, mesh.second):
        abort = scheduler.expect(Abort)
        assert (abort.rid, abort.attempt) == (generate.rid, 1)
    mesh.router.expect_ack(generate.rid, done=True)


def test_a_running_request_is_routed_again_with_its_tokens(mesh: Bench) -> None:
    generate = mesh.routed()
    mesh.first.accept(generate)
    mesh.first.tokens(generate.rid, 0, OUTPUT[:3])
    mesh.gateway.events(generate.rid, 2)
    mesh.first.die()
    again = mesh.router.expect(Generate)
    assert (again.rid, again.attempt) == (generate.rid, 2)
    assert len(again.confirmed_ids) // 4 == 3
    mesh.second.accept(again)
    mesh.second.tokens(again.rid, 3, OUTPUT[3:])
    mesh.second.finish(again.rid, len(OUTPUT))
    mesh.gateway.reply(generate.rid)
    mesh.router.expect_ack(generate.rid, done=True)
