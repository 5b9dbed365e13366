"""Lost links, restarted peers, gaps, repeats, slow readers: no event is lost or doubled."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    Attach,
    Cancel,
    Credit,
    ErrorCode,
    Failed,
    FinishReason,
    Generate,
    ResponseFailed,
    ResponseFinished,
    Shutdown,
    StopAt,
)
from deepmesh.wire.packed import unpack_ids
from tests.fakes import FakeGateway, FakeScheduler
from tests.services.tokenizer_harness import EOS, HI, PLAIN, Bench, Running, bench, ids_of

OUTPUT = [*ids_of("One, two, Grüße 👋🏽, three and so on for a while"), EOS]
CHAT = {"model": "tiny", "messages": HI, "stream": True, **PLAIN}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as made:
        yield made


def undisturbed(mesh: Bench, rid: bytes, protocol: str = "chat", body: object = CHAT) -> bytes:
    """The stream as it is when nothing goes wrong."""
    mesh.gateway.submit(protocol, body, rid=rid)
    mesh.scheduler.answer(mesh.scheduler.expect(Generate), OUTPUT)
    return mesh.gateway.reply(rid).text


def test_gaps_are_asked_for_and_repeats_dropped(mesh: Bench) -> None:
    rid = b"r" * 16
    scheduler = mesh.scheduler
    mesh.gateway.submit("chat", CHAT, rid=rid)
    generate = scheduler.expect(Generate)
    scheduler.accept(generate)
    scheduler.tokens(rid, 0, OUTPUT[:4])
    scheduler.tokens(rid, 2, OUTPUT[2:6])  # repeats two
    scheduler.tokens(rid, 0, OUTPUT[:3])  # repeats all
    scheduler.tokens(rid, 9, OUTPUT[9:12])  # three are missing
    attach = scheduler.expect(Attach)
    assert (attach.rid, attach.attempt, attach.from_pos) == (rid, 1, 6)
    assert attach.reply_to == "tokenizer-0"
    scheduler.tokens(rid, 6, OUTPUT[6:])
    scheduler.finish(rid, len(OUTPUT))
    text = mesh.gateway.reply(rid).text
    mesh.running.stop()
    mesh.running = Running(mesh.config)
    mesh.stage.until(lambda: not mesh.gateway.is_up, "the old link to go")
    wait_up(mesh)
    assert text == undisturbed(mesh, rid)


def wait_up(mesh: Bench) -> None:
    mesh.stage.until(lambda: mesh.gateway.is_up and mesh.scheduler.is_up, "all links")


def test_an_end_before_its_tokens_waits_for_them(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", {**CHAT, "stream": False})
    mesh.scheduler.accept(mesh.scheduler.expect(Generate))
    mesh.scheduler.tokens(rid, 0, OUTPUT[:3])
    mesh.scheduler.finish(rid, len(OUTPUT))
    assert mesh.scheduler.expect(Attach).from_pos == 3
    mesh.scheduler.tokens(rid, 3, OUTPUT[3:])
    assert mesh.gateway.reply(rid).json["usage"]["completion_tokens"] == len(OUTPUT)
    mesh.scheduler.expect(Ack, lambda ack: any(row.done for row in ack.rows))


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages", "completions"])
def test_a_restarted_tokenizer_continues_each_stream(mesh: Bench, protocol: str) -> None:
    bodies = {
        "chat": CHAT,
        "responses": {"model": "tiny", "input": "Hi", "stream": True},
        "messages": {**CHAT, "max_tokens": 99},
        "completions": {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 99},
    }
    body, rid = bodies[protocol], b"q" * 16
    whole = undisturbed(mesh, rid, protocol, body)
    first = mesh.gateway.replies[rid].events[:7]
    mesh.running.stop()
    mesh.running = Running(mesh.config)
    mesh.stage.until(lambda: not mesh.gateway.is_up, "the old link to go")
    wait_up(mesh)

    mesh.gateway.submit(protocol, body, rid=rid, next_event=7)
    attach = mesh.scheduler.expect(Attach)
    assert (attach.rid, attach.from_pos) == (rid, 0)
    mesh.scheduler.send(Accepted(rid, 3, "scheduler-0"))
    mesh.scheduler.tokens(rid, 0, OUTPUT[:5])
    mesh.scheduler.tokens(rid, 5, OUTPUT[5:])
    mesh.scheduler.finish(rid, len(OUTPUT))
    rest = mesh.gateway.reply(rid)
    assert rest.admitted
    if protocol == "responses":  # its last event says when it was completed
        assert rest.events[:-1] == split(whole)[7:-1]
    else:
        assert b"".join(first) + rest.text == whole
    assert not mesh.scheduler.has(Generate)


def split(text: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


def test_a_request_that_no_scheduler_knows_starts_again(mesh: Bench) -> None:
    rid = b"u" * 16
    whole = undisturbed(mesh, rid)
    mesh.running.stop()
    mesh.running = Running(mesh.config)
    mesh.stage.until(lambda: not mesh.gateway.is_up, "the old link to go")
    wait_up(mesh)
    mesh.gateway.submit("chat", CHAT, rid=rid, next_event=3)
    mesh.scheduler.expect(Attach)
    mesh.scheduler.send(Failed(rid, ErrorCode.UNKNOWN, "never heard of it"))
    mesh.scheduler.answer(mesh.scheduler.expect(Generate), OUTPUT)
    assert mesh.gateway.reply(rid).events == split(whole)[3:]


@pytest.mark.parametrize("next_event", [0, 1, 6])
def test_a_gateway_that_comes_back_gets_the_rest(mesh: Bench, next_event: int) -> None:
    rid, scheduler, address = b"g" * 16, mesh.scheduler, mesh.config.tokenizer_address(0)
    gateway = FakeGateway(mesh.stage, address, name="gateway-1", credits_itself=False)
    gateway.submit("chat", CHAT, rid=rid)
    generate = scheduler.expect(Generate)
    scheduler.accept(generate)
    scheduler.tokens(rid, 0, OUTPUT[:6])
    seen = gateway.events(rid, 6)[:next_event]
    gateway.die()

    again = FakeGateway(mesh.stage, address, name="gateway-1", credits_itself=False)
    scheduler.tokens(rid, 6, OUTPUT[6:18])  # comes before it has asked
    scheduler.expect(Ack, lambda ack: ack.rows[0].pos == 18)
    again.submit("chat", CHAT, rid=rid, next_event=next_event)
    scheduler.tokens(rid, 18, OUTPUT[18:])
    scheduler.finish(rid, len(OUTPUT))
    rest = again.reply(rid)
    assert rest.admitted
    again.send(Cancel(rid))  # so that the same id may run once more, undisturbed
    again.submit("chat", CHAT, rid=rid)
    scheduler.answer(scheduler.expect(Generate), OUTPUT)
    assert seen + rest.events == again.reply(rid).events
    assert not scheduler.has(Attach)


def test_an_end_that_the_gateway_missed_is_sent_again(mesh: Bench) -> None:
    for stream in (True, False):
        rid = bytes([stream]) * 16
        gateway = FakeGateway(
            mesh.stage, mesh.config.tokenizer_address(0), name=f"g{stream}", credits_itself=False
        )
        body = {**CHAT, "stream": stream}
        gateway.submit("chat", body, rid=rid)
        mesh.scheduler.answer(mesh.scheduler.expect(Generate), OUTPUT)
        first = gateway.reply(rid)
        gateway.submit("chat", body, rid=rid, next_event=2 if stream else 0)
        again = gateway.reply(rid)
        assert again.events == first.events[2:]
        assert not mesh.scheduler.has(Generate)
        gateway.die()


def test_a_restarted_scheduler_gets_a_continuation(mesh: Bench) -> None:
    rid = b"s" * 16
    whole = undisturbed(mesh, b"s" * 16)
    mesh.gateway.send(Cancel(rid))  # so that the same id may run again
    mesh.gateway.submit("chat", CHAT, rid=rid)
    first = mesh.scheduler.expect(Generate)
    mesh.scheduler.accept(first)
    mesh.scheduler.tokens(rid, 0, OUTPUT[:5])
    mesh.gateway.events(rid, 4)
    mesh.scheduler.die()

    mesh.scheduler = FakeScheduler(mesh.stage, mesh.config.scheduler_address(0))
    again = mesh.scheduler.expect(Generate)
    assert (again.rid, again.attempt) == (rid, 2)
    assert unpack_ids(again.confirmed_ids).tolist() == OUTPUT[:5]
    assert (again.prompt_ids, again.prompt_len) == (first.prompt_ids, first.prompt_len)
    assert (again.seed, again.max_tokens) == (first.seed, first.max_tokens)
    mesh.scheduler.accept(again)
    mesh.scheduler.tokens(rid, 5, OUTPUT[5:])
    mesh.scheduler.finish(rid, len(OUTPUT))
    assert mesh.gateway.reply(rid).text == whole


def test_a_scheduler_dies_between_the_last_token_and_its_word_on_the_end(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", {**CHAT, "max_tokens": 16, "stream": False})
    mesh.scheduler.accept(mesh.scheduler.expect(Generate))
    mesh.scheduler.tokens(rid, 0, OUTPUT[:16])
    mesh.scheduler.expect(Ack)  # they have arrived
    mesh.scheduler.die()
    assert mesh.gateway.reply(rid).json["choices"][0]["finish_reason"] == "length"


def test_requests_wait_for_a_scheduler(tmp_path: Path) -> None:
    with bench(tmp_path) as mesh:
        mesh.scheduler.die()
        rid = mesh.gateway.submit("chat", CHAT)
        mesh.scheduler = FakeScheduler(mesh.stage, mesh.config.scheduler_address(0))
        mesh.scheduler.answer(mesh.scheduler.expect(Generate), OUTPUT)
        assert isinstance(mesh.gateway.reply(rid).end, ResponseFinished)


def test_without_a_scheduler_the_deadline_ends_it(mesh: Bench) -> None:
    mesh.scheduler.die()
    rid = mesh.gateway.submit("chat", CHAT, deadline_ns=1)
    end = mesh.gateway.reply(rid).end
    assert isinstance(end, ResponseFailed)
    assert end.code is ErrorCode.OVERLOADED


def test_cancel_aborts_and_nothing_follows(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", CHAT)
    mesh.scheduler.accept(mesh.scheduler.expect(Generate))
    mesh.scheduler.tokens(rid, 0, OUTPUT[:3])
    seen = len(mesh.gateway.events(rid, 3))
    mesh.gateway.send(Cancel(rid))
    mesh.gateway.send(Cancel(rid))
    assert mesh.scheduler.expect(Abort).rid == rid
    mesh.scheduler.tokens(rid, 3, OUTPUT[3:6])  # was on its way
    mesh.scheduler.finish(rid, 6, FinishReason.ABORT)
    mesh.scheduler.expect(Ack, lambda ack: any(r.rid == rid and r.done for r in ack.rows))
    other = mesh.gateway.submit("chat", CHAT)  # the service goes on
    mesh.scheduler.answer(mesh.scheduler.expect(Generate), OUTPUT)
    mesh.gateway.reply(other)
    assert len(mesh.gateway.replies[rid].events) <= seen + 1
    assert not mesh.gateway.replies[rid].ends


def test_failures_of_the_scheduler_pass_through(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", CHAT)
    mesh.scheduler.expect(Generate)
    mesh.scheduler.send(Failed(rid, ErrorCode.OVERLOADED, "full", "", 2.5))
    end = mesh.gateway.reply(rid).end
    assert isinstance(end, ResponseFailed)
    assert (end.code, end.detail, end.retry_after_s) == (ErrorCode.OVERLOADED, "full", 2.5)
    mesh.scheduler.expect(Ack, lambda ack: ack.rows[0].done)


def test_a_reader_that_stops_gets_no_acks_and_stalls_nobody(mesh: Bench) -> None:
    slow = FakeGateway(
        mesh.stage, mesh.config.tokenizer_address(0), name="gateway-1", credits_itself=False
    )
    long = ids_of("a b c d e f g h i j " * 10)
    rid = b"slow-reader-....x"[:16]
    slow.submit("chat", CHAT, rid=rid)
    mesh.scheduler.accept(mesh.scheduler.expect(Generate))
    mesh.scheduler.tokens(rid, 0, long)
    slow.events(rid, len(long))
    quick = mesh.gateway.submit("chat", CHAT)
    mesh.scheduler.answer(mesh.scheduler.expect(Generate), OUTPUT)
    mesh.gateway.reply(quick)
    acked = [
        row.pos
        for m in mesh.scheduler.mail
        if isinstance(m, Ack)
        for row in m.rows
        if row.rid == rid
    ]
    assert not acked, "acknowledged what the client has not taken"

    slow.send(Credit(rid, len(long)))
    mesh.scheduler.expect(
        Ack, lambda ack: any(r.rid == rid and r.pos == len(long) for r in ack.rows)
    )


def test_plain_answers_are_acknowledged_at_once(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", {**CHAT, "stream": False})
    mesh.scheduler.accept(mesh.scheduler.expect(Generate))
    mesh.scheduler.tokens(rid, 0, OUTPUT[:16])
    mesh.scheduler.expect(Ack, lambda ack: ack.rows[0].pos == 16)


def test_tokens_behind_a_stop_string_are_ignored(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", {**CHAT, "stop": "two"})
    mesh.scheduler.accept(mesh.scheduler.expect(Generate))
    for at, token in enumerate(OUTPUT):
        mesh.scheduler.tokens(rid, at, [token])
    reply = mesh.gateway.reply(rid)
    stop = mesh.scheduler.expect(StopAt)
    mesh.scheduler.finish(rid, stop.n_keep)
    assert isinstance(reply.end, ResponseFinished)
    assert reply.end.completion_tokens == stop.n_keep < len(OUTPUT)


def test_two_schedulers_share_and_replace_each_other(tmp_path: Path) -> None:
    with bench(tmp_path) as mesh:
        mesh.running.stop()
        config = msgspec.structs.replace(mesh.config, scheduler=SchedulerConfig(count=2))
        mesh.config = config
        second = FakeScheduler(mesh.stage, config.scheduler_address(1), name="scheduler-1")
        mesh.running = Running(config)
        mesh.stage.until(lambda: not mesh.gateway.is_up, "the old link to go")
        wait_up(mesh)
        mesh.stage.until(lambda: len(mesh.gateway.stats.replicas) == 2, "both heartbeats")

        one = mesh.gateway.submit("chat", {**CHAT, "stream": False})
        two = mesh.gateway.submit("chat", {**CHAT, "stream": False})
        first, other = mesh.scheduler.expect(Generate), second.expect(Generate)
        assert {first.rid, other.rid} == {one, two}
        mesh.scheduler.die()
        moved = second.expect(Generate)
        assert (moved.rid, moved.attempt) == (first.rid, 2)
        for generate in (moved, other):
            second.answer(generate, OUTPUT)
        for rid in (one, two):
            assert mesh.gateway.reply(rid).json["choices"]


def test_draining_finishes_what_runs_and_takes_nothing_new(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", CHAT)
    generate = mesh.scheduler.expect(Generate)
    mesh.stage.until(lambda: mesh.gateway.stats.ready, "readiness")
    mesh.running.ask_to_stop(60.0)
    mesh.stage.until(lambda: not mesh.gateway.stats.ready, "its word that it drains")
    late = mesh.gateway.submit("chat", CHAT)
    mesh.scheduler.answer(generate, OUTPUT)
    assert isinstance(mesh.gateway.reply(rid).end, ResponseFinished)
    mesh.stage.until(lambda: not mesh.gateway.is_up, "its end")
    assert not mesh.gateway.replies[late].ends  # the gateway has it still, for the next one
    assert not mesh.scheduler.has(Generate)


def test_a_tokenizer_that_stops_leaves_its_requests_to_the_next(mesh: Bench) -> None:
    rid = b"n" * 16
    mesh.gateway.submit("chat", CHAT, rid=rid)
    mesh.scheduler.accept(mesh.scheduler.expect(Generate))
    mesh.scheduler.tokens(rid, 0, OUTPUT[:4])
    mesh.gateway.events(rid, 4)
    mesh.running.ask_to_stop(0.0)
    mesh.stage.until(lambda: not mesh.gateway.is_up, "its end")
    assert not mesh.gateway.replies[rid].ends
    assert not mesh.scheduler.has(Abort)


def test_shutdown_fails_what_runs(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", CHAT)
    mesh.scheduler.expect(Generate)
    mesh.gateway.send(Shutdown())
    end = mesh.gateway.reply(rid).end
    assert isinstance(end, ResponseFailed)
    assert end.code is ErrorCode.OVERLOADED
    assert mesh.scheduler.expect(Abort).rid == rid
