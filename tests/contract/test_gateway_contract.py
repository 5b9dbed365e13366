"""What HTTP clients and tokenizers rely on, of any gateway at a URL."""

import json
import os
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from tests.contract.raw import ENUMS, Guest, Wire, make
from tests.contract.targets import Target

CODE = ENUMS["ErrorCode"]
ADMITTED = 1
EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(8)] + [b"data: [DONE]\n\n"]
PATH = "/v1/chat/completions"


class Call(threading.Thread):
    """One HTTP request in a thread; the test pumps the wire meanwhile."""

    def __init__(self, url: str, body: bytes, path: str = PATH) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url + path, body
        self.status, self.data = 0, b""
        self.headers = httpx.Headers()
        self.hang_up_at = -1  # events after which the client leaves
        self.start()

    def run(self) -> None:
        headers = {"content-type": "application/json"}
        with httpx.stream("POST", self._url, content=self._body, headers=headers) as response:
            self.status, self.headers = response.status_code, response.headers
            for piece in response.iter_raw():
                self.data += piece
                if 0 <= self.hang_up_at <= len(self.events):
                    return

    @property
    def events(self) -> list[bytes]:
        """Without comment lines."""
        found = [event + b"\n\n" for event in self.data.split(b"\n\n") if event]
        return [event for event in found if not event.startswith(b":")]


class Mesh:
    """A tokenizer behind the gateway."""

    def __init__(self, wire: Wire, target: Target) -> None:
        self.wire, self.target = wire, target
        self.listener = wire.listen(target.dials[0], "tokenizer", "tokenizer-0")
        replica = make("ReplicaStats", name="scheduler-0", ready=True, model="tiny")
        self.listener.stats = make("ServiceStats", ready=True, replicas=[replica])
        self.until_ready()

    @property
    def tokenizer(self) -> Guest:
        return self.listener.guest("gateway-0")

    def until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while self.get("/ready") != 200:
            assert time.monotonic() < deadline
            self.wire.pump()

    def get(self, path: str) -> int:
        try:
            return httpx.get(self.target.address + path, timeout=5).status_code
        except httpx.TransportError:
            return 0  # it does not listen yet

    def call(self, body: object = None, path: str = PATH) -> tuple[Call, SimpleNamespace]:
        """A request, and its Submit."""
        raw = body if isinstance(body, bytes) else json.dumps(body or {"stream": True}).encode()
        call = Call(self.target.address, raw, path)
        submit = self.tokenizer.expect("Submit", lambda m: m.body == raw and m.next_event == 0)
        return call, submit

    def deltas(self, rid: bytes, first: int, events: list[bytes]) -> None:
        delta = make("Delta", rid=rid, first_event=first, events=events, flags=ADMITTED)
        self.tokenizer.send(make("DeltaBatch", deltas=[delta]))

    def finish(self, rid: bytes, first: int = 0, events: list[bytes] | None = None) -> None:
        given = {"rid": rid, "status": 200, "first_event": first, "events": events or []}
        self.tokenizer.send(make("ResponseFinished", **given))

    def join(self, call: Call) -> None:
        self.wire.until(lambda: not call.is_alive(), "the answer")


@pytest.fixture
def mesh(wire: Wire, gateway: Target) -> Mesh:
    return Mesh(wire, gateway)


def test_it_is_ready_when_a_tokenizer_tells_of_a_ready_replica(mesh: Mesh) -> None:
    mesh.listener.stats = make("ServiceStats", ready=True, replicas=[])
    mesh.wire.until(lambda: mesh.get("/ready") == 503, "not ready")
    replica = make("ReplicaStats", name="scheduler-0", ready=True)
    mesh.listener.stats = make("ServiceStats", ready=True, replicas=[replica])
    mesh.wire.until(lambda: mesh.get("/ready") == 200, "ready")


def test_bodies_are_passed_on_byte_by_byte(mesh: Mesh) -> None:
    bodies = [b'{"stream": true,  "x": "\xff\x00"}', b"not json at all", b""]
    seen: list[SimpleNamespace] = []
    for body in bodies:
        call, submit = mesh.call(body)
        assert submit.body == body
        assert submit.protocol == "chat"
        assert len(submit.rid) == 16
        assert 0 <= submit.seed < 1 << 63
        assert submit.next_event == 0
        seen.append(submit)
        mesh.finish(submit.rid)
        mesh.join(call)
    assert len({submit.rid for submit in seen}) == 3
    call, submit = mesh.call(path="/v1/completions")
    assert submit.protocol == "completions"
    mesh.finish(submit.rid)
    mesh.join(call)


def test_events_reach_the_client_in_order_and_unchanged(mesh: Mesh) -> None:
    call, submit = mesh.call()
    mesh.deltas(submit.rid, 0, EVENTS[:1])
    mesh.wire.until(lambda: call.events == EVENTS[:1], "the first event, before the others")
    assert call.headers["content-type"].startswith("text/event-stream")
    mesh.deltas(submit.rid, 1, EVENTS[1:4])
    mesh.deltas(submit.rid, 2, EVENTS[2:6])  # repeats two
    mesh.finish(submit.rid, 6, EVENTS[6:])
    mesh.join(call)
    assert (call.status, call.events) == (200, EVENTS)


def test_a_plain_answer_is_passed_on(mesh: Mesh) -> None:
    call, submit = mesh.call({})
    body = b'{"choices": []}'
    mesh.tokenizer.send(make("ResponseFinished", rid=submit.rid, status=200, body=body))
    mesh.join(call)
    assert (call.status, call.data) == (200, body)
    assert call.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID", 400),
        ("TOO_LONG", 400),
        ("UNKNOWN_MODEL", 404),
        ("OVERLOADED", 429),
        ("ENGINE_RESTARTED", 503),
        ("INTERNAL", 500),
    ],
)
def test_failures_become_http_errors(mesh: Mesh, code: str, status: int) -> None:
    call, submit = mesh.call({})
    failed = make("ResponseFailed", rid=submit.rid, code=getattr(CODE, code), detail="why it is")
    mesh.tokenizer.send(failed)
    mesh.join(call)
    assert call.status == status
    assert json.loads(call.data)["error"]["message"] == "why it is"
    assert ("retry-after" in call.headers) == (status in (429, 503))


def test_a_failure_in_mid_stream_is_the_last_event(mesh: Mesh) -> None:
    call, submit = mesh.call()
    mesh.deltas(submit.rid, 0, EVENTS[:2])
    mesh.wire.until(lambda: len(call.events) == 2, "two events")
    failed = make("ResponseFailed", rid=submit.rid, code=CODE.ENGINE_ERROR, detail="it broke")
    mesh.tokenizer.send(failed)
    mesh.join(call)
    assert call.events[:2] == EVENTS[:2]
    assert len(call.events) >= 3
    assert b"it broke" in call.data


def test_a_client_that_leaves_is_told_to_the_tokenizer(mesh: Mesh) -> None:
    call, submit = mesh.call()
    call.hang_up_at = 2
    mesh.deltas(submit.rid, 0, EVENTS[:2])
    mesh.join(call)
    for number in range(2, 6):  # some notice when they write
        mesh.deltas(submit.rid, number, EVENTS[number : number + 1])
        mesh.wire.quiet(0.1)
    assert mesh.tokenizer.expect("Cancel").rid == submit.rid


def test_a_lost_tokenizer_is_asked_again_from_the_next_event_on(mesh: Mesh) -> None:
    call, submit = mesh.call()
    mesh.deltas(submit.rid, 0, EVENTS[:3])
    mesh.wire.until(lambda: len(call.events) == 3, "three events")
    mesh.listener.close()
    mesh.listener = mesh.wire.listen(mesh.target.dials[0], "tokenizer", "tokenizer-0")
    again = mesh.tokenizer.expect("Submit", lambda m: m.rid == submit.rid)
    assert again.next_event == 3
    assert (again.body, again.seed) == (submit.body, submit.seed)
    mesh.deltas(again.rid, 3, EVENTS[3:])
    mesh.finish(again.rid, len(EVENTS))
    mesh.join(call)
    assert (call.status, call.events) == (200, EVENTS)


def test_garbage_changes_nothing(mesh: Mesh) -> None:
    call, submit = mesh.call()
    mesh.deltas(submit.rid, 0, EVENTS[:2])
    for junk in (["Nonsense"], ["DeltaBatch"], ["DeltaBatch", [[1]]], ["ResponseFinished"], 5, []):
        mesh.tokenizer.send(junk)  # type: ignore[arg-type]
    mesh.deltas(os.urandom(16), 0, EVENTS)
    mesh.finish(os.urandom(16))
    mesh.deltas(submit.rid, 2, EVENTS[2:])
    mesh.finish(submit.rid, len(EVENTS))
    mesh.finish(submit.rid, len(EVENTS))  # a second end
    mesh.join(call)
    assert call.events == EVENTS


def test_an_unknown_route_is_404(mesh: Mesh) -> None:
    response = httpx.post(mesh.target.address + "/v1/nonsense", content=b"{}", timeout=5)
    assert response.status_code == 404
    assert "nonsense" in response.text
