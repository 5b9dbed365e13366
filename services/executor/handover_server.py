"""Answers executors of other groups that pull prompts from this one."""

import hmac
import logging
from collections import Counter
from pathlib import Path

from deepmesh.checksum import crc32
from deepmesh.config import Config
from deepmesh.wire.link import Identity, LinkEvent, Peer
from deepmesh.wire.messages import (
    Blocks,
    BlocksRead,
    GetBlocks,
    KvItem,
    KvStatus,
    KvTier,
    ServiceStats,
    SharedFile,
    SharedFileSeen,
)
from deepmesh.wire.sockets import Listener, Mail, PeerDown, PeerUp
from services.executor.handover_area import NONCE_BYTES, HandoverArea
from services.executor.handover_memory import AreaMemory, HostMemory
from services.executor.window import make_window

_log = logging.getLogger(__name__)


class HandoverServer:
    """Listens, shows its file to who can see it, and keeps what is read until it has been.

    Used by the thread of the transfers alone.
    """

    def __init__(self, config: Config, me: Identity, address: str) -> None:
        self.counters: Counter[str] = Counter()
        self.area = HandoverArea(_memory(config, me.name))
        self.listener = Listener(address, me, config.links, ServiceStats)
        self._sees: set[str] = set()  # peers that map the file, by key
        self._reading: dict[str, dict[int, list[object]]] = {}  # by key of the peer, and op_id

    def on_event(self, event: LinkEvent) -> bool:
        """Whether the event was for this side of the executor."""
        peer = event.peer
        match event:
            case PeerUp():
                if self.listener.peers.get(peer.name) is not peer:
                    return False
                self._reading[peer.key] = {}
                if name := self.area.memory.name:
                    offer = SharedFile(name, self.area.memory.num_bytes, NONCE_BYTES)
                    self.listener.send(peer.name, offer)
                return True
            case PeerDown():
                self._sees.discard(peer.key)
                orders = self._reading.pop(peer.key, None)
                for handles in (orders or {}).values():
                    self._end(handles)
                return orders is not None
            case Mail():
                if peer.key not in self._reading:
                    return False
                self._mail(peer, event)
                return True

    def close(self) -> None:
        """The listener belongs to the inbox."""
        self.area.close()

    # ------------------------------------------------------------ parts

    def _mail(self, peer: Peer, mail: Mail) -> None:
        match mail.message:
            case SharedFileSeen(nonce):
                if hmac.compare_digest(nonce, self.area.nonce):
                    self._sees.add(peer.key)
            case GetBlocks() as order:
                self._get(peer, order)
            case BlocksRead(op_id, damaged):
                self.counters["damaged"] += len(damaged)
                self._end(self._reading[peer.key].pop(op_id, []))
            case message:
                _log.warning("ignored a %s of %s", type(message).__name__, peer.name)

    def _get(self, peer: Peer, order: GetBlocks) -> None:
        if order.op_id in self._reading[peer.key]:
            self.listener.send(peer.name, Blocks(order.op_id, KvStatus.INVALID, [], "used before"))
            return
        items: list[KvItem] = []
        attachments: list[bytes] = []
        handles: list[object] = []
        is_seen = peer.key in self._sees
        for asked in order.items:
            found = self.area.begin_read((asked.hash, asked.kind))
            if found is None:
                items.append(KvItem(asked.hash, asked.kind, tier=KvTier.NONE))
                continue
            item, handle = found
            if is_seen:
                handles.append(handle)
                items.append(item)
                continue
            payload = self.area.read(item)
            self.area.end_read(handle)
            if payload is None:
                self.counters["damaged"] += 1
                items.append(KvItem(asked.hash, asked.kind, tier=KvTier.NONE))
                continue
            attachments.append(payload)
            items.append(KvItem(item.hash, item.kind, item.parts, crc32(payload), item.tier))
        self.counters["pulled"] += sum(item.tier is not KvTier.NONE for item in items)
        self.counters["missed"] += sum(item.tier is KvTier.NONE for item in items)
        is_whole = all(item.tier is not KvTier.NONE for item in items)
        answer = Blocks(order.op_id, KvStatus.OK if is_whole else KvStatus.MISS, items)
        if handles:
            self._reading[peer.key][order.op_id] = handles
        if not self.listener.send(peer.name, answer, attachments):
            self._end(self._reading.get(peer.key, {}).pop(order.op_id, []))

    def _end(self, handles: list[object]) -> None:
        for handle in handles:
            self.area.end_read(handle)


def _memory(config: Config, name: str) -> AreaMemory:
    settings = config.executor
    if settings.handover == "device":
        return make_window(settings.device, settings.handover_bytes)
    return HostMemory(_path(config, name), settings.handover_bytes)


def _path(config: Config, name: str) -> Path | None:
    folder = config.shared_dir
    if folder is None or not folder.parent.is_dir():
        _log.info("no shared files: prompts for other groups travel in messages")
        return None
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"{name}.handover"
