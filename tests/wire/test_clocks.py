"""Clocks of different machines: what heartbeats find out, with simulated ways and offsets."""

import random
import time
from collections.abc import Iterator

import pytest

from deepmesh.config import LinksConfig
from deepmesh.wire import messages as m
from deepmesh.wire.clocks import MAX_LINKS, WINDOW_NS, MeshClock, ShortestWay, this_clock
from deepmesh.wire.link import Identity, LinkEvent, Mail
from deepmesh.wire.process import Process
from deepmesh.wire.sockets import Dialer, Listener

MS = 1_000_000


def test_the_shortest_way_is_that_of_the_last_two_windows() -> None:
    way = ShortestWay()
    assert way.ns == 0
    way.saw(100, 150)
    way.saw(200, 230)
    way.saw(300, 390)
    assert way.ns == 30
    for window in (1, 2):
        at = (window + 1) * WINDOW_NS
        way.saw(at, at + 70)
        assert way.ns == (30 if window == 1 else 70)


@pytest.mark.parametrize("offset_ns", [-3_000 * MS, 0, 1, 5_000 * MS])
def test_two_sides_find_the_offset_by_their_shortest_ways(offset_ns: int) -> None:
    ways = random.Random(3)
    here, there = ShortestWay(), ShortestWay()
    for step in range(200):
        now = 1_000 * MS * (step + 1)
        there.saw(now, now + offset_ns + MS + ways.randrange(5 * MS))
        here.saw(now + offset_ns, now + MS + ways.randrange(5 * MS))
    found = (there.ns - here.ns) // 2
    assert abs(found - offset_ns) < MS // 5, "of ways that take 1 to 6 ms"


def test_offsets_add_up_towards_the_reference() -> None:
    clock = MeshClock()
    assert (clock.links, clock.ahead_ns) == (-1, 0)
    clock.hear("far", 2, 900)
    assert (clock.links, clock.ahead_ns) == (3, 900)
    clock.hear("near", 0, 1000)
    assert (clock.links, clock.ahead_ns) == (1, 1000)
    clock.hear("far", 1, 5)
    assert (clock.links, clock.ahead_ns) == (1, 1000)
    clock.forget("near")
    assert (clock.links, clock.ahead_ns) == (2, 5)
    clock.forget("far")
    assert (clock.links, clock.ahead_ns) == (2, 5), "kept until somebody knows better"


def test_nobody_tells_the_reference_and_rumours_end() -> None:
    reference = MeshClock(is_reference=True)
    reference.hear("x", 0, 77)
    assert (reference.links, reference.ahead_ns) == (0, 0)
    clock = MeshClock()
    clock.hear("rumour", MAX_LINKS, 77)
    clock.hear("ignorant", -1, 77)
    assert clock.links == -1


def test_processes_of_one_machine_read_one_clock() -> None:
    assert this_clock() == this_clock()
    assert len(this_clock()) == 8


# ---------------------------------------------------------------- over real links

AHEAD_NS = 7_000 * MS


class Shifted(Dialer):
    """A dialler on a machine whose clock is ahead; its stamps are made there."""

    def _open(self) -> None:
        super()._open()
        original = self._link.post

        def post(message: m.AnyMessage, attachments: object = ()) -> bool:
            if isinstance(message, m.Heartbeat):
                message = m.Heartbeat(
                    message.stats,
                    message.now_ns + AHEAD_NS,
                    message.way_ns + AHEAD_NS if message.way_ns else 0,
                    message.ahead_ns,
                    message.clock_links,
                )
            return original(message)

        self._link.post = post  # type: ignore[method-assign]  # an instance with another clock


@pytest.fixture
def pair() -> Iterator[tuple[Listener, Shifted]]:
    links = LinksConfig(heartbeat_s=0.02, timeout_s=5)
    near = Identity(
        "scheduler",
        "scheduler-0",
        b"1" * 8,
        clock_id=b"here",
        process=Process("scheduler", MeshClock()),
    )
    far = Identity(
        "executor",
        "executor-0-0",
        b"2" * 8,
        clock_id=b"there",
        process=Process("executor", MeshClock()),
    )
    listener = Listener("tcp://127.0.0.1:*", near, links)
    dialer = Shifted(listener.address, far, links)
    yield listener, dialer
    dialer.close()
    listener.close()


def test_messages_of_another_clock_come_with_stamps_of_ours(
    pair: tuple[Listener, Shifted],
) -> None:
    listener, dialer = pair
    until = time.monotonic() + 60
    events: list[LinkEvent] = []
    while time.monotonic() < until:
        events += listener.receive()
        dialer.receive()
        peer = listener.peers.get("executor-0-0")
        if peer is not None and abs(peer.ahead_ns - AHEAD_NS) < 1_000 * MS:
            break
    else:
        pytest.fail("the offset was not found")
    assert peer.has_other_clock
    sent = time.time_ns()
    assert dialer.send(m.Reset(1))
    mails: list[Mail] = []
    while time.monotonic() < until and not mails:
        dialer.receive()
        mails = [event for event in listener.receive() if isinstance(event, Mail)]
    # it was stamped by our real clock, which a machine so far ahead would show as that much more
    assert mails[0].sent_ns == pytest.approx(sent - AHEAD_NS, abs=1_000 * MS)


def test_links_tell_what_went_over_them(pair: tuple[Listener, Shifted]) -> None:
    listener, dialer = pair
    until = time.monotonic() + 60
    while time.monotonic() < until and not (listener.link_stats() and dialer.link_stats()):
        listener.receive()
        dialer.receive()
    before = listener.link_stats()[0]
    assert (before.name, before.peer, before.peer_service) == (
        "scheduler-0",
        "executor-0-0",
        "executor",
    )
    for _ in range(5):
        assert dialer.send(m.Reset(1))
    while time.monotonic() < until and listener.link_stats()[0].received < before.received + 5:
        dialer.receive()
        listener.receive()
    assert listener.link_stats()[0].received >= before.received + 5
    assert dialer.link_stats()[0].sent >= 6
