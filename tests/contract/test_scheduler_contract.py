"""What a tokenizer relies on, of any scheduler at an address."""

import itertools
import os
import struct
from types import SimpleNamespace

import pytest

from tests.contract.raw import ENUMS, Dealer, Wire, make, read
from tests.contract.raw_executor import RawExecutor
from tests.contract.targets import Target

REASON, CODE = ENUMS["FinishReason"], ENUMS["ErrorCode"]
_serial = itertools.count(1)


class Peer:
    """A tokenizer's link, with the output of each request put together."""

    def __init__(self, wire: Wire, address: str) -> None:
        self.wire = wire
        self.name = f"tokenizer-{next(_serial)}"
        self.link: Dealer = wire.dial(address, "tokenizer", self.name)

    def generate(self, rid: bytes = b"", /, **fields: object) -> bytes:
        rid = rid or os.urandom(16)
        given: dict[str, object] = {
            "attempt": 1,
            "reply_to": self.name,
            "prompt_ids": ids(range(200, 230)),
            "prompt_len": 30,
            "seed": 7,
            "max_tokens": 12,
        }
        self.link.send(make("Generate", rid=rid, **given | fields))
        return rid

    def output(self, rid: bytes) -> list[int]:
        """What has come so far; a gap, or tokens that differ from those before, fail."""
        found: dict[int, int] = {}
        for message in self.link.history:
            for row in message.rows if message.tag == "TokenBatch" else []:
                row = read(row, "TokenRow")
                for pos, token in enumerate(unpack(row.ids), row.pos) if row.rid == rid else ():
                    assert found.setdefault(pos, token) == token
        start = min(found, default=0)
        assert sorted(found) == list(range(start, start + len(found))), "a gap"
        return [found[pos] for pos in sorted(found)]

    def ends(self, rid: bytes) -> list[SimpleNamespace]:
        return [m for m in self.link.history if m.tag in ("Finished", "Failed") and m.rid == rid]

    def end(self, rid: bytes) -> SimpleNamespace:
        self.wire.until(lambda: self.ends(rid), "an end")
        return self.ends(rid)[-1]

    def grown(self, rid: bytes, count: int) -> None:
        self.wire.until(lambda: len(self.output(rid)) >= count, f"{count} tokens")

    def ack(self, rid: bytes, pos: int) -> None:
        self.link.send(make("Ack", rows=[make("AckRow", rid=rid, pos=pos, done=True)]))


def ids(tokens: "range | list[int]") -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)


@pytest.fixture
def peer(wire: Wire, scheduler: Target) -> Peer:
    RawExecutor(wire, scheduler.address)  # one that makes tokens itself leaves it alone
    made = Peer(wire, scheduler.address)
    wire.until(lambda: is_ready(made.link), "a heartbeat that says ready")
    return made


def is_ready(link: Dealer) -> bool:
    """Whether the last heartbeat tells of a ready replica."""
    stats = read(link.beats[-1].stats, "ServiceStats") if link.beats else None
    return stats is not None and any(read(r, "ReplicaStats").ready for r in stats.replicas)


def test_tokens_come_in_order_and_end_once(wire: Wire, peer: Peer) -> None:
    rid = peer.generate()
    accepted = peer.link.expect("Accepted")
    assert (accepted.rid, accepted.attempt) == (rid, 1)
    assert accepted.replica
    end = peer.end(rid)
    assert (end.tag, end.reason, end.final_pos) == ("Finished", REASON.LENGTH, 12)
    assert len(peer.output(rid)) == 12
    assert peer.link.history[-1].tag in ("Finished", "TokenBatch")
    wire.quiet()
    assert len(peer.ends(rid)) == 1


def test_many_at_once_each_end_once(wire: Wire, peer: Peer) -> None:
    rids = [peer.generate(max_tokens=3 + n, seed=n) for n in range(20)]
    assert [peer.end(rid).final_pos for rid in rids] == [3 + n for n in range(20)]
    assert [len(peer.output(rid)) for rid in rids] == [3 + n for n in range(20)]
    assert all(len(peer.ends(rid)) == 1 for rid in rids)


def test_generate_is_idempotent(wire: Wire, peer: Peer) -> None:
    rid = peer.generate(max_tokens=200)
    peer.generate(rid, max_tokens=200)
    peer.grown(rid, 5)
    peer.generate(rid, max_tokens=200)
    assert peer.end(rid).final_pos == 200
    assert len(peer.output(rid)) == 200
    wire.quiet()
    assert len(peer.ends(rid)) == 1


def test_the_same_request_has_the_same_output(wire: Wire, peer: Peer) -> None:
    first, second = peer.generate(), peer.generate()
    assert peer.end(first).final_pos == peer.end(second).final_pos
    assert peer.output(first) == peer.output(second)


def test_an_ended_request_is_replayed_until_it_is_acknowledged(wire: Wire, peer: Peer) -> None:
    rid = peer.generate()
    peer.end(rid)
    other = Peer(wire, peer.link.address)
    other.link.send(make("Attach", rid=rid, attempt=1, reply_to=other.name, from_pos=4))
    assert other.end(rid).final_pos == 12
    assert other.output(rid) == peer.output(rid)[4:]
    other.ack(rid, 12)
    other.link.send(make("Attach", rid=rid, attempt=1, reply_to=other.name, from_pos=0))
    wire.until(lambda: len(other.ends(rid)) == 2, "Failed")
    assert (other.ends(rid)[1].tag, other.ends(rid)[1].code) == ("Failed", CODE.UNKNOWN)


def test_a_running_request_moves_to_whom_attaches(wire: Wire, peer: Peer) -> None:
    rid = peer.generate(max_tokens=800)
    peer.grown(rid, 10)
    other = Peer(wire, peer.link.address)
    other.link.send(make("Attach", rid=rid, attempt=1, reply_to=other.name, from_pos=0))
    assert other.end(rid).final_pos == 800
    assert len(other.output(rid)) == 800
    assert other.output(rid)[: len(peer.output(rid))] == peer.output(rid)
    assert not peer.ends(rid)


def test_a_request_that_is_not_there_is_unknown(peer: Peer) -> None:
    rid = os.urandom(16)
    peer.link.send(make("Attach", rid=rid, attempt=1, reply_to=peer.name, from_pos=0))
    assert peer.end(rid).code == CODE.UNKNOWN


def test_a_continuation_goes_on_behind_what_is_confirmed(peer: Peer) -> None:
    rid = peer.generate(max_tokens=20)
    peer.end(rid)
    whole = peer.output(rid)
    again = peer.generate(max_tokens=20, confirmed_ids=ids(whole[:8]), attempt=2)
    end = peer.end(again)
    assert (end.reason, end.final_pos) == (REASON.LENGTH, 20)
    assert peer.output(again) == whole[8:]


def test_abort_ends_it_and_is_idempotent(wire: Wire, peer: Peer) -> None:
    rid = peer.generate(max_tokens=3000)
    peer.grown(rid, 3)
    for _ in range(3):
        peer.link.send(make("Abort", rid=rid, attempt=1))
    end = peer.end(rid)
    assert (end.tag, end.reason) == ("Finished", REASON.ABORT)
    wire.quiet()
    assert len(peer.ends(rid)) == 1
    assert len(peer.output(rid)) < 3000


def test_an_abort_that_overtakes_its_request_counts(wire: Wire, peer: Peer) -> None:
    rid = os.urandom(16)
    peer.link.send(make("Abort", rid=rid, attempt=1))
    peer.generate(rid)
    assert peer.end(rid).reason == REASON.ABORT
    assert peer.output(rid) == []


def test_stop_at_keeps_so_many_tokens(wire: Wire, peer: Peer) -> None:
    rid = peer.generate(max_tokens=3000)
    peer.grown(rid, 8)
    peer.link.send(make("StopAt", rid=rid, n_keep=6))
    end = peer.end(rid)
    assert (end.reason, end.final_pos) == (REASON.STOP, 6)
    wire.quiet()
    assert len(peer.ends(rid)) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_ids": b"", "prompt_len": 0}, "prompt"),
        ({"prompt_ids": b"\0" * 6}, "prompt"),
        ({"prompt_len": 99}, "prompt"),
        ({"prompt_ids": ids([5, 1 << 30]), "prompt_len": 2}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    peer: Peer, fields: dict[str, object], param: str
) -> None:
    rid = peer.generate(**fields)
    end = peer.end(rid)
    assert (end.tag, end.code, end.param) == ("Failed", CODE.INVALID, param)
    assert end.detail
    assert not peer.link.has("Accepted")


def test_garbage_changes_nothing(wire: Wire, peer: Peer) -> None:
    rid = peer.generate(max_tokens=300)
    for junk in (["Nonsense", 1], ["Abort", 5], ["Ack"], {"a": 1}, 7, [], ["Ack", [[b"x", "y"]]]):
        peer.link.send(junk)  # type: ignore[arg-type]
    assert peer.end(rid).final_pos == 300
    assert len(peer.output(rid)) == 300
