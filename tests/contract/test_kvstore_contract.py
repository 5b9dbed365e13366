"""What executors, schedulers, tokenizers and routers rely on, of any kvstore at an address."""

import itertools
import mmap
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.raw import ENUMS, Dealer, Message, Wire, make, read
from tests.contract.targets import Target

KIND, POOL, TIER, STATUS = (ENUMS[name] for name in ("KvKind", "Pool", "KvTier", "KvStatus"))
Thing = tuple[Message, bytes]  # an item and its payload


def block(num_bytes: int = 3000, hash_: bytes = b"") -> Thing:
    return item(KIND.BLOCK, [(POOL.GLOBAL, num_bytes)], hash_)


def point(hash_: bytes) -> Thing:
    parts = [(POOL.WINDOW, 2000), (POOL.WINDOW, 2000), (POOL.STATE, 60)]
    return item(KIND.POINT, parts, hash_)


def item(kind: int, parts: list[tuple[int, int]], hash_: bytes = b"") -> Thing:
    payload = os.urandom(sum(size for _, size in parts))
    made = make(
        "KvItem",
        hash=hash_ or os.urandom(16),
        kind=kind,
        parts=parts,
        checksum=zlib.crc32(payload),
    )
    return made, payload


class Peer:
    """An executor: hashes are drawn, so tests of one store do not meet."""

    def __init__(self, wire: Wire, target: Target, service: str = "executor") -> None:
        self.link: Dealer = wire.dial(target.address, service, f"{service}-{os.urandom(3).hex()}")
        self.wire = wire
        self._ids = itertools.count(1)

    def op(self) -> int:
        return next(self._ids)

    def ask(self, order: Message, answer: str, *attached: bytes) -> SimpleNamespace:
        self.link.send(order, *attached)
        return self.link.expect(answer, lambda a: getattr(a, "op_id", order[1]) == order[1])

    def put(self, *things: Thing) -> SimpleNamespace:
        items = [item for item, _ in things]
        order = make("PutBlocks", op_id=self.op(), engine_epoch=1, items=items)
        return self.ask(order, "PutDone", *(payload for _, payload in things))

    def get(self, *wanted: Message) -> tuple[SimpleNamespace, list[bytes | None]]:
        """The answer and all payloads; None where there is none. Checked as a reader must."""
        items = [make("KvItem", hash=each[0], kind=each[1]) for each in wanted]
        answer = self.ask(make("GetBlocks", op_id=self.op(), items=items), "Blocks")
        found = [read(each, "KvItem") for each in answer.items]
        assert [(f.hash, f.kind) for f in found] == [(w[0], w[1]) for w in wanted]
        attached = iter(answer.attached)
        payloads = [next(attached) if each.tier and not each.extents else None for each in found]
        assert next(attached, None) is None, "an attachment that belongs to nothing"
        for each, payload in zip(found, payloads, strict=True):
            if payload is not None:
                assert sum(size for _, size in each.parts) == len(payload)
                assert zlib.crc32(payload) == each.checksum
        return answer, payloads

    def lookup(self, chain: list[bytes]) -> tuple[int, int, int]:
        number = self.op()
        self.link.send(make("Lookup", lookup_id=number, chain=b"".join(chain)))
        hits = self.link.expect("Hits", lambda h: h.lookup_id == number)
        return hits.num_blocks, hits.num_point_blocks, hits.tier

    def offered_file(self) -> SimpleNamespace | None:
        """The shared file, if the store has one: it comes before any answer."""
        self.ask(make("GetStoreStats", op_id=self.op()), "StoreStats")
        return self.link.expect("SharedFile") if self.link.has("SharedFile") else None

    def record(self, order: str, name: str, owner: str = "o", **more: object) -> SimpleNamespace:
        given = {"op_id": self.op(), "kind": "response", "id": name, "owner": owner} | more
        return self.ask(make(order, **given), "Record")


@pytest.fixture
def peer(wire: Wire, kvstore: Target) -> Peer:
    return Peer(wire, kvstore)


# ---------------------------------------------------------------- blocks in messages


def test_what_was_never_put_is_a_miss(peer: Peer) -> None:
    answer, payloads = peer.get(block()[0], point(os.urandom(16))[0])
    assert (answer.status, payloads) == (STATUS.MISS, [None, None])
    assert peer.lookup([os.urandom(16)]) == (0, 0, TIER.NONE)
    assert peer.lookup([]) == (0, 0, TIER.NONE)


def test_what_was_put_comes_back_in_order_with_its_parts(peer: Peer) -> None:
    things = [block(), point(os.urandom(16)), block(100_000)]
    done = peer.put(*things)
    assert done.status == STATUS.OK
    assert len(done.stored) == 3
    assert all(done.stored)
    unknown = block()[0]
    answer, payloads = peer.get(things[2][0], unknown, things[0][0], things[1][0])
    assert answer.status == STATUS.MISS
    assert payloads == [things[2][1], None, things[0][1], things[1][1]]
    parts = [[tuple(part) for part in read(each, "KvItem").parts] for each in answer.items]
    assert parts == [things[2][0][2], [], things[0][0][2], things[1][0][2]]


def test_a_block_and_a_point_of_one_hash_are_two_things(peer: Peer) -> None:
    hash_ = os.urandom(16)
    things = [block(hash_=hash_), point(hash_)]
    peer.put(*things)
    assert peer.get(things[1][0], things[0][0])[1] == [things[1][1], things[0][1]]


def test_many_items_fit_into_one_order(peer: Peer) -> None:
    things = [block(500) for _ in range(256)]
    assert all(peer.put(*things).stored)
    assert peer.get(*(item for item, _ in things))[1] == [payload for _, payload in things]


def test_another_peer_gets_what_one_has_put(peer: Peer, wire: Wire, kvstore: Target) -> None:
    thing = block()
    peer.put(thing)
    assert Peer(wire, kvstore).get(thing[0])[1] == [thing[1]]


def test_a_second_put_changes_nothing(peer: Peer) -> None:
    """Equal names mean equal payloads, so the first one stays."""
    first = block()
    second = block(hash_=first[0][0])
    peer.put(first)
    assert all(peer.put(first).stored)
    peer.put(second)
    assert peer.get(first[0])[1] == [first[1]]


def test_a_payload_that_is_not_what_its_checksum_says_is_not_kept(peer: Peer) -> None:
    good, bad, short = block(), block(), block()
    done = peer.put((bad[0], bad[1][:-1] + b"?"), good, (short[0], short[1][:-1]))
    assert done.status != STATUS.OK
    assert [bool(tier) for tier in done.stored] == [False, True, False]
    assert peer.get(bad[0], good[0], short[0])[1] == [None, good[1], None]


def wrong_orders() -> dict[str, tuple[Message, list[bytes]]]:
    """Orders that are wrong in themselves."""
    good, payload = block()
    short = [b"short", *good[1:]]
    return {
        "too few attachments": (make("PutBlocks", op_id=1, engine_epoch=1, items=[good]), []),
        "too many": (
            make("PutBlocks", op_id=1, engine_epoch=1, items=[good]),
            [payload, payload],
        ),
        "hash": (make("PutBlocks", op_id=1, engine_epoch=1, items=[short]), [payload]),
    }


@pytest.mark.parametrize("name", wrong_orders())
def test_a_wrong_order_is_refused_and_the_link_goes_on(peer: Peer, name: str) -> None:
    order, attached = wrong_orders()[name]
    order[1] = peer.op()
    done = peer.ask(order, "PutDone", *attached)
    assert done.status == STATUS.INVALID
    assert not any(done.stored)
    assert done.detail
    assert all(peer.put(block()).stored)


# ---------------------------------------------------------------- prefixes


def chain_of(peer: Peer, blocks: list[int], points: list[int]) -> list[bytes]:
    """A chain of six hashes; blocks and points of it are put."""
    chain = [os.urandom(16) for _ in range(6)]
    things = [block(hash_=chain[n]) for n in blocks] + [point(chain[n]) for n in points]
    if things:
        assert all(peer.put(*things).stored)
    return chain


@pytest.mark.parametrize(
    ("blocks", "points", "expected"),
    [
        ([0, 1, 2, 3], [1], (4, 2)),
        ([0, 1, 2, 3], [1, 3], (4, 4)),
        ([0, 1, 2, 3], [], (4, 0)),
        ([0, 1, 3, 4, 5], [1, 5], (2, 2)),  # a hole: what is behind it does not count
        ([0, 1], [2], (2, 0)),  # a point needs its block
        ([1, 2, 3], [3], (0, 0)),
        ([0, 1, 2, 3, 4, 5], [5], (6, 6)),
    ],
)
def test_a_look_up_finds_the_longest_prefix_and_its_last_point(
    peer: Peer, blocks: list[int], points: list[int], expected: tuple[int, int]
) -> None:
    chain = chain_of(peer, blocks, points)
    found = peer.lookup(chain)
    assert found[:2] == expected
    assert (found[2] != TIER.NONE) == (expected[1] > 0)
    assert peer.lookup(chain[:1])[:2] == (min(1, expected[0]), 0)


def test_a_chain_that_ends_within_a_hash_is_no_hit(peer: Peer) -> None:
    chain = chain_of(peer, [0, 1], [1])
    assert peer.lookup([*chain[:2], b"half"]) == (0, 0, TIER.NONE)


# ---------------------------------------------------------------- the shared file


def test_a_file_that_is_offered_is_used_by_who_proves_to_see_it(peer: Peer) -> None:
    offer = peer.offered_file()
    thing = block(10_000)
    reserve = make("Reserve", op_id=peer.op(), items=[thing[0]])
    if offer is None:  # a store may have none; then it gives no places in it
        assert peer.ask(reserve, "Reserved").status == STATUS.INVALID
        return
    with Path(offer.path).open("r+b") as file, mmap.mmap(file.fileno(), offer.num_bytes) as view:
        refused = peer.ask(reserve, "Reserved")
        assert refused.status == STATUS.INVALID, "nothing has been proved yet"
        wrong = bytes(offer.num_nonce_bytes)
        peer.link.send(make("SharedFileSeen", nonce=wrong))
        assert peer.ask(make("Reserve", op_id=peer.op(), items=[thing[0]]), "Reserved").status == (
            STATUS.INVALID
        )
        peer.link.send(make("SharedFileSeen", nonce=view[: offer.num_nonce_bytes]))
        op_id = peer.op()
        reserved = peer.ask(make("Reserve", op_id=op_id, items=[thing[0]]), "Reserved")
        place = read(reserved.items[0], "KvItem")
        assert sum(size for _, size in place.extents) == len(thing[1])
        write(view, place.extents, thing[1])
        item = placed(thing[0], place.extents)
        done = peer.ask(make("PutBlocks", op_id=op_id, engine_epoch=1, items=[item]), "PutDone")
        assert all(done.stored)
        again = peer.ask(make("Reserve", op_id=peer.op(), items=[thing[0]]), "Reserved")
        assert read(again.items[0], "KvItem").tier
        assert not read(again.items[0], "KvItem").extents, "it is there already"
        answer, payloads = peer.get(thing[0])
        found = read(answer.items[0], "KvItem")
        assert payloads == [None]
        assert b"".join(view[at : at + size] for at, size in found.extents) == thing[1]
        peer.link.send(make("BlocksRead", op_id=answer.op_id))
        spoiled(peer, view)


def placed(item: Message, extents: list[Any]) -> Message:
    """The item with where its payload lies."""
    known = read(item, "KvItem")
    names = ("hash", "kind", "parts", "checksum")
    return make("KvItem", **{name: getattr(known, name) for name in names}, extents=extents)


def write(view: mmap.mmap, extents: list[Any], payload: bytes) -> None:
    at = 0
    for offset, size in extents:
        view[offset : offset + size] = payload[at : at + size]
        at += size


def spoiled(peer: Peer, view: mmap.mmap) -> None:
    """What a reader reports as damaged is not given to anyone again; it may be put again."""
    thing = block(5000)
    assert all(peer.put(thing).stored)
    answer, _ = peer.get(thing[0])
    ((at, _), *_) = read(answer.items[0], "KvItem").extents
    view[at] = view[at] ^ 0xFF
    peer.link.send(make("BlocksRead", op_id=answer.op_id, damaged=[0]))
    answer, payloads = peer.get(thing[0])
    found = read(answer.items[0], "KvItem")
    data = b"".join(view[at : at + size] for at, size in found.extents)
    assert not found.tier or data == thing[1] or payloads == [thing[1]], "wrong bytes came back"
    peer.link.send(make("BlocksRead", op_id=answer.op_id))
    assert all(peer.put(thing).stored)


# ---------------------------------------------------------------- records


def test_a_record_is_kept_for_its_owner(peer: Peer) -> None:
    name = os.urandom(4).hex()
    assert peer.record("GetRecord", name).status == STATUS.MISS
    put = peer.record("PutRecord", name, data=b"one", ttl_s=60.0)
    assert put.status == STATUS.OK
    got = peer.record("GetRecord", name)
    assert (got.status, got.data, got.id, got.owner) == (STATUS.OK, b"one", name, "o")
    assert 0 < got.ttl_s <= 60
    assert peer.record("GetRecord", name, owner="other").status == STATUS.MISS
    assert peer.record("DropRecord", name, owner="other").status == STATUS.MISS
    assert peer.record("PutRecord", name, data=b"two", ttl_s=60.0).status == STATUS.OK
    assert peer.record("GetRecord", name).data == b"two"
    assert peer.record("DropRecord", name).status == STATUS.OK
    assert peer.record("GetRecord", name).status == STATUS.MISS
    assert peer.record("DropRecord", name).status == STATUS.MISS


def test_a_record_ends_with_its_time(peer: Peer) -> None:
    name = os.urandom(4).hex()
    assert peer.record("PutRecord", name, data=b"x", ttl_s=0.2).status == STATUS.OK
    peer.wire.until(lambda: peer.record("GetRecord", name).status == STATUS.MISS, "its end")


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 1e12])
def test_a_time_out_of_range_is_refused(peer: Peer, ttl_s: float) -> None:
    name = os.urandom(4).hex()
    put = peer.record("PutRecord", name, data=b"x", ttl_s=ttl_s)
    assert (put.status, bool(put.detail)) == (STATUS.INVALID, True)
    assert peer.record("GetRecord", name).status == STATUS.MISS


# ---------------------------------------------------------------- what others are told


def test_a_router_learns_what_is_there_and_what_comes(
    peer: Peer, wire: Wire, kvstore: Target
) -> None:
    old, new = block(), block()
    peer.put(old)
    router = Peer(wire, kvstore, "router").link
    first = router.expect("BlockEvents")
    assert first.first
    known = named(first.added)
    while (old[0][0], old[0][1]) not in known:  # all of them may take several messages
        more = router.expect("BlockEvents")
        assert not more.first
        known |= named(more.added)
    peer.put(new)
    came = router.expect("BlockEvents", lambda e: (new[0][0], new[0][1]) in named(e.added))
    assert not came.first


def named(items: list[Any]) -> set[tuple[bytes, int]]:
    return {(each[0], each[1]) for each in items}


def test_statistics_are_numbers_by_name(peer: Peer) -> None:
    stats = peer.ask(make("GetStoreStats", op_id=peer.op()), "StoreStats")
    values = dict(map(tuple, stats.values))
    assert values
    assert all(isinstance(n, str) and isinstance(v, int) and v >= 0 for n, v in values.items())


def test_what_it_does_not_know_does_not_end_the_link(peer: Peer) -> None:
    peer.link.send(["Elect", 1])
    peer.link.send(make("Abort", rid=os.urandom(16)))
    assert all(peer.put(block()).stored)
