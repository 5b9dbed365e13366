"""Live data of the mesh: what the page, `deepmesh top` and `deepmesh timeline` ask a gateway."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from deepmesh import __version__
from deepmesh.config import Config
from deepmesh.recorder import Desk
from deepmesh.telemetry import SPAN_REQUEST, WAITS, Tracer
from deepmesh.timeline import Timeline
from deepmesh.timeline import build as build_timeline
from deepmesh.waterfall import Span, Waterfall, depths, title
from deepmesh.waterfall import build as build_waterfall
from deepmesh.wire.link import Identity
from deepmesh.wire.messages import GetRecords, KeepTrace, LinkStats, Records
from services.gateway.exposition import Exposition
from services.gateway.live_figures import Figures
from services.gateway.live_mesh import MeshMap, replica_row
from services.gateway.live_requests import SeenRequest, SeenRequests
from services.gateway.streams import Streams
from services.gateway.tokenizers import Tokenizers

TICK_S = 1.0
ANSWER_S = 0.8  # from a question to the last answer that is waited for
SLICE_S = 0.25  # how soon a feed sees that the gateway ends


class _Question:
    """Asked, and not yet answered by all."""

    def __init__(self, expected: set[str]) -> None:
        self.expected, self.answers = expected, dict[str, Records]()
        self.done = asyncio.get_running_loop().create_future()

    def take(self, records: Records) -> None:
        self.answers.setdefault(records.process, records)
        if self.expected <= self.answers.keys() and not self.done.done():
            self.done.set_result(None)


class Live:
    """Everything that this gateway knows or can ask for; its loop's thread only."""

    def __init__(
        self,
        config: Config,
        me: Identity,
        tracer: Tracer,
        *,
        tokenizers: Tokenizers,
        streams: Streams,
        exposition: Exposition,
        figures: Figures,
    ) -> None:
        self.seen = SeenRequests()
        self._config, self._me, self._tracer = config, me, tracer
        self._tokenizers, self._streams = tokenizers, streams
        self._exposition, self.figures = exposition, figures
        self._map = MeshMap(config, me.name)
        exposition.restarts = self._map.restarts
        self._desk = Desk(me, tracer, on_records=self._take)
        self._questions: dict[int, _Question] = {}
        self._next_tick = 0.0

    def tick(self) -> None:
        """Several times a second."""
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self.figures.tick(self._exposition.known_replicas(), now)
            links = self._links()
            self._map.tick(links, now)
            self._watch(links)

    def keep(self, trace_id: str) -> None:
        """The request of this unsampled trace failed or was slow: all export it after all."""
        self._tracer.keep(trace_id)
        for peer in self._tokenizers.peers:
            self._tokenizers.send(peer.key, KeepTrace(trace_id))

    # ------------------------------------------------------------ the feed

    def state(self, key: str) -> bytes:
        """One event of the feed, as JSON."""
        links, peers = self._links(), self._tokenizers.peers
        self._watch(links)
        replicas = self._exposition.known_replicas()
        return msgspec.json.encode(
            {
                "now_ms": time.time() * 1e3,
                "model": self._config.served_model,
                "version": __version__,
                "processes": self._map.processes(links, peers, len(self._streams)),
                "links": self._map.rows(links),
                "news": [news._asdict() for news in self._map.news],
                "replicas": [replica_row(replica) for replica in replicas],
                "devices": self.figures.devices(),
                "figures": self.figures.points[-1] if self.figures.points else None,
                "requests": self.seen.rows(key),
            }
        )

    async def feed(
        self, key: str, interval_s: float, is_ending: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Server-sent events, until the client goes or the gateway ends."""
        while not is_ending():
            yield b"event: state\ndata: " + self.state(key) + b"\n\n"
            for _ in range(round(interval_s / SLICE_S)):
                if not is_ending():
                    await asyncio.sleep(SLICE_S)

    def _watch(self, links: list[LinkStats]) -> None:
        self._map.watch(links, self._tokenizers.peers, time.monotonic(), time.time() * 1e3)

    def _links(self) -> list[LinkStats]:
        process = self._me.process
        return self._map.links(self._tokenizers.peers, process.links() if process else [])

    # ------------------------------------------------------------ questions

    async def waterfall(self, seen: SeenRequest) -> Waterfall | None:
        """Where the time of a request went; None if its spans are gone."""
        records = await self._ask(trace_id=seen.trace_id)
        spans = [
            msgspec.json.decode(line, type=Span)
            for each in records
            for line in each.spans.splitlines()
        ]
        if not any(span.name == SPAN_REQUEST for span in spans):
            return None
        return build_waterfall(spans)

    async def timeline(self, last_s: float) -> Timeline:
        """Step records of all processes, on scheduler 0's clock."""
        now_ns = time.time_ns() - self._tracer.clock.ahead_ns
        since_ns = now_ns - int(last_s * 1e9)
        return build_timeline(await self._ask(since_ns=since_ns), since_ns, now_ns)

    async def _ask(self, *, since_ns: int = 0, trace_id: str = "") -> list[Records]:
        """All processes that are up; those that do not answer in time are left out."""
        op_id = int.from_bytes(os.urandom(7), "little")
        order = GetRecords(op_id, since_ns, trace_id)
        names = {name for link in self._links() for name in (link.name, link.peer)}
        question = _Question({n for n in names if not n.startswith("gateway-")})
        self._questions[op_id] = question
        try:
            for peer in self._tokenizers.peers:
                self._tokenizers.send(peer.key, order)
            if question.expected:
                await asyncio.wait([question.done], timeout=ANSWER_S)
        finally:
            del self._questions[op_id]
        return [self._desk.answer(order), *question.answers.values()]

    def _take(self, records: Records) -> None:
        question = self._questions.get(records.op_id)
        if question is not None:
            question.take(records)


def waterfall_row(waterfall: Waterfall, seen: SeenRequest) -> dict[str, object]:
    """As the page wants it."""
    depth, start_ns = depths(waterfall.spans), waterfall.start_ns
    return {
        "trace_id": waterfall.trace_id,
        "request_id": seen.arrival.request_id,
        "started_ms": start_ns / 1e6,
        "duration_ms": waterfall.duration_ms,
        "covered": waterfall.covered,
        "explained": waterfall.explained,
        "spans": [
            {
                "span_id": span.span_id,
                "parent_id": span.parent_id,
                "name": span.name,
                "title": title(span),
                "service": span.service,
                "process": span.process,
                "depth": depth[span.span_id],
                "start_us": (span.start_ns - start_ns) / 1e3,
                "dur_us": (span.end_ns - span.start_ns) / 1e3,
                "waits": span.name in WAITS,
                "status": span.status,
                "error": span.error,
                "attributes": span.attributes,
                "links": span.links,
            }
            for span in waterfall.spans
        ],
        "stages": waterfall.stages,
        "hops": waterfall.hops,
    }
