"""Links over ZeroMQ: `Listener` (ROUTER, many peers) and `Dialer` (DEALER, one peer).

Every send is non-blocking into a bounded outbox; a full outbox, a sequence gap, silence or a
closed connection end the link, and the dialling side begins a new one under a new identity
(libzmq ignores a restarted peer that reuses its identity while the old link lingers).
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import zmq
from msgspec.structs import replace
from zmq.utils.monitor import parse_monitor_message

from deepmesh.addresses import bind_address, check_address
from deepmesh.config import LinksConfig
from deepmesh.wire import codec, curve, names, zap
from deepmesh.wire.clocks import MeshClock
from deepmesh.wire.link import Arrival, Identity, Link, LinkEvent, Mail, Peer, PeerDown, PeerUp
from deepmesh.wire.messages import (
    AnyMessage,
    GetRecords,
    Heartbeat,
    Hello,
    KeepTrace,
    LinkStats,
    Records,
    Refused,
    ServiceStats,
    Welcome,
)
from deepmesh.wire.process import Process

__all__ = ["Dialer", "Identity", "LinkEvent", "Listener", "Mail", "Peer", "PeerDown", "PeerUp"]

_log = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 1 << 28
MAX_LINKS = 4096  # of a listener
MAX_NAME = 200  # characters of a peer's name or service, and of what is said of a bad frame
_COPY_BELOW = 1 << 18  # bytes of a frame: below, a copy costs less than sharing its memory
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # plain ints: 128 sends a step


class _Endpoint:
    """What both sides share: the socket, its options, counters, the heartbeat clock."""

    def __init__(
        self,
        address: str,
        me: Identity,
        links: LinksConfig,
        stats: Callable[[], ServiceStats] = ServiceStats,
    ) -> None:
        check_address(address, encrypted=me.keys is not None)
        self.address = address
        self._keys = me.keys if address.startswith("tcp://") else None
        self.me = me
        self.counters: Counter[str] = Counter()
        self._repeats = zap.Repeats()
        self.generation = 0  # moves when `sockets` changes
        self.after_send: Callable[[], None] | None = None
        self.before_close: Callable[[], None] | None = None  # the sockets are about to close
        self._process = me.process or Process("", MeshClock(is_reference=True))
        self._process.endpoints.append(self)
        self._links_config = links
        self._stats = stats
        self._told = (-1.0, ServiceStats())  # when, and what: the same for all links at one look
        self._events: list[LinkEvent] = []

    @property
    def patience_s(self) -> float:
        """How long `receive` may go uncalled: shorter while something waits to be sent."""
        return 0.05 if self._unsent() else self._links_config.heartbeat_s / 2

    def _unsent(self) -> bool:
        raise NotImplementedError

    def _make_socket(self, kind: int) -> zmq.Socket[bytes]:
        context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())  # stubs lose it
        socket: zmq.Socket[bytes] = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 20_000)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        return socket

    def _deliver(self, link: Link, frames: Sequence[bytes]) -> AnyMessage | None:
        """Count and decode a frame of an open link; None when there is nothing to act on.

        Raises:
            _LinkBroken: the link cannot go on.
        """
        now = time.monotonic()
        try:
            header = codec.decode_header(frames)
        except codec.WireError as error:
            self.counters["bad_frames"] += 1
            self._complain("dropped a frame", error)
            return None
        match link.arrive(header.seq, now):
            case Arrival.DUPLICATE:
                self.counters["duplicates"] += 1
                return _refusal(frames)
            case Arrival.GAP:
                raise _LinkBroken("a message was lost (sequence gap)")
            case Arrival.NEXT:
                pass
        try:
            message = codec.decode_payload(frames)
        except codec.WireError as error:
            unknown = isinstance(error, codec.UnknownTag)
            self.counters["unknown_tags" if unknown else "bad_frames"] += 1
            self._complain("refused a message", error)
            return None
        peer = link.peer
        if isinstance(message, Heartbeat):
            if peer is not None:
                peer.stats = message.stats
                self._set_clock(link, peer, message)
            return None
        observer = self._process.observer
        if (
            peer is not None
            and observer is not None
            and isinstance(message, (GetRecords, Records, KeepTrace))
        ):
            observer.take(message, peer.name, self._process)
            return None
        if peer is not None and not isinstance(message, (Hello, Welcome, Refused)):
            sent_ns, received_ns = header.sent_ns, time.time_ns()
            if peer.has_other_clock:
                link.way.saw(sent_ns, received_ns)
                sent_ns -= peer.ahead_ns
            self._events.append(Mail(peer, message, list(frames[2:]), sent_ns, received_ns))
            return None
        return message

    def _complain(self, what: str, error: codec.WireError) -> None:
        """In the log, but not once for each frame of a peer that sends nothing else."""
        words = str(error)[:MAX_NAME]
        if self._repeats.is_news(words):
            _log.warning("%s: %s: %s", self.me.name, what, words)

    def _set_clock(self, link: Link, peer: Peer, beat: Heartbeat) -> None:
        """How far the peer's clock is ahead of ours, and ours of the mesh's."""
        if peer.has_other_clock:
            link.way.saw(beat.now_ns, time.time_ns())
            if beat.way_ns:
                peer.ahead_ns = (beat.way_ns - link.way.ns) // 2
        if not peer.has_other_clock or beat.way_ns:
            self._process.clock.hear(peer.key, beat.clock_links, beat.ahead_ns - peer.ahead_ns)

    def _has_other_clock(self, clock: bytes) -> bool:
        """Whether a peer that names its clock so reads another one than we do."""
        return bool(clock and self.me.clock_id) and clock != self.me.clock_id

    def link_stats(self) -> list[LinkStats]:
        """Of all links that are up."""
        return [
            LinkStats(
                self.me.name,
                self.me.service,
                peer.name,
                peer.service,
                peer.stats.ready,
                peer.stats.requests,
                link.num_sent,
                link.num_received,
                peer.stats.dropped_spans,
                peer.incarnation,
            )
            for link in self._open_links()
            if (peer := link.peer) is not None
        ]

    def links_told(self) -> list[LinkStats]:
        """By our peers, in their last heartbeats; what a tokenizer knows, only gateways hear."""
        return [
            told
            for link in self._open_links()
            if link.peer is not None
            for told in link.peer.stats.links
        ]

    def send_to(self, peer: str, message: AnyMessage) -> bool:
        """Send to the peer of this name; False when there is no link to it here."""
        raise NotImplementedError

    def _open_links(self) -> Iterable[Link]:
        raise NotImplementedError

    def _beat(self, link: Link, now: float) -> bool:
        """Send a heartbeat when one is due; False when the outbox is full."""
        if now - link.last_beat < self._links_config.heartbeat_s:
            return True
        link.last_beat = now
        if self._told[0] != now:
            stats, links = self._stats(), self._process.links_told()
            dropped = self._process.dropped_spans
            if links or dropped:
                stats = replace(stats, links=links, dropped_spans=dropped)
            self._told = (now, stats)
        clock = self._process.clock
        return link.post(
            Heartbeat(self._told[1], time.time_ns(), link.way.ns, clock.ahead_ns, clock.links)
        )

    def _leave(self) -> None:
        if self in self._process.endpoints:
            self._process.endpoints.remove(self)

    def _take_events(self) -> list[LinkEvent]:
        events, self._events = self._events, []
        return events


def _monitored(monitor: "zmq.Socket[bytes] | None") -> Iterator[int]:
    """The events that a monitor holds."""
    while monitor is not None and monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
        yield parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> None:
    """All frames as one message; libzmq takes it whole or not at all.

    Raises:
        zmq.Again: it takes none now.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=len(frame) < _COPY_BELOW)
    socket.send(frames[-1], _LAST, copy=len(frames[-1]) < _COPY_BELOW)


class _LinkBroken(Exception):
    """The link cannot go on; the text is the reason given in `PeerDown`."""


def _refusal(frames: Sequence[bytes]) -> Refused | None:
    """A refusal, whatever its number: who gave the link up has forgotten how far it counted."""
    try:
        message = codec.decode(frames).message
    except codec.WireError:
        return None
    return message if isinstance(message, Refused) else None


class Listener(_Endpoint):
    """Binds an address; peers dial in."""

    def __init__(
        self,
        address: str,
        me: Identity,
        links: LinksConfig,
        stats: Callable[[], ServiceStats] = ServiceStats,
    ) -> None:
        super().__init__(address, me, links, stats)
        self.socket = self._make_socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._domain = ""
        self._monitor: zmq.Socket[bytes] | None = None
        if self._keys is not None:
            self._domain = zap.door.open(me.name, self._keys.clients)
            curve.encrypt_listener(self.socket, self._keys, self._domain)
            self._monitor = self.socket.get_monitor_socket(curve.FAILURES)
        self.socket.bind(bind_address(address, links.bind))
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._links: dict[bytes, Link] = {}
        self._next_tick = 0.0
        self._by_name: dict[str, bytes] = {}

    @property
    def sockets(self) -> list["zmq.Socket[bytes]"]:
        """What to poll."""
        return [self.socket] if self._monitor is None else [self.socket, self._monitor]

    @property
    def peers(self) -> dict[str, Peer]:
        """Peers whose link is up, by name."""
        found = {name: self._links[key].peer for name, key in self._by_name.items()}
        return {name: peer for name, peer in found.items() if peer is not None}

    def receive(self) -> list[LinkEvent]:
        """Everything that has arrived, without waiting; also keeps the links' clocks."""
        while True:
            try:
                (identity, *frames), key_owner = self._receive_frames()
            except zmq.Again:
                break
            self._take(identity, frames, key_owner)
        self._watch_handshakes()
        self._tick()
        return self._take_events()

    def send(self, peer_name: str, message: AnyMessage, attachments: Sequence[bytes] = ()) -> bool:
        """Queue a message for a peer; False (and nothing sent) when its link is not up."""
        key = self._by_name.get(peer_name)
        if key is None:
            return False
        link = self._links[key]
        if not link.post(message, attachments):
            self._drop(key, f"outbox of {self._links_config.max_outbox} messages is full")
            return False
        return self._flush(key, link)

    def send_to(self, peer: str, message: AnyMessage) -> bool:
        """See `_Endpoint`."""
        return self.send(peer, message)

    def announce(self) -> None:
        """Send every peer a heartbeat now: the state in it has changed in a way that matters."""
        for link in self._links.values():
            link.last_beat = -math.inf
        self._next_tick = 0.0
        self._tick()

    def close(self) -> None:
        """Give the address back."""
        self._leave()
        if self.before_close is not None:
            self.before_close()
        if self._monitor is not None and not self._monitor.closed:
            self.socket.disable_monitor()
            self._monitor.close()
        self.socket.close()
        zap.door.shut(self._domain)
        if self.address.startswith("ipc://"):  # libzmq does it too late when the process ends
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _unsent(self) -> bool:
        return any(link.outbox for link in self._links.values())

    def _open_links(self) -> Iterable[Link]:
        return self._links.values()

    def _receive_frames(self) -> tuple[list[bytes], str]:
        """The frames of one message, and the service whose key its sender has (or "")."""
        if self._keys is None:
            return self.socket.recv_multipart(zmq.NOBLOCK), ""
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return [frame.bytes for frame in frames], str(frames[-1].get("User-Id"))

    def _watch_handshakes(self) -> None:
        """Say why somebody did not get in."""
        for event in _monitored(self._monitor):
            self.counters["failed_handshakes"] += 1
            words = curve.listener_words(event)
            if words and self._repeats.is_news(words):
                _log.warning("%s: failed handshake at %s: %s", self.me.name, self.address, words)

    def _take(self, identity: bytes, frames: list[bytes], key_owner: str) -> None:
        link = self._links.get(identity)
        if link is None:
            self._greet(identity, frames, key_owner)
            return
        try:
            self._deliver(link, frames)
        except _LinkBroken as broken:
            self._drop(identity, str(broken))

    def _greet(self, identity: bytes, frames: list[bytes], key_owner: str) -> None:
        """First message of an unknown identity: a Hello of our version, or a refusal."""
        try:
            decoded = codec.decode(frames)
        except codec.OtherVersion as error:
            self.counters["other_version"] += 1
            self._refuse(identity, str(error))
            return
        except codec.WireError as error:
            self.counters["bad_frames"] += 1
            self._complain("dropped a frame", error)
            return
        hello = decoded.message
        if not isinstance(hello, Hello):
            self._refuse(identity, "data before Hello")
            return
        if len(hello.name) > MAX_NAME or len(hello.service) > MAX_NAME:
            self._refuse(identity, f"a name has at most {MAX_NAME} characters")
            return
        if len(self._links) >= MAX_LINKS and hello.name not in self._by_name:
            self.counters["too_many_links"] += 1
            self._refuse(identity, f"{MAX_LINKS} links are up already")
            return
        if problem := codec.version_problem(hello.protocol):
            self.counters["other_version"] += 1
            _log.warning("%s: refused %s: %s", self.me.name, hello.name, problem)
            self._refuse(identity, problem)
            return
        if key_owner and hello.service != key_owner:
            reason = f"a {hello.service} with the key of a {key_owner}"
            _log.warning("%s: refused %s: %s", self.me.name, hello.name, reason)
            self._refuse(identity, reason)
            return
        old = self._by_name.get(hello.name)
        if old is not None:
            self._drop(old, "replaced by a new link of the same name")
        link = Link(now=time.monotonic(), max_outbox=self._links_config.max_outbox)
        link.arrive(decoded.header.seq, time.monotonic())
        link.peer = Peer(
            hello.service, hello.name, identity.hex(), hello.incarnation, build=hello.build
        )
        link.peer.has_other_clock = self._has_other_clock(hello.clock)
        link.last_beat, self._next_tick = -math.inf, 0.0  # who dials in learns our state at once
        self._links[identity] = link
        self._by_name[hello.name] = identity
        link.post(self.me.welcome())
        if self._flush(identity, link):
            self._events.append(PeerUp(link.peer))

    def _refuse(self, identity: bytes, reason: str) -> None:
        frames = codec.encode(Refused(reason), seq=0, sent_ns=time.time_ns())
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counters["unsent_refusals"] += 1  # the stranger left already

    def _flush(self, identity: bytes, link: Link) -> bool:
        while link.outbox:
            try:
                _send(self.socket, [identity, *link.outbox[0]])
            except zmq.Again:
                break
            except zmq.ZMQError as error:  # EHOSTUNREACH: ROUTER_MANDATORY, the peer is gone
                self._drop(identity, f"connection closed ({error.strerror})")
                return False
            link.outbox.popleft()
        if self.after_send is not None:
            self.after_send()
        return True

    def _tick(self) -> None:
        """Silence, heartbeats and full sockets; not at each of the many calls between beats."""
        now = time.monotonic()
        if now < self._next_tick and not self._unsent():
            return
        self._next_tick = now + self._links_config.heartbeat_s / 16
        for identity, link in list(self._links.items()):
            if now - link.last_heard > self._links_config.timeout_s:
                self._drop(identity, f"silent for {self._links_config.timeout_s} s")
            elif not self._beat(link, now):
                self._drop(identity, "outbox is full")
            elif link.outbox:
                self._flush(identity, link)

    def _drop(self, identity: bytes, reason: str) -> None:
        link = self._links.pop(identity)
        if link.peer is not None:
            self._process.clock.forget(link.peer.key)
            self._by_name.pop(link.peer.name, None)
            self._events.append(PeerDown(link.peer, reason))


class Dialer(_Endpoint):
    """Connects to one listener and stays connected: a lost link is dialled again."""

    def __init__(
        self,
        address: str,
        me: Identity,
        links: LinksConfig,
        stats: Callable[[], ServiceStats] = ServiceStats,
        *,
        target: str = "",
    ) -> None:
        """`target`: one address in numbers, where the name in `address` leads to several."""
        super().__init__(address, me, links, stats)
        self.refused_reason = ""
        self._server_keys = () if self._keys is None else self._keys.keys_at(address)
        self._num_failed = 0  # handshakes
        self._redial_at = 0.0  # after a failed one
        self._lookup = None if target else names.Lookup.of(address)
        self._target = "" if self._lookup else target or address  # what the socket connects to
        self._open()

    @property
    def peer(self) -> Peer | None:
        """The listener while the link is up."""
        return self._link.peer

    @property
    def sockets(self) -> list["zmq.Socket[bytes]"]:
        """What to poll."""
        return [self.socket, self._monitor]

    def receive(self) -> list[LinkEvent]:
        """Everything that has arrived, without waiting; also keeps the link's clock."""
        try:
            self._drain()
            self._watch_connection()
            self._tick()
        except _LinkBroken as broken:
            self._reset(str(broken))
        return self._take_events()

    def send(self, message: AnyMessage, attachments: Sequence[bytes] = ()) -> bool:
        """Queue a message; False (and nothing sent) when the link is not up."""
        if self._link.peer is None:
            return False
        if not self._link.post(message, attachments):
            self._reset(f"outbox of {self._links_config.max_outbox} messages is full")
            return False
        self._flush()
        return True

    def send_to(self, peer: str, message: AnyMessage) -> bool:
        """See `_Endpoint`."""
        return self.peer is not None and self.peer.name == peer and self.send(message)

    def close(self) -> None:
        """Hang up."""
        self._leave()
        self._close_socket()

    def _open(self) -> None:
        nonce = time.monotonic_ns().to_bytes(8, "big")
        self.socket = self._make_socket(zmq.DEALER)
        # libzmq keeps identities that begin with a zero byte for itself
        self.socket.setsockopt(zmq.IDENTITY, b"d" + self.me.incarnation + nonce)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 30)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._redial_at = 0.0
        failures = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        if self._keys is not None:  # while keys are replaced, one of several is in use there
            failures = curve.FAILURES
            server_key = self._server_keys[self._num_failed % len(self._server_keys)]
            curve.encrypt_dialler(self.socket, self._keys, server_key)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | failures)
        if self._target:
            self.socket.connect(self._target)
        self.generation += 1
        self._link = Link(now=time.monotonic(), max_outbox=self._links_config.max_outbox)
        self._link.post(self.me.hello())
        self._flush()

    def _unsent(self) -> bool:
        return bool(self._link.outbox)

    def _open_links(self) -> Iterable[Link]:
        return (self._link,)

    def _close_socket(self) -> None:
        if self.socket.closed:
            return
        if self.before_close is not None:
            self.before_close()
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    def _reset(self, reason: str) -> None:
        peer = self._link.peer
        if peer is not None:
            self._process.clock.forget(peer.key)
            self._events.append(PeerDown(peer, reason))
        self._close_socket()
        self._open()
        if self.after_send is not None:
            self.after_send()

    def _drain(self) -> None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._deliver(self._link, frames)
            if isinstance(message, Welcome) and self._link.peer is None:
                if problem := codec.version_problem(message.protocol):
                    self._note_refusal(problem)  # a listener that would have us; we cannot
                    continue
                key = bytes(self.socket.getsockopt(zmq.IDENTITY)).hex()  # pyright: ignore[reportArgumentType]
                self._link.peer = Peer(
                    message.service, message.name, key, message.incarnation, build=message.build
                )
                self._link.peer.has_other_clock = self._has_other_clock(message.clock)
                self.refused_reason = ""
                self._events.append(PeerUp(self._link.peer))
            elif isinstance(message, Refused):
                self._note_refusal(message.reason)
                if self._link.peer is not None:
                    raise _LinkBroken(f"refused: {message.reason}")

    def _note_refusal(self, reason: str) -> None:
        if reason != self.refused_reason:
            _log.warning("%s: no link with %s: %s", self.me.name, self.address, reason)
        self.refused_reason = reason

    def _watch_connection(self) -> None:
        closed = False
        for event in _monitored(self._monitor):
            closed = closed or bool(event & zmq.EVENT_DISCONNECTED)
            if event & curve.FAILURES:
                words = curve.dialler_words(event, encrypted=self._keys is not None)
                self._note_failure(words)
        if closed and (self._link.peer is not None or not self._link.outbox):
            raise _LinkBroken("connection closed")

    def _follow_name(self, lookup: names.Lookup) -> None:
        """Connect to where the name leads now; it may lead elsewhere after a restart."""
        lookup.ask()
        target = lookup.numeric(self._target)
        if target != self._target:
            if self._target:
                self.socket.disconnect(self._target)
            self.socket.connect(target)
            self._target = target

    def _note_failure(self, reason: str) -> None:
        """A handshake failed: say so, and dial again soon, perhaps with another key."""
        self.counters["failed_handshakes"] += 1
        self._num_failed += 1
        if not self._redial_at:
            self._redial_at = time.monotonic() + curve.RETRY_S
        if reason != self.refused_reason and self._num_failed >= len(self._server_keys):
            _log.warning("%s: no link with %s: %s", self.me.name, self.address, reason)
            self.refused_reason = reason

    def _tick(self) -> None:
        now = time.monotonic()
        if self._redial_at and now >= self._redial_at:
            raise _LinkBroken("failed handshake")
        if self._lookup is not None and self._link.peer is None:
            self._follow_name(self._lookup)
        if self._link.peer is not None and not self._beat(self._link, now):
            raise _LinkBroken("outbox is full")
        if now - self._link.last_heard > self._links_config.timeout_s:
            raise _LinkBroken(f"silent for {self._links_config.timeout_s} s")
        if self._link.outbox:
            self._flush()

    def _flush(self) -> None:
        outbox = self._link.outbox
        while outbox:
            try:
                _send(self.socket, outbox[0])
            except zmq.Again:
                break
            outbox.popleft()
        if self.after_send is not None:
            self.after_send()
