"""The wire by pyzmq, msgpack and docs/wire.md alone: what a program in another language would do.

Nothing of deepmesh is imported here: the field names come from the published page, so a suite
that passes shows that the page is enough.
"""

import ast
import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import zmq

PAGE = Path(__file__).parents[2] / "docs/wire.md"
PATIENCE_S = 60.0
BEAT_S = 0.3
Message = list[Any]


def _read_page() -> tuple[dict[str, list[tuple[str, str]]], set[str], dict[str, SimpleNamespace]]:
    fields: dict[str, list[tuple[str, str]]] = {}
    messages, enums = set[str](), dict[str, SimpleNamespace]()
    name, is_enum = "", False
    for line in PAGE.read_text().splitlines():
        if line.startswith("#### "):
            name = line.removeprefix("#### ")
            fields[name] = []
        elif line.startswith(("*Message.*", "*Integer.*", "*Part.*")):
            is_enum = line.startswith("*Integer.*")
            messages |= {name} if line.startswith("*Message.*") else set()
        elif re.match(r"\| \d+ \|", line):
            cells = [cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if is_enum:
                enums.setdefault(name, SimpleNamespace()).__dict__[cells[1]] = int(cells[0])
            else:
                fields[name].append((cells[1], cells[3] if len(cells) > 3 else ""))
    return fields, messages, enums


FIELDS, MESSAGES, ENUMS = _read_page()


def make(name: str, /, **given: object) -> Message:
    """A message or part as an array, as short as its defaults allow."""
    names = [field for field, _ in FIELDS[name]]
    assert set(given) <= set(names), f"{name} has no {set(given) - set(names)}"
    last = max((i for i, (f, d) in enumerate(FIELDS[name]) if f in given or not d), default=-1)
    values = [given[f] if f in given else _default(d) for f, d in FIELDS[name][: last + 1]]
    return [name, *values] if name in MESSAGES else values


def make_whole(name: str, /, **given: object) -> Message:
    """The same with every field that this version knows, whatever its default."""
    return make(name, **{f: _default(d) for f, d in FIELDS[name] if d} | given)


def _default(text: str) -> object:
    if text.endswith("()"):
        return make(text.removesuffix("()"))
    if (enum := text.split(".")[0]) in ENUMS:
        return getattr(ENUMS[enum], text.removeprefix(f"{enum}."))
    return [1, 0] if "PROTOCOL" in text else ast.literal_eval(text)


def read(array: Sequence[Any], name: str = "") -> SimpleNamespace:
    """The fields of a message, or of the part called `name`, by their names."""
    tag, values = (name, array) if name else (array[0], array[1:])
    known = dict(zip((field for field, _ in FIELDS[tag]), values, strict=False))
    missing = {f: _default(d) for f, d in FIELDS[tag][len(known) :]}
    return SimpleNamespace(tag=tag, **known, **missing)


def pack(seq: int, message: object, *attached: bytes, major: int = 1) -> list[bytes]:
    """Header, payload, attachments."""
    return [packed([major, seq, time.time_ns()]), packed(message), *attached]


def packed(value: object) -> bytes:
    """As MessagePack."""
    return msgpack.packb(value) or b""


class Wire:
    """All raw sockets of one test, pumped together from the test's thread."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.ends: list[Dealer | Router] = []
        self.workers: list[Callable[[], None]] = []  # called after every pump

    def dial(self, address: str, service: str, name: str, **hello: object) -> "Dealer":
        """A link that is up."""
        end = Dealer(self, address)
        end.send(make("Hello", service=service, name=name, incarnation=os.urandom(8), **hello))
        end.expect("Welcome")
        end.is_up = True
        return end

    def listen(self, address: str, service: str, name: str) -> "Router":
        """Where others dial in."""
        return Router(self, address, service, name)

    def pump(self, timeout_s: float = 0.02) -> None:
        """Take what has come; heartbeats where they are due."""
        poller = zmq.Poller()
        for end in self.ends:
            poller.register(end.socket, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * timeout_s)))
        for end in list(self.ends):
            if end.socket in ready:
                end.drain()
            end.beat(time.monotonic())
        for work in self.workers:
            work()

    def until(self, holds: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
        """Pump until `holds()`."""
        deadline = time.monotonic() + patience_s
        while not holds():
            assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
            self.pump()

    def quiet(self, seconds: float = 0.4) -> None:
        """Take what still comes within a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pump()

    def close(self) -> None:
        """All leave."""
        for end in list(self.ends):
            end.close()
        self.context.term()


class Mailbox:
    """Messages of one link, looked through by name."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.mail: list[SimpleNamespace] = []  # not yet expected
        self.history: list[SimpleNamespace] = []
        self.beats: list[SimpleNamespace] = []
        self.seq_in = self.seq_out = 0

    def take(self, frames: Sequence[bytes]) -> SimpleNamespace:
        """Check the numbering, keep the message."""
        major, seq, _ = msgpack.unpackb(frames[0])
        message = read(msgpack.unpackb(frames[1]))
        message.attached = list(frames[2:])
        if message.tag != "Refused":
            assert (major, seq) == (1, self.seq_in), "numbers without a gap from 0"
            self.seq_in += 1
        if message.tag == "Heartbeat":
            self.beats.append(message)
        else:
            self.mail.append(message)
            self.history.append(message)
        return message

    def expect(
        self, tag: str, holds: Callable[[SimpleNamespace], Any] = lambda _: True
    ) -> SimpleNamespace:
        """The next message of this name, taken out of the mailbox."""
        found: list[SimpleNamespace] = []

        def look() -> bool:
            found.extend([m for m in self.mail if m.tag == tag and holds(m)][:1])
            return bool(found)

        self.wire.until(look, tag)
        self.mail.remove(found[0])
        return found[0]

    def has(self, tag: str) -> bool:
        """Whether such a message waits."""
        return any(message.tag == tag for message in self.mail)


class Dealer(Mailbox):
    """The dialling side of a link."""

    def __init__(self, wire: Wire, address: str) -> None:
        super().__init__(wire)
        self.address, self.is_up = address, False
        self.socket = wire.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, b"raw" + os.urandom(8))
        self.socket.connect(address)
        self._beaten = time.monotonic()
        wire.ends.append(self)

    def send(self, message: Message, *attached: bytes, seq: int | None = None) -> None:
        """One message with the next number, or with another one."""
        if seq is None:
            seq, self.seq_out = self.seq_out, self.seq_out + 1
        self.socket.send_multipart(pack(seq, message, *attached))

    def drain(self) -> None:
        """Everything that has come."""
        while self.socket.poll(0):
            self.take(self.socket.recv_multipart())

    def beat(self, now: float) -> None:
        """A heartbeat when one is due."""
        if self.is_up and now - self._beaten >= BEAT_S:
            self._beaten = now
            self.send(make("Heartbeat", now_ns=time.time_ns()))

    def close(self) -> None:
        """Hang up."""
        self.wire.ends.remove(self)
        self.socket.close()


class Guest(Mailbox):
    """One that has dialled in."""

    def __init__(self, host: "Router", identity: bytes) -> None:
        super().__init__(host.wire)
        self.host, self.identity = host, identity
        self.hello = SimpleNamespace()

    def send(self, message: Message) -> None:
        """One message with the next number."""
        frames = pack(self.seq_out, message)
        self.seq_out += 1
        self.host.socket.send_multipart([self.identity, *frames])


class Router:
    """The listening side: greets whoever dials in."""

    def __init__(self, wire: Wire, address: str, service: str, name: str) -> None:
        self.wire, self.service, self.name = wire, service, name
        self.stats: Message = make("ServiceStats", ready=True)  # said in every heartbeat
        self.guests: dict[str, Guest] = {}
        self.greets = True
        self._by_identity: dict[bytes, Guest] = {}
        self._beaten = time.monotonic()
        self.socket = wire.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(address)
        wire.ends.append(self)

    def guest(self, name: str) -> Guest:
        """Wait until this one has dialled in."""
        self.wire.until(lambda: name in self.guests, f"{name} to dial in")
        return self.guests[name]

    def drain(self) -> None:
        """Everything that has come."""
        while self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            if identity not in self._by_identity and msgpack.unpackb(frames[1])[0] != "Hello":
                refused = pack(0, make("Refused", reason="data before Hello"))
                with contextlib.suppress(zmq.ZMQError):  # of a former life of us, gone already
                    self.socket.send_multipart([identity, *refused])
                continue
            guest = self._by_identity.setdefault(identity, Guest(self, identity))
            message = guest.take(frames)
            if message.tag == "Hello":
                assert not identity.startswith(b"\0")
                guest.mail.remove(message)
                guest.hello = message
                if self.greets:
                    self.greet(guest)

    def greet(self, guest: Guest) -> None:
        """Say Welcome."""
        me = {"service": self.service, "name": self.name, "incarnation": b"raw side"}
        guest.send(make("Welcome", **me))
        self.guests[guest.hello.name] = guest

    def beat(self, now: float) -> None:
        """Heartbeats when they are due."""
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        for name, guest in list(self.guests.items()):
            try:
                guest.send(make("Heartbeat", stats=self.stats, now_ns=time.time_ns()))
            except zmq.ZMQError:  # it left
                del self.guests[name]

    def close(self) -> None:
        """Hang up on all."""
        self.wire.ends.remove(self)
        self.socket.close()
