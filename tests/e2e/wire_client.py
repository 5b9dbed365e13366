"""Speaks to a scheduler as a tokenizer would, and keeps what comes back to the bit."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepmesh.config import LinksConfig
from deepmesh.wire import messages as m
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.link import LinkEvent
from deepmesh.wire.packed import unpack_ids
from deepmesh.wire.sockets import Dialer, Identity, Mail, PeerUp


@dataclass
class Answer:
    """All that came back for one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: bytes = b""
    prompt: m.PromptLogprobs | None = None
    ends: list[m.Finished | m.Failed] = field(default_factory=list)
    cached_tokens: int = 0


class WireClient:
    """One fake tokenizer with many requests in flight."""

    def __init__(self, address: str, name: str = "tokenizer-test") -> None:
        self.name = name
        self._dialer = Dialer(address, Identity.new("tokenizer", name), LinksConfig())
        self._inbox = Inbox(self._dialer)
        self.answers: dict[bytes, Answer] = {}
        self._aborts: dict[bytes, int] = {}
        self._until(lambda: self._dialer.peer is not None, 60)

    def run(
        self,
        requests: Iterable[m.Generate],
        *,
        abort_after: dict[bytes, int] | None = None,
        timeout_s: float = 120,
    ) -> dict[bytes, Answer]:
        """Send all at once and wait until each has ended.

        `abort_after` maps a rid to the number of tokens after which it is aborted.
        """
        self._aborts = dict(abort_after or {})
        batch = list(requests)
        for request in batch:
            self.answers[request.rid] = Answer()
            assert self._dialer.send(request)
            if self._aborts.get(request.rid) == 0:
                self._dialer.send(m.Abort(request.rid, request.attempt))
        rids = [request.rid for request in batch]
        self._until(lambda: all(self.answers[rid].ends for rid in rids), timeout_s)
        return {rid: self.answers[rid] for rid in rids}

    def settle(self, quiet_s: float = 0.3) -> None:
        """Take what still comes until nothing has come for `quiet_s`."""
        last = time.monotonic()
        while time.monotonic() - last < quiet_s:
            if any(isinstance(e, Mail) for e in self._pump(0.05)):
                last = time.monotonic()

    @property
    def stats(self) -> m.ReplicaStats:
        """The scheduler's figures as of its last heartbeat."""
        assert self._dialer.peer is not None
        replicas = self._dialer.peer.stats.replicas
        return replicas[0] if replicas else m.ReplicaStats("", False)

    def wait_stats(self, holds: "object", timeout_s: float = 60) -> m.ReplicaStats:
        """Wait until a heartbeat's figures satisfy `holds(stats)`."""
        assert callable(holds)
        self._until(lambda: bool(holds(self.stats)), timeout_s)
        return self.stats

    def tell(self, message: m.AnyMessage) -> None:
        """Send something that has no answer."""
        assert self._dialer.send(message)

    def close(self) -> None:
        """Hang up."""
        self._inbox.close()

    def _until(self, done: "object", timeout_s: float) -> None:
        assert callable(done)
        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left < 0:
                waiting = [r.hex()[:8] for r, a in self.answers.items() if not a.ends]
                raise TimeoutError(f"{timeout_s} s; still waiting for {waiting}; {self.stats}")
            self._pump(min(left, 0.1))

    def _pump(self, timeout_s: float) -> list[LinkEvent]:
        events = self._inbox.wait(timeout_s)
        for event in events:
            if isinstance(event, Mail):
                self._take(event.message)
            else:
                assert isinstance(event, PeerUp), event
        return events

    def _take(self, message: m.AnyMessage) -> None:
        match message:
            case m.TokenBatch(rows=rows):
                self._dialer.send(m.Ack([self._take_row(row) for row in rows]))
            case m.Finished(rid=rid) | m.Failed(rid=rid):
                answer = self.answers[rid]
                answer.ends.append(message)
                self._dialer.send(m.Ack([m.AckRow(rid, len(answer.ids), done=True)]))
            case m.Accepted():
                pass
            case _:
                raise AssertionError(message)

    def _take_row(self, row: m.TokenRow) -> m.AckRow:
        answer = self.answers[row.rid]
        assert row.pos == len(answer.ids), "a gap or a repeat"
        assert not answer.ends, "tokens after the end"
        answer.ids += unpack_ids(row.ids).tolist()
        answer.logprobs += row.logprobs
        if row.pos == 0:
            answer.prompt = row.prompt
            answer.cached_tokens = row.cached_tokens
        limit = self._aborts.get(row.rid)
        if limit is not None and len(answer.ids) >= limit:
            self._dialer.send(m.Abort(row.rid, 1))
            del self._aborts[row.rid]
        return m.AckRow(row.rid, len(answer.ids))
