"""The kvstore's loop: orders in, answers out; schedulers, executors, tokenizers dial in."""

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deepmesh.config import Config
from deepmesh.health import Readiness
from deepmesh.recorder import Desk
from deepmesh.telemetry import Tracer
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    AnyMessage,
    BlockEvents,
    BlocksRead,
    Drain,
    DropRecord,
    FlushStore,
    GetBlocks,
    GetRecord,
    GetStoreStats,
    KvItem,
    KvStatus,
    Lookup,
    PutBlocks,
    PutRecord,
    Reserve,
    Reserved,
    ServiceStats,
    SharedFile,
    SharedFileSeen,
    Shutdown,
    StoreFigures,
    StoreFlushed,
    StoreStats,
)
from deepmesh.wire.sockets import Identity, LinkEvent, Listener, Mail, Peer, PeerDown, PeerUp

from .blocks import BlockTiers
from .disk import DiskTier
from .eviction import Key, kind_of
from .memory import NONCE_BYTES, MemoryTier, SharedFolder
from .orders import BlockOrders
from .record_orders import RecordOrders
from .records import RecordBook
from .shared import MAX_LISTED, SharedTier
from .shared_asks import CameUp, Tier
from .shared_orders import Ready, SharedOrders
from .store import HASH_BYTES, Entry
from .values import levels, shared_values

_log = logging.getLogger(__name__)
IDLE_S = 1.0
LOOKUP_SHARE = 0.6  # of what a scheduler waits for a lookup, Redis may take
EVENTS_PER_MESSAGE = 4096
MIN_RECORD_DISK_BYTES = 1 << 20


class KvStoreService:
    """One kvstore process. Single-threaded: an order is carried out before the next is read."""

    def __init__(
        self,
        config: Config,
        *,
        index: int,
        tracer: Tracer,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the tiers and listen.

        Raises:
            InUse: another process has the files.
            OSError: a folder cannot be used.
        """
        self.name = f"kvstore-{index}"
        settings = config.kvstore
        self._tracer, self._clock = tracer, clock
        folder = config.kvstore_disk_dir(index)
        self._disks: list[DiskTier] = []
        blocks_disk = record_disk = None
        if settings.disk_bytes:
            blocks_disk = self._open(folder / "blocks", settings.disk_bytes)
            record_bytes = max(2 * settings.record_bytes, MIN_RECORD_DISK_BYTES)
            record_disk = self._open(folder / "records", record_bytes)
        self._shared = self._share(config) if settings.memory_bytes else None
        path = self._shared.pool_path if self._shared else None
        self._memory = MemoryTier(path, settings.memory_bytes)
        self.tiers = BlockTiers(
            self._memory,
            blocks_disk,
            ttl_s=settings.ttl_s,
            on_kept=self._share_block if settings.redis_url else None,
        )
        self._orders = BlockOrders(self.tiers)
        self.records = RecordBook(settings.record_bytes, record_disk)
        self.records.load(clock())
        self._record_orders = RecordOrders(self.records)
        self._mapping: set[str] = set()  # peers that proved to see the shared file
        self._stopping = False
        self._life = threading.RLock()  # a signal handler may come while this thread holds it
        self._is_open = True
        me = Identity.new("kvstore", self.name, config)
        Desk(me, tracer)
        self.listener = Listener(config.kvstore_address(index), me, config.links, self._stats)
        self._inbox = Inbox(self.listener)
        self._ready = Readiness(config.mesh.run_dir, self.name, lambda: True)
        self.shared: SharedTier | None = None
        self._shared_orders: SharedOrders | None = None
        self._num_listed = 0  # in the directory
        if settings.redis_url:
            self.shared = SharedTier(_redis(config), holder=self._holder(config), wake=self._wake)
            self._shared_orders = SharedOrders(
                self.shared,
                self.tiers,
                self._orders,
                self._record_orders,
                self._mapping,
                lookup_s=LOOKUP_SHARE * config.scheduler.store_lookup_s,
            )

    def stop(self) -> None:
        """End the loop. Safe from signal handlers and other threads."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with self._life:  # not after the inbox is closed: its descriptor may be another's by then
            if self._is_open:
                self._inbox.wake()

    def run(self) -> None:
        """Serve until `stop`, `Drain` or `Shutdown`.

        Anything raised here ends the process: its supervisor restarts it, peers see the link go.
        """
        _log.info(
            "listening at %s, %d blocks on disk", self.listener.address, len(self.tiers.store.disk)
        )
        try:
            while not self._stopping:
                for event in self._inbox.wait(self._patience()):
                    self._on_event(event)
                self._orders.tick(time.monotonic())
                self._tick_shared()
                self.tiers.expire()
                self.tiers.take_ages()
                self._ready.look()
                self.records.expire(self._clock())
                self._report_blocks()
        finally:
            self.close()

    def close(self) -> None:
        """Give sockets and files back; nothing of the shared ones stays."""
        with self._life:
            self._is_open = False
        if self.shared is not None:
            self.shared.close()
        self._ready.close()
        self._inbox.close()
        self._memory.close()
        if self._shared is not None:
            self._shared.close()
        for disk in self._disks:
            disk.close()

    # ------------------------------------------------------------ mail

    def _on_event(self, event: LinkEvent) -> None:
        match event:
            case PeerUp(peer):
                _log.info("%s is up", peer.name)
                self._greet(peer)
            case PeerDown(peer, reason):
                _log.warning("%s is lost: %s", peer.name, reason)
                self._mapping.discard(peer.name)
                self._orders.lose_peer(peer.name)
                if self._shared_orders is not None:
                    self._shared_orders.lose_peer(peer.name)
            case Mail():
                self._on_mail(event)

    def _greet(self, peer: Peer) -> None:
        if peer.service == "executor" and self._memory.path is not None:
            path = str(self._memory.path)
            self.listener.send(peer.name, SharedFile(path, self._memory.num_bytes, NONCE_BYTES))
        if peer.service == "router":
            self._send_events([peer.name], list(self.tiers.store.entries), [], first=True)

    def _on_mail(self, mail: Mail) -> None:
        begin_ns, peer, now_s = time.time_ns(), mail.peer.name, time.monotonic()
        shared = self._shared_orders
        attached: list[bytes] = []
        answer: AnyMessage | None = None
        match mail.message:
            case Lookup() as order:
                answer = shared.lookup(peer, order, now_s) if shared else self._orders.lookup(order)
                num_items = answer.num_point_blocks if answer is not None else 0
                self._trace("kv lookup", order.traceparent, mail, begin_ns, num_items)
            case GetBlocks() as order:
                is_mapped = peer in self._mapping
                found = (
                    shared.get(peer, order, now_s)
                    if shared
                    else self._orders.get(peer, order, mapped=is_mapped, now_s=now_s)
                )
                answer, attached = found or (None, [])
                self._trace("kv get", order.traceparent, mail, begin_ns, len(order.items))
            case PutBlocks() as order:
                answer = self._orders.put(peer, order, mail.attachments, now_s=now_s)
                self._trace("kv put", order.traceparent, mail, begin_ns, len(order.items))
            case Reserve() as order:
                answer = Reserved(order.op_id, KvStatus.INVALID, [])
                if peer in self._mapping:
                    answer = self._orders.reserve(peer, order, now_s)
            case BlocksRead() as order:
                self._orders.read(peer, order, now_s=now_s)
            case SharedFileSeen(nonce=nonce):
                if hmac.compare_digest(nonce, self._memory.nonce):
                    self._mapping.add(peer)
            case PutRecord() | GetRecord() | DropRecord() as order:
                answer = (
                    shared.record(peer, order, self._clock(), now_s)
                    if shared
                    else self._record_orders.answer(order, self._clock())
                )
            case GetStoreStats(op_id=op_id):
                figures = self._figures()
                answer = StoreStats(op_id, figures.values, figures.histograms, self._holders())
            case FlushStore() as order if mail.peer.service == "operator":
                _log.warning("%s flushes all blocks", peer)
                answer = (
                    shared.flush(peer, order, now_s)
                    if shared
                    else StoreFlushed(order.op_id, KvStatus.OK, self.tiers.flush())
                )
            case Drain() | Shutdown():
                self._stopping = True
            case message:
                self.tiers.counters["unexpected"] += 1
                _log.warning("ignored a %s of %s", type(message).__name__, peer)
        if answer is not None:
            self.listener.send(peer, answer, attached)  # a lost peer shows as PeerDown

    def _trace(self, name: str, parent: str, mail: Mail, begin_ns: int, num_items: int) -> None:
        if not parent:
            return
        hop = {"message": type(mail.message).__name__, "from": mail.peer.name}
        self._tracer.record("hop", parent, mail.sent_ns, mail.received_ns, hop)
        self._tracer.record(name, parent, begin_ns, time.time_ns(), {"items": num_items})

    # ------------------------------------------------------------ what others are told

    def _report_blocks(self) -> None:
        added, dropped = self.tiers.store.take_events()
        if self.shared is not None and (added or dropped):
            self._list(added, dropped)
        routers = [name for name, peer in self.listener.peers.items() if peer.service == "router"]
        if routers and (added or dropped):
            self._send_events(routers, added, dropped)

    def _send_events(
        self, routers: list[str], added: list[Key], dropped: list[Key], *, first: bool = False
    ) -> None:
        for at in range(0, max(len(added), len(dropped), 1), EVENTS_PER_MESSAGE):
            here = slice(at, at + EVENTS_PER_MESSAGE)
            message = BlockEvents(first and at == 0, _items(added[here]), _items(dropped[here]))
            for router in routers:
                self.listener.send(router, message)

    def _figures(self) -> StoreFigures:
        values = {
            **levels(self.tiers, self._disks, self.records),
            "open_transfers": self._num_open(),
            **(shared_values(self.shared) if self.shared is not None else {}),
        }
        histograms = [*self.tiers.timings.report(), *self.tiers.ages.report()]
        if self.shared is not None:
            histograms += self.shared.timings.report()
        return StoreFigures(self.name, sorted(values.items()), histograms)

    def _holders(self) -> list[tuple[str, int]]:
        return [(each.name, each.num_items) for each in self.shared.holders] if self.shared else []

    def _num_open(self) -> int:
        waiting = self._shared_orders.num_open if self._shared_orders is not None else 0
        return self._orders.num_open + waiting

    def _stats(self) -> ServiceStats:
        return ServiceStats(ready=True, requests=self._num_open(), stores=[self._figures()])

    # ------------------------------------------------------------ the shared tier

    def _patience(self) -> float:
        if self._shared_orders is None:
            return IDLE_S
        return min(IDLE_S, self._shared_orders.patience(time.monotonic()))

    def _tick_shared(self) -> None:
        if self.shared is None or self._shared_orders is None:
            return
        answers = self.shared.poll()
        if any(isinstance(answer, CameUp) for answer in answers):
            self._num_listed = 0
            self._list(list(self.tiers.store.entries), [])
        now_s, wall_s = time.monotonic(), self._clock()
        for ready in self._shared_orders.take(answers, now_s, wall_s):
            self._send_ready(ready)
        for ready in self._shared_orders.tick(now_s, wall_s):
            self._send_ready(ready)

    def _send_ready(self, ready: Ready) -> None:
        self.listener.send(ready.peer, ready.message, ready.attachments)

    def _list(self, added: list[Key], dropped: list[Key]) -> None:
        """Tell the directory, as far as it takes them."""
        assert self.shared is not None
        room = max(0, MAX_LISTED - self._num_listed)
        self.shared.list_held(added[:room], dropped)
        self._num_listed = max(0, self._num_listed + len(added[:room]) - len(dropped))

    def _share_block(self, key: Key, entry: Entry, payload: bytes | memoryview) -> None:
        if self.shared is not None:
            self.shared.put(key, entry, payload)

    def _holder(self, config: Config) -> str:
        """How the directory names this kvstore: meshes of several hosts may share it."""
        return f"{socket.gethostname()}:{config.mesh.run_dir}/{self.name}"

    # ------------------------------------------------------------ opening

    def _open(self, folder: Path, max_bytes: int) -> DiskTier:
        self._disks.append(DiskTier(folder, max_bytes=max_bytes))
        return self._disks[-1]

    def _share(self, config: Config) -> SharedFolder | None:
        folder = config.shared_dir
        if folder is None or not folder.parent.is_dir():
            _log.info("no shared files: blocks travel in messages")
            return None
        return SharedFolder(folder, self.name)


def _redis(config: Config) -> Tier:
    from .redis_tier import RedisTier  # the client takes a third of the start: only who uses it

    settings = config.kvstore
    return RedisTier(
        settings.redis_url,
        prefix=settings.redis_prefix,
        max_bytes=settings.redis_max_bytes,
        record_bytes=settings.record_bytes,
        ttl_s=settings.redis_ttl_s,
    )


def _items(keys: list[Key]) -> list[KvItem]:
    return [KvItem(key[:HASH_BYTES], kind_of(key)) for key in keys]
