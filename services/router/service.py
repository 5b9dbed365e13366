"""The router's loop: new requests in from the tokenizers, out to one of the schedulers each."""

import logging
import time

from deepmesh.config import Config
from deepmesh.health import Readiness
from deepmesh.recorder import Desk
from deepmesh.telemetry import SPAN_HOP, SPAN_ROUTE, Tracer
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    Ack,
    BlockEvents,
    Drain,
    Failed,
    Generate,
    PrefixEvents,
    Rid,
    ServiceStats,
    Shutdown,
)
from deepmesh.wire.sockets import Dialer, Identity, LinkEvent, Listener, Mail, PeerDown, PeerUp
from services.router.placements import Placements, Send
from services.router.replicas import Route
from services.router.stats import attributes, service_stats

TICK_S = 0.1  # how soon a heartbeat is looked at
_log = logging.getLogger(__name__)


class RouterService:
    """One router process: tokenizers dial in, schedulers and kvstores are dialled.

    Only `Generate` passes: tokens, ends, aborts go directly between scheduler and tokenizer, so
    a router that dies delays what it has not placed yet, and nothing else.
    """

    def __init__(self, config: Config, *, tracer: Tracer) -> None:
        me = Identity.new("router", "router-0", config)
        Desk(me, tracer)
        self._name = me.name
        self._tracer = tracer
        self.placements = Placements(
            config.scheduler.max_rows + config.scheduler.max_waiting,
            config.scheduler.max_rows,
            is_aware=config.router.policy == "aware",
        )
        self.listener = Listener(config.router_address, me, config.links, self._stats)
        self._dialers = [
            Dialer(config.scheduler_address(index), me, config.links)
            for index in range(config.scheduler.count)
        ]
        stores = [
            Dialer(config.kvstore_address(index), me, config.links)
            for index in range(config.kvstore.count)
        ]
        self._by_name: dict[str, Dialer] = {}
        self._seen: dict[str, ServiceStats] = {}  # last heartbeat that was looked at
        self._arrived_ns: dict[Rid, int] = {}  # of traced requests that wait
        self._inbox = Inbox(self.listener, *self._dialers, *stores)
        self._stopping = False
        self._ready = Readiness(
            config.mesh.run_dir, me.name, lambda: self.placements.replicas.is_ready
        )

    def stop(self) -> None:
        """End now: what waits here is sent again by its tokenizers. Safe from signal handlers."""
        if not self._stopping:
            self._stopping = True
            self._inbox.wake()

    def run(self) -> None:
        """Serve until `stop`; anything raised here ends the process, peers see the link go."""
        _log.info("listening at %s", self.listener.address)
        try:
            while not self._stopping:
                for event in self._inbox.wait(TICK_S):
                    self._take(event)
                self._read_heartbeats()
                self._ready.look()
        finally:
            self._ready.close()
            self._inbox.close()

    # ------------------------------------------------------------ the loop

    def _take(self, event: LinkEvent) -> None:
        match event:
            case PeerUp(peer):
                _log.info("%s is up", peer.name)
                if peer.service == "scheduler":
                    for dialer in self._dialers:
                        if dialer.peer is peer:
                            self._by_name[peer.name] = dialer
                    self.placements.replicas.up(peer.name)
            case PeerDown(peer, reason):
                _log.warning("%s is lost: %s", peer.name, reason)
                self._lost(peer.service, peer.name)
            case Mail():
                self._mail(event)

    def _lost(self, service: str, name: str) -> None:
        match service:
            case "scheduler":
                self._seen.pop(name, None)
                self._send(self.placements.replica_down(name, time.monotonic()))
            case "kvstore":
                self.placements.replicas.store_down(name)
            case _:
                self.placements.tokenizer_down(name, time.monotonic())

    def _mail(self, mail: Mail) -> None:
        match mail.message:
            case Generate() as generate:
                self._hop(mail, generate)
                self._send(self.placements.generate(mail.peer.name, generate, time.monotonic()))
            case Ack(rows=rows):
                for row in rows:
                    self._arrived_ns.pop(row.rid, None)
                self._send(self.placements.ack(rows, time.monotonic()))
            case PrefixEvents() as events:
                self.placements.replicas.prefixes(mail.peer.name, events)
            case BlockEvents() as events:
                self.placements.replicas.blocks(mail.peer.name, events)
            case Drain() | Shutdown():
                self.stop()
            case message:
                _log.warning("ignored a %s of %s", type(message).__name__, mail.peer.name)

    def _read_heartbeats(self) -> None:
        for name, dialer in self._by_name.items():
            peer = dialer.peer
            if peer is None or peer.name != name or self._seen.get(name) is peer.stats:
                continue
            self._seen[name] = peer.stats
            self._send(self.placements.heartbeat(name, peer.stats, time.monotonic()))

    def _send(self, sends: list[Send]) -> None:
        for name, message, route in sends:
            if isinstance(message, Failed):
                _log.warning("%s refused: %s", message.rid.hex()[:12], message.detail)
                self._arrived_ns.pop(message.rid, None)
                self.listener.send(name, message)  # False: its tokenizer sends it again
                continue
            _log.debug("%s -> %s", message.rid.hex()[:12], name)
            self._by_name[name].send(message)  # False: PeerDown follows and moves it
            if route is not None:
                self._routed(message, route)

    # ------------------------------------------------------------ traces and stats

    def _hop(self, mail: Mail, generate: Generate) -> None:
        if generate.traceparent:
            self._arrived_ns.setdefault(generate.rid, mail.received_ns)
            found: dict[str, str | int | float | bool] = {
                "message": "Generate",
                "from": mail.peer.name,
            }
            parent = generate.traceparent
            self._tracer.record(SPAN_HOP, parent, mail.sent_ns, mail.received_ns, found)

    def _routed(self, message: Generate, route: Route) -> None:
        arrived_ns = self._arrived_ns.pop(message.rid, 0)
        if arrived_ns:
            end_ns, parent = time.time_ns(), message.traceparent
            self._tracer.record(SPAN_ROUTE, parent, arrived_ns, end_ns, attributes(route))

    def _stats(self) -> ServiceStats:
        return service_stats(self._name, self.placements, time.monotonic())
