"""Peers for tests of services: they speak the real wire and do only what the test tells them.

A `Stage` pumps all fakes of a test from the test's own thread, so that every wait is a wait for
a message. Typical use:

    stage = Stage()
    scheduler = FakeScheduler(stage, config.scheduler_address(0))
    gateway = FakeGateway(stage, config.tokenizer_address(0))
    rid = gateway.submit("chat", {"model": "tiny", "messages": [...], "stream": True})
    generate = scheduler.expect(Generate)
    scheduler.answer(generate, [5, 6, 7])
    reply = gateway.reply(rid)
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from deepmesh.config import LinksConfig
from deepmesh.wire.link import Identity, LinkEvent, Mail, PeerDown, PeerUp
from deepmesh.wire.messages import (
    DELTA_ADMITTED,
    Accepted,
    AnyMessage,
    Credit,
    DeltaBatch,
    Finished,
    FinishReason,
    Generate,
    ReplicaStats,
    ResponseFailed,
    ResponseFinished,
    ServiceStats,
    Submit,
    TokenBatch,
    TokenRow,
)
from deepmesh.wire.packed import pack_ids
from deepmesh.wire.sockets import Dialer, Listener

PATIENCE_S = 60.0  # bounds every wait; nothing takes nearly so long
LINKS = LinksConfig(heartbeat_s=0.05, timeout_s=20.0)
Endpoint = Listener | Dialer
M = TypeVar("M")


class Stage:
    """Delivers mail to all fakes of one test."""

    def __init__(self) -> None:
        self._takers: list[tuple[Endpoint, Callable[[LinkEvent], None]]] = []

    def add(self, endpoint: Endpoint, take: Callable[[LinkEvent], None]) -> None:
        """A fake joins."""
        self._takers.append((endpoint, take))

    def remove(self, endpoint: Endpoint) -> None:
        """A fake dies: its links close."""
        self._takers = [(e, take) for e, take in self._takers if e is not endpoint]
        endpoint.close()

    def pump(self) -> None:
        """Take what has come; waits a little when nothing has."""
        events = [(t, event) for endpoint, t in self._takers for event in endpoint.receive()]
        for take, event in events:
            take(event)
        if not events:
            poller = zmq.Poller()
            for endpoint, _ in self._takers:
                for socket in endpoint.sockets:
                    poller.register(socket, zmq.POLLIN)
            poller.poll(20)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Pump until `holds()`."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
            self.pump()

    def close(self) -> None:
        """All fakes leave."""
        for endpoint, _ in self._takers:
            endpoint.close()
        self._takers = []


class FakePeer:
    """What both fakes share: a queue of mail, looked through by type."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.mail: deque[AnyMessage] = deque()
        self.is_up = False

    def take(self, event: LinkEvent) -> None:
        """The stage's callback."""
        match event:
            case PeerUp():
                self.is_up = True
            case PeerDown():
                self.is_up = False
            case Mail(message=message):
                self.mail.append(message)

    def expect(self, kind: type[M], holds: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this type, taken out of the queue; others stay."""
        found: list[M] = []

        def look() -> bool:
            for message in self.mail:
                if isinstance(message, kind) and holds(message):
                    found.append(message)
                    self.mail.remove(message)
                    return True
            return False

        self.stage.until(look, kind.__name__)
        return found[0]

    def has(self, kind: type[M]) -> bool:
        """Whether a message of this type is in the queue now."""
        return any(isinstance(message, kind) for message in self.mail)


class FakeScheduler(FakePeer):
    """The scheduler's side towards one tokenizer."""

    def __init__(
        self,
        stage: Stage,
        address: str,
        *,
        name: str = "scheduler-0",
        tokenizer: str = "tokenizer-0",
        max_model_len: int = 0,
    ) -> None:
        super().__init__(stage)
        replica = ReplicaStats(name, True, max_model_len=max_model_len)
        stats = ServiceStats(True, 0, [replica])
        self._tokenizer = tokenizer
        me = Identity.new("scheduler", name)
        self.endpoint = Listener(address, me, LINKS, lambda: stats)
        self.name = name
        self._step = itertools.count(1)
        stage.add(self.endpoint, self.take)

    def send(self, message: AnyMessage) -> None:
        """To the tokenizer."""
        assert self.endpoint.send(self._tokenizer, message)

    def accept(self, generate: Generate, cached_tokens: int = 0) -> None:
        """Admit a request."""
        self.send(Accepted(generate.rid, generate.attempt, self.name, cached_tokens))

    def tokens(self, rid: bytes, pos: int, ids: Sequence[int], *rest: bytes | int) -> None:
        """Output tokens of one request from `pos` on; `rest` are further fields of `TokenRow`."""
        row = TokenRow(rid, pos, pack_ids(list(ids)), *rest)  # type: ignore[arg-type]
        self.send(TokenBatch(next(self._step), time.time_ns(), [row]))

    def finish(self, rid: bytes, final_pos: int, reason: FinishReason = FinishReason.STOP) -> None:
        """The good end."""
        self.send(Finished(rid, reason, final_pos))

    def answer(
        self,
        generate: Generate,
        ids: Sequence[int],
        *,
        split: int = 1,
        reason: FinishReason = FinishReason.STOP,
        cached_tokens: int = 0,
        logprobs: bool = False,
    ) -> None:
        """Accept, send all ids in rows of `split`, and finish."""
        self.accept(generate, cached_tokens)
        for at in range(0, len(ids), split):
            part = ids[at : at + split]
            more = fake_logprobs(part, generate.n_logprobs) if logprobs else (b"", b"", b"")
            self.tokens(generate.rid, at, part, *more, cached_tokens)
        self.finish(generate.rid, len(ids), reason)

    def die(self) -> None:
        """Close the links without a word."""
        self.stage.remove(self.endpoint)


def fake_logprobs(ids: Sequence[int], best: int) -> tuple[bytes, bytes, bytes]:
    """Logprobs -0.5 for the ids themselves; id + k with -1 - k as the k-th best of `best`."""
    own = np.full(len(ids), -0.5, "<f4").tobytes()
    if best <= 0:
        return own, b"", b""
    others = pack_ids([token + k for token in ids for k in range(best)])
    return own, others, np.tile(-1 - np.arange(best, dtype="<f4"), len(ids)).tobytes()


@dataclass
class Reply:
    """What came back for one request."""

    events: list[bytes] = field(default_factory=list)
    first: int = 0
    admitted: bool = False
    ends: list[ResponseFinished | ResponseFailed] = field(default_factory=list)

    @property
    def end(self) -> ResponseFinished | ResponseFailed:
        """The one end."""
        assert len(self.ends) == 1
        return self.ends[0]

    @property
    def text(self) -> bytes:
        """The stream as the client sees it."""
        return b"".join(self.events)

    @property
    def json(self) -> dict[str, Any]:
        """The plain answer."""
        assert isinstance(self.end, ResponseFinished), self.end
        return msgspec.json.decode(self.end.body)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The JSON of all events but `[DONE]`."""
        lines = [line for line in self.text.split(b"\n") if line.startswith(b"data: ")]
        return [msgspec.json.decode(line[6:]) for line in lines if line != b"data: [DONE]"]


class FakeGateway(FakePeer):
    """The gateway's side towards one tokenizer; checks that events are consecutive."""

    def __init__(
        self, stage: Stage, address: str, *, name: str = "gateway-0", credits_itself: bool = True
    ) -> None:
        super().__init__(stage)
        self._identity = Identity.new("gateway", name)
        self.endpoint = Dialer(address, self._identity, LINKS)
        self._serial = itertools.count(1)
        self._credits_itself = credits_itself
        self.replies: dict[bytes, Reply] = {}
        stage.add(self.endpoint, self.take)
        stage.until(lambda: self.is_up, "the tokenizer")

    def submit(
        self,
        protocol: str,
        body: object,
        *,
        rid: bytes = b"",
        next_event: int = 0,
        deadline_ns: int = 0,
        traceparent: str = "",
    ) -> bytes:
        """Send a request, or the same one again with its `rid`; returns the rid."""
        rid = rid or next(self._serial).to_bytes(16, "big")
        self.replies[rid] = Reply(first=next_event)
        submit = Submit(
            rid,
            protocol,
            body if isinstance(body, bytes) else msgspec.json.encode(body),
            seed=7,
            created_s=1_700_000_000,
            next_event=next_event,
            deadline_ns=deadline_ns,
            traceparent=traceparent,
        )
        assert self.endpoint.send(submit)
        return rid

    def send(self, message: AnyMessage) -> None:
        """To the tokenizer."""
        assert self.endpoint.send(message)

    def take(self, event: LinkEvent) -> None:
        """Sort what comes back by request."""
        match event:
            case Mail(message=DeltaBatch(deltas=deltas)):
                for delta in deltas:
                    reply = self.replies[delta.rid]
                    reply.admitted |= bool(delta.flags & DELTA_ADMITTED)
                    self._append(delta.rid, reply, delta.first_event, delta.events)
            case Mail(message=ResponseFinished() as end):
                reply = self.replies[end.rid]
                self._append(end.rid, reply, end.first_event, end.events)
                reply.ends.append(end)
            case Mail(message=ResponseFailed() as end):
                self.replies[end.rid].ends.append(end)
            case _:
                super().take(event)

    def reply(self, rid: bytes) -> Reply:
        """The whole reply, once its end has come."""
        reply = self.replies[rid]
        self.stage.until(lambda: bool(reply.ends), "the end of a reply")
        return reply

    @property
    def stats(self) -> ServiceStats:
        """The tokenizer's last heartbeat."""
        return self.endpoint.peer.stats if self.endpoint.peer is not None else ServiceStats()

    def events(self, rid: bytes, count: int) -> list[bytes]:
        """The first `count` events, as soon as they are there."""
        reply = self.replies[rid]
        self.stage.until(lambda: len(reply.events) >= count, f"{count} events")
        return reply.events[:count]

    def die(self) -> None:
        """Close the link without a word."""
        self.stage.remove(self.endpoint)

    def _append(self, rid: bytes, reply: Reply, first: int, events: list[bytes]) -> None:
        assert not reply.ends, "an event after the end"
        if not events:
            return
        assert first == reply.first + len(reply.events), "events are not consecutive"
        reply.events += events
        if self._credits_itself:
            self.endpoint.send(Credit(rid, reply.first + len(reply.events)))
