"""A kvstore in memory, payloads in messages only: `kvstore.py --listen ADDRESS`."""

import time
import zlib
from typing import Any

from link import Message, Node, options

BLOCK, POINT = 0, 1
NONE, MEMORY = 0, 1
OK, MISS, INVALID = 0, 1, 3
MAX_BYTES = 64 << 20
MAX_TTL_S = 366 * 86_400.0
Key = tuple[bytes, int]


class KvStore:
    """Blocks and points by hash, the least used leave; records by (kind, id, owner)."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.payloads: dict[Key, tuple[Message, int, bytes]] = {}  # parts, checksum; oldest first
        self.records: dict[tuple[Any, ...], tuple[bytes, float]] = {}  # data, end of its time

    # ------------------------------------------------------------ blocks

    def lookup(self, chain: bytes) -> Message:
        """Blocks from the start, those below the last point, and the tier."""
        hashes = [chain[at : at + 16] for at in range(0, len(chain), 16)]
        if len(chain) % 16:
            hashes = []
        run = 0
        while run < len(hashes) and (hashes[run], BLOCK) in self.payloads:
            run += 1
        points = [n + 1 for n in range(run) if (hashes[n], POINT) in self.payloads]
        return [run, max(points, default=0), MEMORY if points else NONE]

    def put(self, items: list[Message], attached: list[bytes]) -> Message:
        """Status, tiers and why not."""
        nothing = bytes(len(items))
        if any(len(item[0]) != 16 for item in items):
            return [INVALID, nothing, "a hash has 16 bytes"]
        if len(attached) != len([item for item in items if not item[5:] or not item[5]]):
            return [INVALID, nothing, "one attachment for each item"]
        tiers = [self.keep(item, data) for item, data in zip(items, attached, strict=True)]
        return [OK if all(tiers) else 2, bytes(tiers), ""]

    def keep(self, item: Message, data: bytes) -> int:
        key, parts, checksum = (item[0], item[1]), item[2], item[3]
        if key not in self.payloads:
            if sum(size for _, size in parts) != len(data) or zlib.crc32(data) != checksum:
                return NONE
            self.payloads[key] = (parts, checksum, data)
            self.tell([key], self.make_room())
        return MEMORY

    def make_room(self) -> list[Key]:
        gone: list[Key] = []
        while sum(len(data) for _, _, data in self.payloads.values()) > MAX_BYTES:
            gone.append(next(iter(self.payloads)))
            del self.payloads[gone[-1]]
        return gone

    def get(self, items: list[Message]) -> tuple[Message, list[bytes]]:
        """Status and items, and what is attached."""
        answer: list[Message] = []
        attached: list[bytes] = []
        for hash_, kind, *_ in items:
            if found := self.payloads.pop((hash_, kind), None):
                self.payloads[hash_, kind] = found
                answer.append([hash_, kind, found[0], found[1], MEMORY])
                attached.append(found[2])
            else:
                answer.append([hash_, kind])
        return [OK if len(attached) == len(items) else MISS, answer], attached

    def tell(self, added: list[Key], dropped: list[Key], router: str = "") -> None:
        """Routers learn what is there; all of it when one comes."""
        names = [router] if router else [n for n in self.node.links if n.startswith("router")]
        for name in names:
            self.node.send(name, "BlockEvents", bool(router), added, dropped)

    # ------------------------------------------------------------ records

    def record(self, message: Message) -> Message:
        """Status, name, data, what is left of its time, why not."""
        name, now = tuple(message[2:5]), time.time()
        self.records = {k: r for k, r in self.records.items() if r[1] > now}
        if message[0] == "PutRecord":
            data, ttl_s = message[5:7]
            if not 0 < ttl_s <= MAX_TTL_S:
                return [INVALID, *name, b"", 0.0, "ttl_s"]
            self.records[name] = (data, now + ttl_s)
            return [OK, *name, b"", ttl_s]
        if name not in self.records:
            return [MISS, *name]
        if message[0] == "DropRecord":
            del self.records[name]
            return [OK, *name]
        data, end = self.records[name]
        return [OK, *name, data, end - now]

    # ------------------------------------------------------------ mail

    def on_message(self, peer: str, message: Message) -> None:
        attached = self.node.attached
        match message:
            case ["Hello", "router", *_]:
                self.tell(list(self.payloads), [], peer)
            case ["Lookup", int() as number, bytes() as chain, *_]:
                self.node.send(peer, "Hits", number, *self.lookup(chain))
            case ["PutBlocks", int() as number, int(), list() as items, *_]:
                self.node.send(peer, "PutDone", number, *self.put(items, attached))
            case ["GetBlocks", int() as number, list() as items, *_]:
                answer, attached = self.get(items)
                self.node.send(peer, "Blocks", number, *answer, attached=attached)
            case ["Reserve", int() as number, *_]:
                self.node.send(peer, "Reserved", number, INVALID, [])
            case ["PutRecord" | "GetRecord" | "DropRecord", int() as number, *_]:
                self.node.send(peer, "Record", number, *self.record(message))
            case ["GetStoreStats", int() as number, *_]:
                values = [["memory_items", len(self.payloads)], ["records", len(self.records)]]
                self.node.send(peer, "StoreStats", number, values)
            case _:
                pass


if __name__ == "__main__":
    node = Node("kvstore", "kvstore-0")
    node.listen(options()["listen"][0])
    node.run(KvStore(node).on_message)
