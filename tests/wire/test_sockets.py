"""Links over real sockets: greeting, order, loss, refusal, replacement."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import msgpack
import pytest
import zmq

from deepmesh.config import LinksConfig
from deepmesh.wire import codec
from deepmesh.wire import messages as m
from deepmesh.wire.inbox import SLICE_S, AsyncInbox, Inbox
from deepmesh.wire.link import LinkEvent
from deepmesh.wire.sockets import Dialer, Identity, Listener, Mail, Peer, PeerDown, PeerUp

LINKS = LinksConfig(heartbeat_s=0.05, timeout_s=2.0)
RID = b"r" * 16
MakeDialer = Callable[..., Dialer]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def listener(address: str) -> Iterator[Listener]:
    listener = Listener(address, Identity.new("scheduler", "scheduler-0"), LINKS)
    yield listener
    listener.close()


@pytest.fixture
def dial(address: str) -> Iterator[MakeDialer]:
    made: list[Dialer] = []

    def make(name: str = "tokenizer-0", links: LinksConfig = LINKS) -> Dialer:
        made.append(Dialer(address, Identity.new("tokenizer", name), links))
        return made[-1]

    yield make
    for dialer in made:
        dialer.close()


def pump(
    until: Callable[[list[LinkEvent]], bool], *endpoints: Listener | Dialer
) -> list[LinkEvent]:
    """Run the endpoints until `until(events so far)`; fails after 60 s."""
    seen: list[LinkEvent] = []
    deadline = time.monotonic() + 60
    while not until(seen):
        assert time.monotonic() < deadline, seen
        poller = zmq.Poller()
        for endpoint in endpoints:
            for socket in endpoint.sockets:
                poller.register(socket, zmq.POLLIN)
        poller.poll(5)
        for endpoint in endpoints:
            seen += endpoint.receive()
    return seen


def both_up(events: list[LinkEvent]) -> bool:
    return sum(isinstance(e, PeerUp) for e in events) >= 2


def mails(events: list[LinkEvent]) -> list[m.AnyMessage]:
    return [e.message for e in events if isinstance(e, Mail)]


def test_both_sides_learn_who_the_other_is(listener: Listener, dial: MakeDialer) -> None:
    dialer = dial()
    events = pump(both_up, listener, dialer)
    names = {e.peer.name: e.peer.service for e in events}
    assert names == {"tokenizer-0": "tokenizer", "scheduler-0": "scheduler"}
    assert dialer.peer is not None
    assert set(listener.peers) == {"tokenizer-0"}


def test_messages_arrive_in_order_with_attachments(listener: Listener, dial: MakeDialer) -> None:
    dialer = dial()
    pump(both_up, listener, dialer)
    for n in range(500):
        assert dialer.send(m.Credit(RID, n), [b"block", b"%d" % n])
    events = pump(lambda seen: len(mails(seen)) == 500, listener)
    assert [e.num_events for e in mails(events) if isinstance(e, m.Credit)] == list(range(500))
    last = events[-1]
    assert isinstance(last, Mail)
    assert last.attachments == [b"block", b"499"]
    assert 0 < last.sent_ns <= last.received_ns


def test_sending_without_a_link_says_so(listener: Listener, dial: MakeDialer) -> None:
    assert not dial().send(m.Cancel(RID))
    assert not listener.send("nobody", m.Cancel(RID))


def test_a_dialler_waits_for_its_listener(address: str, dial: MakeDialer) -> None:
    dialer = dial()
    assert dialer.receive() == []
    late = Listener(address, Identity.new("scheduler", "scheduler-0"), LINKS)
    pump(both_up, late, dialer)
    late.close()


def test_a_restarted_listener_is_noticed_and_dialled_again(
    address: str, listener: Listener, dial: MakeDialer
) -> None:
    dialer = dial()
    pump(both_up, listener, dialer)
    listener.close()
    pump(lambda seen: any(isinstance(e, PeerDown) for e in seen), dialer)
    assert not dialer.send(m.Cancel(RID))
    again = Listener(address, Identity.new("scheduler", "scheduler-0"), LINKS)
    pump(both_up, again, dialer)
    assert dialer.send(m.Cancel(RID))
    assert mails(pump(lambda seen: bool(mails(seen)), again)) == [m.Cancel(RID)]
    again.close()


def test_a_vanished_dialler_is_noticed(listener: Listener, dial: MakeDialer) -> None:
    dialer = dial()
    pump(both_up, listener, dialer)
    dialer.close()
    events = pump(lambda seen: any(isinstance(e, PeerDown) for e in seen), listener)
    assert [e.peer.name for e in events] == ["tokenizer-0"]
    assert listener.peers == {}


def test_a_new_link_of_the_same_name_replaces_the_old(listener: Listener, dial: MakeDialer) -> None:
    pump(both_up, listener, dial())
    second = dial()
    events = pump(both_up, listener, second)
    down = [e for e in events if isinstance(e, PeerDown)]
    assert down
    assert "replaced" in down[0].reason
    listener.send("tokenizer-0", m.Cancel(RID))
    assert mails(pump(lambda seen: bool(mails(seen)), second)) == [m.Cancel(RID)]


def test_silence_ends_a_link(listener: Listener, dial: MakeDialer) -> None:
    mute = dial(links=LinksConfig(heartbeat_s=60, timeout_s=120))
    pump(both_up, listener, mute)
    events = pump(lambda seen: any(isinstance(e, PeerDown) for e in seen), listener)
    assert any("silent" in e.reason for e in events if isinstance(e, PeerDown))


def test_a_dialler_that_hung_learns_that_it_was_given_up(
    listener: Listener, dial: MakeDialer
) -> None:
    dialer = dial()
    pump(both_up, listener, dialer)
    pump(lambda seen: any(isinstance(e, PeerDown) for e in seen), listener)  # it hangs meanwhile
    events = pump(both_up, listener, dialer)
    assert [e.reason for e in events if isinstance(e, PeerDown)] == ["refused: data before Hello"]
    assert dialer.send(m.Cancel(RID))
    pump(lambda seen: mails(seen) == [m.Cancel(RID)], listener)


def test_heartbeats_carry_the_load(address: str, dial: MakeDialer) -> None:
    stats = m.ServiceStats(True, 5, [])
    listener = Listener(address, Identity.new("tokenizer", "t"), LINKS, lambda: stats)
    dialer = dial()
    pump(lambda _: dialer.peer is not None and dialer.peer.stats == stats, listener, dialer)
    listener.close()


class RawPeer:
    """A peer on pyzmq and msgpack alone."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.seq = 0

    def send(self, *fields: object, seq: int | None = None, major: int = 1) -> None:
        header = msgpack.packb([major, self.seq if seq is None else seq, 0])
        self.socket.send_multipart([header, msgpack.packb(list(fields))])
        self.seq += 1

    def hello(self) -> None:
        self.send("Hello", "tokenizer", "raw", b"12345678", [1, 0])

    def receive(self, listener: Listener) -> list[object]:
        pump(lambda _: bool(self.socket.poll(0)), listener)
        return msgpack.unpackb(self.socket.recv_multipart()[1])


@pytest.fixture
def raw(listener: Listener, address: str) -> Iterator[RawPeer]:
    peer = RawPeer(address)
    yield peer
    peer.socket.close()


def test_a_foreign_peer_is_welcomed(listener: Listener, raw: RawPeer) -> None:
    raw.hello()
    assert raw.receive(listener)[:3] == ["Welcome", "scheduler", "scheduler-0"]


def test_data_before_hello_is_refused(listener: Listener, raw: RawPeer) -> None:
    raw.send("Cancel", RID)
    assert raw.receive(listener)[:2] == ["Refused", "data before Hello"]


@pytest.mark.parametrize(("major", "protocol"), [(1, [2, 0]), (2, [2, 0]), (1, [1, 2])])
def test_a_version_too_far_apart_is_refused_naming_both(
    listener: Listener, raw: RawPeer, major: int, protocol: list[int]
) -> None:
    raw.send("Hello", "tokenizer", "raw", b"12345678", protocol, major=major)
    tag, reason, mine = raw.receive(listener)
    assert (tag, mine) == ("Refused", [1, 0])
    assert "2" in str(reason)
    assert "1" in str(reason)
    assert listener.peers == {}


def test_a_newer_minor_version_is_served(listener: Listener, raw: RawPeer) -> None:
    raw.send(
        "Hello", "tokenizer", "raw", b"12345678", [1, 1], "b", "c", 0, b"", 0, b"", "new field"
    )
    assert raw.receive(listener)[0] == "Welcome"


def test_a_listener_of_a_version_too_far_apart_gets_no_link(address: str, dial: MakeDialer) -> None:
    """It would have us; its fields may mean what this side does not know."""
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(address)
        dialer = dial()
        pump(lambda _: bool(router.poll(0)), dialer)
        identity, *_ = router.recv_multipart()
        welcome = ["Welcome", "scheduler", "scheduler-0", b"12345678", [1, 2]]
        router.send_multipart([identity, msgpack.packb([1, 0, 0]), msgpack.packb(welcome)])
        assert pump(lambda _: bool(dialer.refused_reason), dialer) == []
    assert "1.2" in dialer.refused_reason
    assert "1.0" in dialer.refused_reason
    assert dialer.peer is None


def test_unknown_tags_are_counted_and_the_link_lives(listener: Listener, raw: RawPeer) -> None:
    raw.hello()
    raw.send("Elect", 1)
    raw.socket.send_multipart([b"\xc1", b"\xc1"])
    raw.send("Cancel", RID)
    assert mails(pump(lambda seen: bool(mails(seen)), listener)) == [m.Cancel(RID)]
    assert listener.counters == {"unknown_tags": 1, "bad_frames": 1}


def test_a_duplicate_is_dropped(listener: Listener, raw: RawPeer) -> None:
    raw.hello()
    raw.send("Credit", RID, 1)
    raw.send("Credit", RID, 1, seq=1)
    raw.send("Credit", RID, 2, seq=2)
    got = mails(pump(lambda seen: len(mails(seen)) >= 2, listener))
    assert got == [m.Credit(RID, 1), m.Credit(RID, 2)]
    assert listener.counters["duplicates"] == 1


def test_a_gap_ends_the_link(listener: Listener, raw: RawPeer) -> None:
    raw.hello()
    raw.send("Credit", RID, 1, seq=5)
    events = pump(lambda seen: any(isinstance(e, PeerDown) for e in seen), listener)
    assert any("sequence gap" in e.reason for e in events if isinstance(e, PeerDown))
    assert mails(events) == []


def test_a_peer_that_does_not_read_is_dropped_not_waited_for(address: str, raw: RawPeer) -> None:
    raw.socket.close()
    links = LinksConfig(heartbeat_s=5, timeout_s=10, max_outbox=10)
    # tcp has its own buffers: make the messages large, so that they fill
    listener = Listener("tcp://127.0.0.1:0", Identity.new("scheduler", "s"), links)
    deaf = RawPeer(listener.address)
    deaf.hello()
    pump(lambda _: bool(listener.peers), listener)
    start = time.monotonic()
    sent = 0
    while listener.send("raw", m.Cancel(RID), [bytes(1 << 18)]) and sent < 5000:
        sent += 1
    assert sent < 5000
    assert listener.peers == {}
    assert time.monotonic() - start < 5
    deaf.socket.close()
    listener.close()


@pytest.mark.parametrize(
    ("address", "word"),
    [("tcp://10.1.2.3:5", "loopback"), ("tcp://*:5", "loopback"), ("ipc:///" + "a" * 120, "107")],
)
def test_unsafe_addresses_are_refused(address: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Listener(address, Identity.new("s", "s"), LINKS)


def test_wake_ends_a_wait(listener: Listener) -> None:
    inbox = Inbox(listener)
    inbox.wake()
    start = time.monotonic()
    assert inbox.wait(30) == []
    assert time.monotonic() - start < 5
    inbox.close()


def test_wake_after_close_touches_no_foreign_descriptor(tmp_path: Path) -> None:
    inbox = Inbox()
    inbox.close()
    foreign = os.eventfd(0, os.EFD_NONBLOCK)  # gets the number that has become free
    try:
        inbox.wake()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(foreign)
        inbox.close()  # once more does nothing
        os.fstat(foreign)
    finally:
        os.close(foreign)


def test_a_callback_that_raises_loses_no_mail_and_stops_no_clock(tmp_path: Path) -> None:
    """The loop's exception handler decides what becomes of the process."""

    async def scenario() -> tuple[list[int], list[object]]:
        address = f"ipc://{tmp_path}/a"
        got: list[int] = []
        errors: list[object] = []
        enough = asyncio.Event()

        def on_event(endpoint: Listener | Dialer, event: LinkEvent) -> None:
            match event:
                case PeerUp() if isinstance(endpoint, Dialer):
                    for number in range(20):  # one batch
                        dialer.send(m.Credit(RID, number))
                case PeerDown() if isinstance(endpoint, Dialer):
                    enough.set()  # found out by its clock alone
                case Mail(message=m.Credit(num_events=number)):
                    got.append(number)
                    if number % 5 == 0:
                        raise LookupError(f"bug {number}")
                    if number == 19:
                        enough.set()
                case _:
                    pass

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        inbox = AsyncInbox(on_event)
        inbox.add(Listener(address, Identity.new("scheduler", "s"), LINKS))
        dialer = Dialer(address, Identity.new("tokenizer", "t"), LINKS)
        inbox.add(dialer)
        inbox.start(loop)
        await asyncio.wait_for(enough.wait(), 20)
        inbox.close()
        return got, errors

    got, errors = asyncio.run(scenario())
    assert got == list(range(20))
    assert [str(error) for error in errors] == ["bug 0", "bug 5", "bug 10", "bug 15"]


def test_a_tick_that_raises_is_followed_by_another() -> None:
    class Broken:
        patience_s = 0.01
        sockets = ()
        generation = 0
        after_send = before_close = None
        num_calls = 0

        def receive(self) -> list[LinkEvent]:
            self.num_calls += 1
            raise LookupError("bug")

        def close(self) -> None:
            pass

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        again = asyncio.Event()
        broken = Broken()
        loop.set_exception_handler(
            lambda *_: again.set() if broken.num_calls >= 4 else None  # several ticks
        )
        inbox = AsyncInbox(lambda endpoint, event: None)
        inbox.add(broken)  # type: ignore[arg-type]
        with contextlib.suppress(LookupError):
            inbox.start(loop)
        await asyncio.wait_for(again.wait(), 20)
        inbox.close()
        return broken.num_calls

    assert asyncio.run(scenario()) >= 4


def test_much_mail_of_one_endpoint_leaves_others_their_turn() -> None:
    peer = Peer("scheduler", "s", "key", b"i")

    class Full:
        patience_s = 1.0
        sockets = ()
        generation = 0
        after_send = before_close = None
        mail: ClassVar[list[LinkEvent]] = [
            Mail(peer, m.Credit(RID, number), [], 0, 0) for number in range(50)
        ]

        def receive(self) -> list[LinkEvent]:
            taken, self.mail = self.mail, []  # type: ignore[misc]
            return taken

        def close(self) -> None:
            pass

    async def scenario() -> tuple[list[int], list[int]]:
        got: list[int] = []
        seen: list[int] = []  # mail delivered so far, at each turn of somebody else

        def on_event(endpoint: Listener | Dialer, event: LinkEvent) -> None:
            assert isinstance(event, Mail)
            assert isinstance(event.message, m.Credit)
            got.append(event.message.num_events)
            until = time.monotonic() + SLICE_S / 4
            while time.monotonic() < until:
                pass

        pauses: list[int] = []  # the same, at each pause
        inbox = AsyncInbox(on_event, lambda: pauses.append(len(got)))
        inbox.add(Full())  # type: ignore[arg-type]
        inbox.start(asyncio.get_running_loop())
        while len(got) < 50:
            await asyncio.sleep(0)
            seen.append(len(got))
        inbox.close()
        assert pauses == sorted(set(pauses))
        assert (pauses[-1], len(pauses) < 50) == (50, True)
        return got, seen

    got, seen = asyncio.run(scenario())
    assert got == list(range(50))
    assert len([count for count in set(seen) if 0 < count < 50]) >= 5


def test_asyncio_side_sees_every_message_and_a_restart(tmp_path: Path) -> None:
    """Ping-pong is where an edge-triggered descriptor loses its edge."""

    async def scenario() -> list[int]:
        address = f"ipc://{tmp_path}/a"
        enough = asyncio.Event()
        got: list[int] = []

        def on_event(endpoint: Listener | Dialer, event: LinkEvent) -> None:
            match event:
                case Mail(message=m.Credit(num_events=n)):
                    if isinstance(endpoint, Listener):
                        endpoint.send(event.peer.name, m.Credit(RID, n))
                    else:
                        got.append(n)
                        dialer.send(m.Credit(RID, n + 1))
                        if len(got) in (300, 600):
                            enough.set()
                case PeerUp() if isinstance(endpoint, Dialer):
                    dialer.send(m.Credit(RID, len(got)))
                case _:
                    pass

        inbox = AsyncInbox(on_event)
        first = Listener(address, Identity.new("scheduler", "s"), LINKS)
        inbox.add(first)
        dialer = Dialer(address, Identity.new("tokenizer", "t"), LINKS)
        inbox.add(dialer)
        inbox.start(asyncio.get_running_loop())
        await asyncio.wait_for(enough.wait(), 20)
        enough.clear()
        inbox.remove(first)
        inbox.add(Listener(address, Identity.new("scheduler", "s"), LINKS))
        await asyncio.wait_for(enough.wait(), 20)
        inbox.close()
        return got

    got = asyncio.run(scenario())
    assert len(got) >= 600
    assert sorted(set(got)) == list(range(max(got) + 1))


def test_frames_are_header_then_payload() -> None:
    header, payload = codec.encode(m.Cancel(RID), seq=1, sent_ns=2)
    assert msgpack.unpackb(header) == [1, 1, 2]
    assert msgpack.unpackb(payload) == ["Cancel", RID]
