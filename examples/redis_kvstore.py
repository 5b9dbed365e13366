"""A kvstore on a plain Redis: `redis_kvstore.py --listen ADDRESS --redis URL`.

Any number of them may share one Redis; what has to leave is Redis' choice (`maxmemory`, LRU). In
mesh.toml `[kvstore] address = "ADDRESS"`. docs/wire.md says what the messages mean.
"""

import itertools
import zlib
from typing import Any

import msgpack
import redis
from link import Message, Node, options, pack

BLOCK, POINT = 0, 1
NONE, MEMORY = 0, 1
OK, MISS, FULL, INVALID = 0, 1, 2, 3
MAX_TTL_S = 366 * 86_400.0


def key_of(hash_: bytes, kind: int) -> bytes:
    return b"dm:b:%d:" % kind + hash_


def record_key(name: Message) -> bytes:
    return b"dm:r:" + pack(name)


class KvStore:
    """Blocks and points by hash, records by (kind, id, owner): one Redis key each."""

    def __init__(self, node: Node, redis_url: str) -> None:
        self.node = node
        self.redis = redis.Redis.from_url(redis_url)

    # ------------------------------------------------------------ blocks

    def lookup(self, chain: bytes) -> Message:
        """Blocks from the start, those below the last point, and the tier."""
        hashes = [chain[at : at + 16] for at in range(0, len(chain), 16)]
        if len(chain) % 16:
            hashes = []
        ask = self.redis.pipeline(transaction=False)
        for hash_, kind in itertools.product(hashes, (BLOCK, POINT)):
            ask.exists(key_of(hash_, kind))
        found = ask.execute()
        blocks, are_points = found[::2], found[1::2]
        run = next((n for n, there in enumerate(blocks) if not there), len(hashes))
        points = [n + 1 for n in range(run) if are_points[n]]
        return [run, max(points, default=0), MEMORY if points else NONE]

    def put(self, items: list[Message], attached: list[bytes]) -> Message:
        """Status, tiers and why not."""
        nothing = bytes(len(items))
        if any(len(item[0]) != 16 for item in items):
            return [INVALID, nothing, "a hash has 16 bytes"]
        if len(attached) != len([item for item in items if not item[5:] or not item[5]]):
            return [INVALID, nothing, "one attachment for each item"]
        tiers = [self.keep(item, data) for item, data in zip(items, attached, strict=True)]
        return [OK if all(tiers) else FULL, bytes(tiers), ""]

    def keep(self, item: Message, data: bytes) -> int:
        hash_, kind, parts, checksum = item[:4]
        if sum(size for _, size in parts) != len(data) or zlib.crc32(data) != checksum:
            return NONE
        try:
            if self.redis.set(key_of(hash_, kind), pack([parts, checksum, data]), nx=True):
                self.tell([(hash_, kind)])
        except redis.ResponseError:  # it is full, and nothing may leave
            return NONE
        return MEMORY

    def get(self, items: list[Message]) -> tuple[Message, list[bytes]]:
        """Status and items, and what is attached."""
        answer: list[Message] = []
        attached: list[bytes] = []
        kept = self.redis.mget([key_of(item[0], item[1]) for item in items]) if items else []
        for (hash_, kind, *_), packed in zip(items, kept, strict=True):
            parts, checksum, data = msgpack.unpackb(packed) if packed else ([], 0, b"")
            if packed and zlib.crc32(data) == checksum:
                answer.append([hash_, kind, parts, checksum, MEMORY])
                attached.append(data)
            else:
                answer.append([hash_, kind])
        return [OK if len(attached) == len(items) else MISS, answer], attached

    def tell(self, added: list[tuple[bytes, int]]) -> None:
        """Routers learn what comes. What Redis evicts they find out as a miss."""
        for name in [name for name in self.node.links if name.startswith("router")]:
            self.node.send(name, "BlockEvents", False, added, [])

    def tell_all(self, router: str) -> None:
        """A router that comes learns what is there."""
        names = [key.split(b":", 3) for key in self.redis.scan_iter(b"dm:b:*", count=1000)]
        there = [(hash_, int(kind)) for _, _, kind, hash_ in names]
        self.node.send(router, "BlockEvents", True, there, [])

    # ------------------------------------------------------------ records

    def record(self, message: Message) -> Message:
        """Status, name, data, what is left of its time, why not."""
        name = message[2:5]
        key = record_key(name)
        if message[0] == "PutRecord":
            data, ttl_s = message[5:7]
            if not 0 < ttl_s <= MAX_TTL_S:
                return [INVALID, *name, b"", 0.0, "ttl_s"]
            self.redis.set(key, data, px=max(1, int(ttl_s * 1000)))
            return [OK, *name, b"", ttl_s]
        if message[0] == "DropRecord":
            return [OK if self.redis.delete(key) else MISS, *name]
        data, left_ms = self.redis.pipeline().get(key).pttl(key).execute()
        return [MISS, *name] if data is None else [OK, *name, data, max(left_ms, 0) / 1000]

    # ------------------------------------------------------------ mail

    def on_message(self, peer: str, message: Message) -> None:
        attached = self.node.attached
        match message:
            case ["Hello", "router", *_]:
                self.tell_all(peer)
            case ["Lookup", int() as number, bytes() as chain, *_]:
                self.node.send(peer, "Hits", number, *self.lookup(chain))
            case ["PutBlocks", int() as number, int(), list() as items, *_]:
                self.node.send(peer, "PutDone", number, *self.put(items, attached))
            case ["GetBlocks", int() as number, list() as items, *_]:
                answer, attached = self.get(items)
                self.node.send(peer, "Blocks", number, *answer, attached=attached)
            case ["Reserve", int() as number, *_]:  # no file is shared: payloads go in messages
                self.node.send(peer, "Reserved", number, INVALID, [])
            case ["PutRecord" | "GetRecord" | "DropRecord", int() as number, *_]:
                self.node.send(peer, "Record", number, *self.record(message))
            case ["GetStoreStats", int() as number, *_]:
                values: list[Any] = [["redis_keys", self.redis.dbsize()]]
                self.node.send(peer, "StoreStats", number, values)
            case _:
                pass


if __name__ == "__main__":
    given = options()
    node = Node("kvstore", given.get("name", ["kvstore-0"])[0])
    node.listen(given["listen"][0])
    node.run(KvStore(node, given["redis"][0]).on_message)
