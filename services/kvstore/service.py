"""The kvstore's loop: orders in, answers out; schedulers, executors, tokenizers dial in."""

import hmac
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deepmesh.config import Config
from deepmesh.health import Readiness
from deepmesh.telemetry import Tracer
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    AnyMessage,
    BlockEvents,
    BlocksRead,
    Drain,
    DropRecord,
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
from .store import HASH_BYTES

_log = logging.getLogger(__name__)
IDLE_S = 1.0
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
        self.tiers = BlockTiers(self._memory, blocks_disk)
        self._orders = BlockOrders(self.tiers)
        self.records = RecordBook(settings.record_bytes, record_disk)
        self.records.load(clock())
        self._record_orders = RecordOrders(self.records)
        self._mapping: set[str] = set()  # peers that proved to see the shared file
        self._stopping = False
        self._life = threading.RLock()  # a signal handler may come while this thread holds it
        self._is_open = True
        me = Identity.new("kvstore", self.name, config)
        self.listener = Listener(config.kvstore_address(index), me, config.links, self._stats)
        self._inbox = Inbox(self.listener)
        self._ready = Readiness(config.mesh.run_dir, self.name, lambda: True)

    def stop(self) -> None:
        """End the loop. Safe from signal handlers and other threads."""
        self._stopping = True
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
                for event in self._inbox.wait(IDLE_S):
                    self._on_event(event)
                self._orders.tick(time.monotonic())
                self._ready.look()
                self.records.expire(self._clock())
                self._report_blocks()
        finally:
            self.close()

    def close(self) -> None:
        """Give sockets and files back; nothing of the shared ones stays."""
        with self._life:
            self._is_open = False
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
            case Mail():
                self._on_mail(event)

    def _greet(self, peer: Peer) -> None:
        if peer.service == "executor" and self._memory.path is not None:
            path = str(self._memory.path)
            self.listener.send(peer.name, SharedFile(path, self._memory.num_bytes, NONCE_BYTES))
        if peer.service == "router":
            self._send_events([peer.name], list(self.tiers.store.entries), [], first=True)

    def _on_mail(self, mail: Mail) -> None:
        begin_ns, peer = time.time_ns(), mail.peer.name
        attached: list[bytes] = []
        answer: AnyMessage | None = None
        match mail.message:
            case Lookup() as order:
                answer = self._orders.lookup(order)
                self._trace("kv lookup", order.traceparent, mail, begin_ns, answer.num_point_blocks)
            case GetBlocks() as order:
                answer, attached = self._orders.get(
                    peer, order, mapped=peer in self._mapping, now_s=time.monotonic()
                )
                self._trace("kv get", order.traceparent, mail, begin_ns, len(order.items))
            case PutBlocks() as order:
                answer = self._orders.put(peer, order, mail.attachments)
                self._trace("kv put", order.traceparent, mail, begin_ns, len(order.items))
            case Reserve() as order:
                answer = Reserved(order.op_id, KvStatus.INVALID, [])
                if peer in self._mapping:
                    answer = self._orders.reserve(peer, order, time.monotonic())
            case BlocksRead() as order:
                self._orders.read(peer, order)
            case SharedFileSeen(nonce=nonce):
                if hmac.compare_digest(nonce, self._memory.nonce):
                    self._mapping.add(peer)
            case PutRecord() | GetRecord() | DropRecord() as order:
                answer = self._record_orders.answer(order, self._clock())
            case GetStoreStats(op_id=op_id):
                answer = StoreStats(op_id, self._values())
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

    def _values(self) -> list[tuple[str, int]]:
        store = self.tiers.store
        levels = {
            "memory_bytes": store.memory.used,
            "memory_held_bytes": store.memory.held_bytes,
            "memory_items": len(store.memory),
            "disk_bytes": store.disk.used,
            "disk_items": len(store.disk),
            "disk_file_bytes": sum(disk.num_bytes for disk in self._disks),
            "records": len(self.records),
            "record_bytes": self.records.num_bytes,
            "open_transfers": self._orders.num_open,
            "disk_damaged": sum(disk.counters["damaged"] for disk in self._disks),
        }
        return sorted({**self.tiers.counters, **levels}.items())

    def _stats(self) -> ServiceStats:
        return ServiceStats(ready=True, requests=self._orders.num_open)

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


def _items(keys: list[Key]) -> list[KvItem]:
    return [KvItem(key[:HASH_BYTES], kind_of(key)) for key in keys]
