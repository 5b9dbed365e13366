"""What tokenizers and schedulers rely on, of any router at an address."""

import os
import struct
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.contract.raw import Dealer, Router, Wire, make
from tests.contract.targets import Target

GONE_S = 60.0


class Mesh:
    """A tokenizer and two schedulers around the router."""

    def __init__(self, wire: Wire, target: Target) -> None:
        self.wire, self.target = wire, target
        self.schedulers = [self.listen(index) for index in range(2)]
        for scheduler in self.schedulers:
            scheduler.guest("router-0")
        self.tokenizer: Dealer = wire.dial(target.address, "tokenizer", "tokenizer-0")
        self.rids: list[bytes] = []

    def listen(self, index: int) -> Router:
        made = self.wire.listen(self.target.dials[index], "scheduler", f"scheduler-{index}")
        say(made, ready=True)
        return made

    def generate(self, rid: bytes = b"", attempt: int = 1, **fields: object) -> bytes:
        rid = rid or os.urandom(16)
        self.rids.append(rid)
        ids = struct.pack("<4i", 5, 6, 7, 8)
        given = {"reply_to": "tokenizer-0", "prompt_ids": ids, "prompt_len": 4} | fields
        self.tokenizer.send(make("Generate", rid=rid, attempt=attempt, **given))
        return rid

    def arrived(self, index: int) -> list[SimpleNamespace]:
        """All Generates of this test that a scheduler has got."""
        guest = self.schedulers[index].guests.get("router-0")
        history = guest.history if guest is not None else []
        return [m for m in history if m.tag == "Generate" and m.rid in self.rids]

    def rids_at(self, index: int) -> set[bytes]:
        return {m.rid for m in self.arrived(index)}

    def wait(self, count: int) -> None:
        self.wire.until(lambda: sum(len(self.arrived(i)) for i in range(2)) >= count, "Generate")

    def over(self, *rids: bytes, done: bool = True) -> None:
        rows = [make("AckRow", rid=rid, pos=0, done=done) for rid in rids]
        self.tokenizer.send(make("Ack", rows=rows))


def say(scheduler: Router, **fields: object) -> None:
    """What its heartbeats tell from now on."""
    given = {"name": scheduler.name, "ready": True} | fields
    replica = make("ReplicaStats", **given)
    scheduler.stats = make("ServiceStats", ready=given["ready"], replicas=[replica])


@pytest.fixture
def mesh(wire: Wire, router: Target) -> Mesh:
    made = Mesh(wire, router)
    warm: list[bytes] = []
    while not (made.arrived(0) and made.arrived(1)):  # until both are known to be ready
        warm.append(made.generate())
        made.wait(len(warm))
    made.over(*warm)
    for scheduler in made.schedulers:
        scheduler.guests["router-0"].history.clear()
    made.rids.clear()
    return made


def test_requests_are_spread_and_arrive_as_they_were(mesh: Mesh) -> None:
    rids = [mesh.generate(seed=n, max_tokens=9, salt=b"s", hint=b"h") for n in range(8)]
    mesh.wait(8)
    counts = Counter(len(mesh.arrived(i)) for i in range(2))
    assert counts == {4: 2}
    found = {m.rid: m for i in range(2) for m in mesh.arrived(i)}
    for number, rid in enumerate(rids):
        message = found[rid]
        assert (message.seed, message.max_tokens, message.reply_to) == (number, 9, "tokenizer-0")
        assert (message.salt, message.hint, message.attempt) == (b"s", b"h", 1)
        assert message.prompt_ids == struct.pack("<4i", 5, 6, 7, 8)
    mesh.over(*rids)


def test_one_sent_again_goes_to_the_same_scheduler(mesh: Mesh) -> None:
    rid = mesh.generate()
    mesh.wait(1)
    mesh.generate(rid)
    mesh.wait(2)
    assert [len(mesh.arrived(i)) for i in range(2)] in ([2, 0], [0, 2])
    mesh.over(rid)


def test_a_draining_scheduler_gets_nothing_new(mesh: Mesh) -> None:
    say(mesh.schedulers[0], draining=True)
    mesh.wire.quiet(3.0)
    rids = [mesh.generate() for _ in range(4)]
    mesh.wait(4)
    assert mesh.rids_at(1) == set(rids)
    mesh.over(*rids)


def test_without_a_ready_scheduler_requests_wait(mesh: Mesh) -> None:
    for scheduler in mesh.schedulers:
        say(scheduler, ready=False)
    mesh.wire.quiet(3.0)
    rids = [mesh.generate() for _ in range(3)]
    mesh.wire.quiet(0.5)
    assert not mesh.arrived(0) + mesh.arrived(1)
    say(mesh.schedulers[1])
    mesh.wait(3)
    assert mesh.rids_at(1) == set(rids)
    mesh.over(*rids)


def test_what_a_dead_scheduler_had_not_accepted_goes_to_the_other(mesh: Mesh) -> None:
    rids = [mesh.generate() for _ in range(6)]
    mesh.wait(6)
    lost = [m.rid for m in mesh.arrived(0)]
    mesh.over(lost[0], done=False)  # accepted: its tokenizer has it
    mesh.wire.quiet(1.0)
    mesh.schedulers[0].close()
    mesh.schedulers[0].guests.clear()
    mesh.wire.until(lambda: set(lost[1:]) <= mesh.rids_at(1), "the failover", GONE_S)
    assert lost[0] not in mesh.rids_at(1)
    assert mesh.rids_at(1) == set(rids) - {lost[0]}
    mesh.over(*rids)


def test_garbage_changes_nothing(mesh: Mesh) -> None:
    for junk in (
        ["Nonsense"],
        ["Generate", 5],
        ["Generate", b"", "x"],
        ["Ack", 3],
        ["Ack", [7]],
        3,
    ):
        mesh.tokenizer.send(junk)  # type: ignore[arg-type]
    rid = mesh.generate()
    mesh.wait(1)
    mesh.over(rid)
