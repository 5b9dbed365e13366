"""What gateways and schedulers rely on, of any tokenizer at an address."""

import json
import os
import struct
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tests.contract.raw import ENUMS, Dealer, Guest, Wire, make, read
from tests.contract.targets import Target

CODE, REASON = ENUMS["ErrorCode"], ENUMS["FinishReason"]
ADMITTED = 1
OUTPUT = list(range(610, 622))
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "stream": True,
    "max_tokens": 12,
    "thinking": {"type": "disabled"},
}


def pack(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


class Gateway:
    """A gateway's link, with the events of each request put together."""

    def __init__(self, wire: Wire, address: str, name: str = "gateway-0") -> None:
        self.wire = wire
        self.link: Dealer = wire.dial(address, "gateway", name)

    def submit(self, body: object = CHAT, rid: bytes = b"", **fields: object) -> bytes:
        rid = rid or os.urandom(16)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"protocol": "chat", "body": raw, "seed": 7, "created_s": 1_700_000_000} | fields
        self.link.send(make("Submit", rid=rid, **given))
        return rid

    def ends(self, rid: bytes) -> list[SimpleNamespace]:
        tags = ("ResponseFinished", "ResponseFailed")
        return [m for m in self.link.history if m.tag in tags and m.rid == rid]

    def end(self, rid: bytes) -> SimpleNamespace:
        self.wire.until(lambda: self.ends(rid), "an end")
        return self.ends(rid)[0]

    def events(self, rid: bytes, first: int = 0) -> list[bytes]:
        """All events so far; they must be consecutive from `first` on, and none after the end."""
        found: list[bytes] = []
        ended = False
        for message in self.link.history:
            deltas = (
                [read(d, "Delta") for d in message.deltas] if message.tag == "DeltaBatch" else []
            )
            if message.tag == "ResponseFinished":
                deltas = [message]
            for delta in deltas:
                if delta.rid == rid and delta.events:
                    assert not ended
                    assert delta.first_event == first + len(found), "a gap or a repeat"
                    found += delta.events
            ended |= message.tag.startswith("Response") and message.rid == rid
        return found

    def wait_events(self, rid: bytes, count: int) -> None:
        self.wire.until(lambda: len(self.events(rid)) >= count, f"{count} events")


class Mesh:
    """A gateway and a scheduler around the tokenizer."""

    def __init__(self, wire: Wire, target: Target) -> None:
        self.wire, self.target = wire, target
        self.listener = wire.listen(target.dials[0], "scheduler", "scheduler-0")
        self.gateway = Gateway(wire, target.address)
        self.listener.guest("tokenizer-0")

    @property
    def scheduler(self) -> Guest:
        return self.listener.guest("tokenizer-0")

    def accept(self, generate: SimpleNamespace) -> None:
        given = {"rid": generate.rid, "attempt": generate.attempt, "replica": "scheduler-0"}
        self.scheduler.send(make("Accepted", **given))

    def tokens(self, rid: bytes, pos: int, ids: Sequence[int]) -> None:
        row = make("TokenRow", rid=rid, pos=pos, ids=pack(ids))
        self.scheduler.send(make("TokenBatch", group_step=1, step_end_ns=1, rows=[row]))

    def finish(self, rid: bytes, final_pos: int = len(OUTPUT)) -> None:
        end = make("Finished", rid=rid, reason=REASON.LENGTH, final_pos=final_pos, prompt_tokens=5)
        self.scheduler.send(end)

    def generate(self, rid: bytes) -> SimpleNamespace:
        return self.scheduler.expect("Generate", lambda m: m.rid == rid)

    def answer(self, rid: bytes, *, one_by_one: bool = True) -> None:
        self.accept(self.generate(rid))
        step = 1 if one_by_one else len(OUTPUT)
        for pos in range(0, len(OUTPUT), step):
            self.tokens(rid, pos, OUTPUT[pos : pos + step])
        self.finish(rid)

    def undisturbed(self) -> list[bytes]:
        """The events of CHAT when nothing goes wrong, of another rid."""
        rid = self.gateway.submit()
        self.answer(rid)
        self.gateway.end(rid)
        return contents(self.gateway.events(rid))


def contents(events: list[bytes]) -> list[bytes]:
    """Events without the ids and times that differ between requests."""
    found: list[bytes] = []
    for event in events:
        assert event.endswith(b"\n\n")
        if event == b"data: [DONE]\n\n":
            found.append(event)
            continue
        chunk = json.loads(event.removeprefix(b"data: "))
        found.append(json.dumps(chunk["choices"]).encode())
    return found


@pytest.fixture
def mesh(wire: Wire, tokenizer: Target) -> Mesh:
    return Mesh(wire, tokenizer)


def test_a_stream_comes_in_order_and_ends_once(mesh: Mesh) -> None:
    rid = mesh.gateway.submit()
    generate = mesh.generate(rid)
    assert (generate.reply_to, generate.attempt, generate.seed) == ("tokenizer-0", 1, 7)
    assert generate.max_tokens == 12
    assert len(generate.prompt_ids) == 4 * generate.prompt_len > 0
    assert generate.confirmed_ids == b""
    mesh.accept(generate)
    admitted = mesh.gateway.link.expect("DeltaBatch")
    assert read(admitted.deltas[0], "Delta").flags & ADMITTED
    for pos, token in enumerate(OUTPUT):
        mesh.tokens(rid, pos, [token])
    mesh.finish(rid)
    end = mesh.gateway.end(rid)
    assert (end.tag, end.status, end.finish_reason) == ("ResponseFinished", 200, "length")
    assert end.completion_tokens == len(OUTPUT)
    events = mesh.gateway.events(rid)
    assert events[-1] == b"data: [DONE]\n\n"
    assert len(contents(events)) > 5
    done = mesh.scheduler.expect("Ack", lambda m: any(row[0] == rid and row[2:] for row in m.rows))
    assert done
    mesh.wire.quiet()
    assert len(mesh.gateway.ends(rid)) == 1


def test_a_plain_answer_comes_in_one_piece(mesh: Mesh) -> None:
    rid = mesh.gateway.submit({**CHAT, "stream": False})
    mesh.answer(rid)
    end = mesh.gateway.end(rid)
    assert (end.tag, end.status, end.events) == ("ResponseFinished", 200, [])
    body = json.loads(end.body)
    assert body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == len(OUTPUT)
    assert mesh.gateway.events(rid) == []


def test_how_tokens_are_batched_changes_no_event(mesh: Mesh) -> None:
    whole = mesh.undisturbed()
    rid = mesh.gateway.submit()
    mesh.answer(rid, one_by_one=False)
    mesh.gateway.end(rid)
    assert contents(mesh.gateway.events(rid)) == whole


def test_repeats_are_dropped_and_gaps_asked_for(mesh: Mesh) -> None:
    whole = mesh.undisturbed()
    rid = mesh.gateway.submit()
    mesh.accept(mesh.generate(rid))
    mesh.tokens(rid, 0, OUTPUT[:4])
    mesh.tokens(rid, 2, OUTPUT[2:6])
    mesh.tokens(rid, 0, OUTPUT[:3])
    mesh.tokens(rid, 8, OUTPUT[8:])
    attach = mesh.scheduler.expect("Attach")
    assert (attach.rid, attach.from_pos, attach.reply_to) == (rid, 6, "tokenizer-0")
    mesh.tokens(rid, 6, OUTPUT[6:])
    mesh.finish(rid)
    mesh.gateway.end(rid)
    assert contents(mesh.gateway.events(rid)) == whole


def test_another_gateway_gets_the_rest_of_a_stream(mesh: Mesh) -> None:
    rid = mesh.gateway.submit()
    mesh.accept(mesh.generate(rid))
    mesh.tokens(rid, 0, OUTPUT[:6])
    mesh.gateway.wait_events(rid, 4)
    second = Gateway(mesh.wire, mesh.target.address, "gateway-1")
    second.submit(rid=rid, next_event=3)
    mesh.wire.until(lambda: second.events(rid, 3), "events")
    mesh.tokens(rid, 6, OUTPUT[6:])
    mesh.finish(rid)
    assert second.end(rid).tag == "ResponseFinished"
    first = mesh.gateway.events(rid)
    rest = second.events(rid, 3)
    assert first[3:] == rest[: len(first) - 3]
    assert rest[-1] == b"data: [DONE]\n\n"
    assert not mesh.gateway.ends(rid)
    third = Gateway(mesh.wire, mesh.target.address, "gateway-2")
    third.submit(rid=rid, next_event=4)  # it has ended: kept for a while
    assert third.end(rid).tag == "ResponseFinished"
    assert third.events(rid, 4) == rest[1:]


def test_a_lost_scheduler_costs_no_event(mesh: Mesh) -> None:
    whole = mesh.undisturbed()
    rid = mesh.gateway.submit()
    generate = mesh.generate(rid)
    mesh.accept(generate)
    mesh.tokens(rid, 0, OUTPUT[:5])
    mesh.gateway.wait_events(rid, 4)
    mesh.listener.close()
    mesh.listener = mesh.wire.listen(mesh.target.dials[0], "scheduler", "scheduler-0")
    while not mesh.scheduler.has("Generate"):  # it may ask first
        mesh.wire.pump()
        if mesh.scheduler.has("Attach"):
            mesh.scheduler.expect("Attach")
            unknown = make("Failed", rid=rid, code=CODE.UNKNOWN, detail="no such request")
            mesh.scheduler.send(unknown)
    again = mesh.generate(rid)
    assert again.attempt > generate.attempt
    assert again.confirmed_ids == pack(OUTPUT[:5])
    assert (again.prompt_ids, again.seed) == (generate.prompt_ids, generate.seed)
    mesh.accept(again)
    mesh.tokens(rid, 5, OUTPUT[5:])
    mesh.finish(rid)
    mesh.gateway.end(rid)
    assert contents(mesh.gateway.events(rid)) == whole


@pytest.mark.parametrize(
    ("body", "param"), [(b"{not json", ""), ({**CHAT, "messages": "?"}, "messages")]
)
def test_a_bad_body_is_refused_before_any_queue(mesh: Mesh, body: object, param: str) -> None:
    rid = mesh.gateway.submit(body)
    end = mesh.gateway.end(rid)
    assert (end.tag, end.code) == ("ResponseFailed", CODE.INVALID)
    assert end.detail
    assert param in end.param
    mesh.wire.quiet(0.2)
    assert not mesh.scheduler.has("Generate")


def test_a_failure_of_the_engine_is_passed_on(mesh: Mesh) -> None:
    rid = mesh.gateway.submit()
    mesh.generate(rid)
    failed = make(
        "Failed", rid=rid, code=CODE.OVERLOADED, detail="full", param="", retry_after_s=3.0
    )
    mesh.scheduler.send(failed)
    end = mesh.gateway.end(rid)
    assert (end.tag, end.code, end.detail) == ("ResponseFailed", CODE.OVERLOADED, "full")
    assert end.retry_after_s == 3.0


def test_a_client_that_leaves_aborts_its_request(mesh: Mesh) -> None:
    rid = mesh.gateway.submit()
    mesh.accept(mesh.generate(rid))
    mesh.tokens(rid, 0, OUTPUT[:2])
    mesh.gateway.wait_events(rid, 2)
    for _ in range(2):
        mesh.gateway.link.send(make("Cancel", rid=rid))
    assert mesh.scheduler.expect("Abort").rid == rid
    mesh.tokens(rid, 2, OUTPUT[2:])
    mesh.wire.quiet()
    assert not mesh.gateway.ends(rid)


def test_garbage_from_both_sides_changes_nothing(mesh: Mesh) -> None:
    whole = mesh.undisturbed()
    rid = mesh.gateway.submit()
    for junk in (["Submit"], ["Submit", 1, 2, 3, 4], ["Cancel"], ["Nonsense"], 5, [], {"a": 1}):
        mesh.gateway.link.send(junk)  # type: ignore[arg-type]
    mesh.accept(mesh.generate(rid))
    for junk in (["TokenBatch", 1], ["TokenBatch", 1, 1, [[5]]], ["Finished"], ["Failed", 7]):
        mesh.scheduler.send(junk)
    mesh.tokens(os.urandom(16), 0, OUTPUT)
    mesh.finish(os.urandom(16))
    for pos, token in enumerate(OUTPUT):
        mesh.tokens(rid, pos, [token])
    mesh.finish(rid)
    mesh.gateway.end(rid)
    assert contents(mesh.gateway.events(rid)) == whole
