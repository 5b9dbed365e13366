"""Links as docs/wire.md has them, for programs on pyzmq and msgpack alone: nothing of deepmesh."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import zmq

BEAT_S, TIMEOUT_S, MINOR = 0.5, 5.0, 0  # MINOR: of protocol 1, that this file was written for
Message = list[Any]
Key = Any  # the identity of one that dialled in, or our own socket


def pack(value: object) -> bytes:
    return msgpack.packb(value) or b""


class Link:
    """One side of one link."""

    def __init__(self, send_frames: Callable[[list[bytes]], None], address: str = "") -> None:
        self.send_frames, self.address = send_frames, address
        self.seq_in = self.seq_out = 0
        self.name, self.heard, self.stats = "", time.monotonic(), None

    def send(self, *message: object, attached: Sequence[bytes] = ()) -> None:
        self.seq_out += 1
        self.send_frames([pack([1, self.seq_out - 1, time.time_ns()]), pack(message), *attached])

    def take(self, seq: int, message: Message | None) -> Message | None:
        """Count a message; None for what is of no use. ConnectionError: the link is over."""
        self.heard = time.monotonic()
        if seq > self.seq_in:
            raise ConnectionError("a message was lost")
        if seq < self.seq_in:
            return None
        self.seq_in += 1
        if message and message[0] == "Heartbeat":
            self.stats = message[1] if len(message) > 1 else None
            return None
        return message


def decode(frames: list[bytes]) -> tuple[int, int, Message | None]:
    """Major version, number and message; major 0 where there is no header."""
    try:
        major, seq, _ = msgpack.unpackb(frames[0])
        assert isinstance(seq, int)
        message = msgpack.unpackb(frames[1], strict_map_key=False)
        return major, seq, message if isinstance(message, list) and message else None
    except Exception:  # whatever a stranger sends
        try:
            return 1, int(msgpack.unpackb(frames[0])[1]), None
        except Exception:
            return 0, 0, None


def refusal(major: int, message: Message) -> str:
    """Why a stranger's first message begins no link."""
    is_hello = message[0] == "Hello"
    major, minor = message[4] if is_hello and len(message) > 4 else (major, 0)
    if major != 1 or abs(minor - MINOR) > 1:
        return f"protocol {major}.{minor}, this side speaks 1.{MINOR}"
    return "" if is_hello and len(message) > 3 else "data before Hello"


class Node:
    """All links of a program."""

    def __init__(self, service: str, name: str) -> None:
        self.me = [service, name, os.urandom(8), [1, MINOR]]
        self.stats: Message = [True, 0, []]
        self.links: dict[str, Link] = {}  # those that are up, by name
        self.by_key: dict[Any, Link] = {}  # identities of those that dialled in, our own sockets
        self.router: Any = None
        self.poller, self.beaten = zmq.Poller(), 0.0
        self.attached: list[bytes] = []  # to the message that is delivered

    def listen(self, address: str) -> None:
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.bind(address)
        self.poller.register(self.router, zmq.POLLIN)

    def dial(self, address: str) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"s" + os.urandom(8))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        self.poller.register(socket, zmq.POLLIN)
        link = self.by_key[socket] = Link(socket.send_multipart, address)
        link.send("Hello", *self.me)

    def send(self, name: str, *message: object, attached: Sequence[bytes] = ()) -> None:
        try:
            if name in self.links:
                self.links[name].send(*message, attached=attached)
        except zmq.ZMQError:
            pass  # it left: `tend` finds out

    def run(
        self,
        on_message: Callable[[str, Message], None],
        on_down: Callable[[str], None] = lambda name: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve for ever; a new link shows as its Hello or Welcome."""
        while True:
            for socket, _ in self.poller.poll(10):
                frames = socket.recv_multipart()
                key = frames.pop(0) if socket is self.router else socket
                self.attached = frames[2:]
                try:
                    message = self.arrive(key, frames)
                    if message is not None:
                        on_message(self.by_key[key].name, message)
                except ConnectionError:
                    self.drop(key, on_down)
            if (now := time.monotonic()) - self.beaten > BEAT_S:
                self.beaten = now
                self.tend(now, on_down)
            on_idle()

    def arrive(self, key: Key, frames: list[bytes]) -> Message | None:
        major, seq, message = decode(frames)
        link = self.by_key.get(key)
        if link is None:
            return self.greet(key, major, seq, message)
        if message and message[0] == "Refused":  # numbered by a listener that knows no link of ours
            raise ConnectionError(message[1:])
        message = link.take(seq, message) if major == 1 else None
        if message and message[0] == "Welcome":
            link.name, self.links[message[2]] = message[2], link
        return message

    def greet(self, key: bytes, major: int, seq: int, message: Message | None) -> Message | None:
        """The first message of a stranger."""
        if not message or not major:
            return None
        link = Link(lambda frames: self.router.send_multipart([key, *frames]))
        if why := refusal(major, message):
            link.send("Refused", why)
            return None
        link.name, link.seq_in = message[2], seq + 1
        self.by_key = {k: other for k, other in self.by_key.items() if other.name != link.name}
        self.by_key[key] = self.links[link.name] = link
        link.send("Welcome", *self.me)
        return message

    def drop(self, key: Key, on_down: Callable[[str], None]) -> None:
        link = self.by_key.pop(key)
        if self.links.get(link.name) is link:
            on_down(self.links.pop(link.name).name)
        if link.address:
            self.poller.unregister(key)
            key.close()
            self.dial(link.address)

    def tend(self, now: float, on_down: Callable[[str], None]) -> None:
        for key, link in list(self.by_key.items()):
            try:
                if link.name:
                    link.send("Heartbeat", self.stats, time.time_ns())
                if now - link.heard > TIMEOUT_S:
                    raise ConnectionError("silent")
            except (zmq.ZMQError, ConnectionError):
                self.drop(key, on_down)


def options() -> dict[str, list[str]]:
    """`--key value` pairs of the command line; a key may come again."""
    pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    return {key.lstrip("-"): [v for k, v in pairs if k == key] for key, _ in pairs}
