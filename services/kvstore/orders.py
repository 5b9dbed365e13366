"""Orders about blocks and points, and the answers: who may write or read what, until when."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from deepmesh.wire.messages import (
    Blocks,
    BlocksRead,
    GetBlocks,
    Hits,
    KvItem,
    KvStatus,
    KvTier,
    Lookup,
    PutBlocks,
    PutDone,
    Reserve,
    Reserved,
)

from .blocks import BlockTiers, Fetched
from .eviction import Key
from .store import HASH_BYTES, Entry, key_of
from .transfers import Transfers

TRANSFER_TTL_S = 60.0
MAX_ATTACHED_BYTES = 64 << 20  # of one answer; what is beyond is to be asked for again
MAX_ITEM_BYTES = 128 << 20


class BlockOrders:
    """Carries out the orders of all peers on the tiers.

    Pages that a peer was shown go to others at the deadline, or when the peer is lost, though it
    might still write: whoever reads such a page sees a wrong checksum, and that is a miss.
    """

    def __init__(self, tiers: BlockTiers, *, max_attached_bytes: int = MAX_ATTACHED_BYTES) -> None:
        self._tiers = tiers
        self._max_attached_bytes = max_attached_bytes
        self._writes = Transfers(TRANSFER_TTL_S)
        self._reads = Transfers(TRANSFER_TTL_S)

    @property
    def num_open(self) -> int:
        """Transfers that wait for the other side."""
        return len(self._writes) + len(self._reads)

    def lookup(self, order: Lookup, remote: Collection[Key] = ()) -> Hits:
        """How much of a prefix is there, with `remote` in the shared tier."""
        if len(order.chain) % HASH_BYTES:
            return Hits(order.lookup_id, 0, 0)
        found = self._tiers.lookup(order.chain, remote)
        return Hits(order.lookup_id, found.num_blocks, found.num_point_blocks, found.tier)

    def reserve(self, peer: str, order: Reserve, now_s: float) -> Reserved:
        """Places in the shared file for what is not there yet."""
        if _problem(order.items) or self._writes.is_open(peer, order.op_id):
            return Reserved(order.op_id, KvStatus.INVALID, [])
        keys: dict[int, Key] = {}
        answer: list[KvItem] = []
        for index, item in enumerate(order.items):
            key = key_of(item.hash, item.kind)
            extents = self._tiers.reserve(key, item.parts)
            if extents:
                keys[index] = key
            tier = self._tiers.store.kept(key)
            answer.append(KvItem(item.hash, item.kind, item.parts, 0, tier, extents))
        self._writes.begin(peer, order.op_id, keys, now_s)
        lacking = any(not item.extents and item.tier is KvTier.NONE for item in answer)
        return Reserved(order.op_id, KvStatus.FULL if lacking else KvStatus.OK, answer)

    def put(
        self, peer: str, order: PutBlocks, attachments: list[bytes], *, now_s: float = 0.0
    ) -> PutDone:
        """Keep what was written into reserved places, and what is attached."""
        if (began_s := self._writes.began_s(peer, order.op_id)) is not None:
            self._tiers.timings.observe("memory", "put", now_s - began_s)
        reserved = set(self._writes.end(peer, order.op_id).values())
        problem = _problem(order.items)
        if not problem and sum(not item.extents for item in order.items) != len(attachments):
            problem = "one attachment is needed for each item without extents"
        tiers = [KvTier.NONE] * len(order.items)
        if not problem:
            left = list(attachments)
            # The beginning of a prefix comes last: it is to outlive the rest of it.
            for index in reversed(range(len(order.items))):
                item = order.items[index]
                key = key_of(item.hash, item.kind)
                if not item.extents:
                    tiers[index] = self._tiers.put(key, item.parts, item.checksum, left.pop())
                elif key in reserved:
                    reserved.discard(key)
                    tiers[index] = self._tiers.put_reserved(key, item.checksum)
        for key in reserved:
            self._tiers.cancel(key)
        if problem:
            return PutDone(order.op_id, KvStatus.INVALID, bytes(tiers), problem)
        status = KvStatus.OK if KvTier.NONE not in tiers else KvStatus.FULL
        return PutDone(order.op_id, status, bytes(tiers))

    def lacking(self, order: GetBlocks) -> list[Key]:
        """What is asked for and not here."""
        if _bad_hash(order.items):
            return []
        keys = [key_of(item.hash, item.kind) for item in order.items]
        return [key for key in keys if key not in self._tiers.store.entries]

    def get(
        self,
        peer: str,
        order: GetBlocks,
        *,
        mapped: bool,
        now_s: float,
        arrived: Mapping[Key, tuple[Entry, bytes]] = MappingProxyType({}),
    ) -> tuple[Blocks, list[bytes]]:
        """What was asked for; `mapped` where this peer sees the shared file.

        `arrived`: what the shared tier has sent for this order.
        """
        if problem := _bad_hash(order.items):
            return Blocks(order.op_id, KvStatus.INVALID, [], problem), []
        if self._reads.is_open(peer, order.op_id):
            return Blocks(order.op_id, KvStatus.INVALID, [], "op_id is in use"), []
        attached: list[bytes] = []
        answer: list[KvItem] = []
        keys: dict[int, Key] = {}
        num_bytes, missing = 0, False
        asked = [key_of(item.hash, item.kind) for item in order.items]
        came = self._tiers.fetch(asked)
        for index, (item, key) in enumerate(zip(order.items, asked, strict=True)):
            if num_bytes >= self._max_attached_bytes:
                detail = f"{index} items fill one answer: ask again for the rest"
                answer += [KvItem(i.hash, i.kind) for i in order.items[index:]]
                self._reads.begin(peer, order.op_id, keys, now_s)
                return Blocks(order.op_id, KvStatus.FULL, answer, detail), attached
            fetched = self._tiers.get(
                key, mapped=mapped, arrived=arrived.get(key), was_on_disk=key in came
            )
            missing |= fetched is None
            answer.append(_describe(item, fetched))
            if fetched is not None and fetched.payload is not None:
                attached.append(fetched.payload)
                num_bytes += len(fetched.payload)
            elif fetched is not None:
                keys[index] = key
        self._reads.begin(peer, order.op_id, keys, now_s)
        return Blocks(order.op_id, KvStatus.MISS if missing else KvStatus.OK, answer), attached

    def read(self, peer: str, order: BlocksRead, *, now_s: float = 0.0) -> None:
        """A reader has copied what it was shown."""
        if (began_s := self._reads.began_s(peer, order.op_id)) is not None:
            self._tiers.timings.observe("memory", "get", now_s - began_s)
        for index, key in self._reads.end(peer, order.op_id).items():
            self._tiers.release(key, damaged=index in order.damaged)

    def lose_peer(self, peer: str) -> None:
        """Nothing more will come from this peer."""
        self._end(self._writes.end_peer(peer), self._reads.end_peer(peer))

    def tick(self, now_s: float) -> None:
        """End what is over its deadline."""
        self._end(self._writes.end_overdue(now_s), self._reads.end_overdue(now_s))

    def _end(self, writes: list[Key], reads: list[Key]) -> None:
        self._tiers.counters["abandoned"] += len(writes) + len(reads)
        for key in writes:
            self._tiers.cancel(key)
        for key in reads:
            self._tiers.release(key, damaged=False)


def _describe(item: KvItem, fetched: Fetched | None) -> KvItem:
    if fetched is None:
        return KvItem(item.hash, item.kind)
    entry = fetched.entry
    return KvItem(
        item.hash, item.kind, list(entry.parts), entry.checksum, fetched.tier, fetched.extents
    )


def _bad_hash(items: list[KvItem]) -> str:
    for index, item in enumerate(items):
        if len(item.hash) != HASH_BYTES:
            return f"items[{index}].hash: {len(item.hash)} bytes instead of {HASH_BYTES}"
    return ""


def _problem(items: list[KvItem]) -> str:
    """What is wrong with an order to keep these; empty when nothing is."""
    if problem := _bad_hash(items):
        return problem
    for index, item in enumerate(items):
        sizes = [size for _, size in item.parts]
        if not sizes or min(sizes) < 1 or sum(sizes) > MAX_ITEM_BYTES:
            return f"items[{index}].parts: between 1 and {MAX_ITEM_BYTES} bytes are needed"
        if not 0 <= item.checksum < 1 << 32:
            return f"items[{index}].checksum: not a CRC-32"
    return ""
