"""A stranger at a listener's socket: whatever frames it sends, the listener refuses and goes on."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from deepmesh.config import LinksConfig
from deepmesh.wire import codec
from deepmesh.wire import messages as m
from deepmesh.wire.link import Identity, PeerUp
from deepmesh.wire.sockets import MAX_NAME, Dialer, Listener

LINKS = LinksConfig(heartbeat_s=0.2, timeout_s=20.0)
HELLO = m.Hello("tokenizer", "tokenizer-9", b"i" * 8)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(f"ipc://{tmp_path}/s", Identity.new("scheduler", "scheduler-0"), LINKS)
    yield made
    made.close()


@pytest.fixture
def stranger(listener: Listener) -> Iterator["zmq.Socket[bytes]"]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(listener.address)
    yield socket
    socket.close()


def until(listener: Listener, holds: object) -> list[object]:
    """Receive until something is true."""
    events: list[object] = []
    deadline = time.monotonic() + 30
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        listener.socket.poll(20)
        events += listener.receive()
    return events


def frames(message: m.AnyMessage, seq: int = 0) -> list[bytes]:
    return codec.encode(message, seq=seq, sent_ns=1)


BAD: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"x"],
    [b"\xdd\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"],
    [b"\x93\x01\x00\x00", b"\xc1"],
    [b"\x93\x01\x00\x00", b"\x91" * 100_000],
    [b"\x93\x01\x00\x00", b"\x92\xa6Cancel\xc6\xff\xff\xff\xff"],
    [b"\x93\x01\x00\x00"] * 3000,
]


def test_garbage_is_counted_and_said_once(
    listener: Listener, stranger: "zmq.Socket[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            for bad in BAD:
                stranger.send_multipart(bad)
        until(listener, lambda: listener.counters["bad_frames"] >= 50 * len(BAD))
    assert len(caplog.records) <= len(BAD)
    assert all(len(record.getMessage()) < 2 * MAX_NAME for record in caplog.records)
    assert listener.peers == {}


def test_data_before_hello_and_endless_names_are_refused(
    listener: Listener, stranger: "zmq.Socket[bytes]"
) -> None:
    for message in (m.Cancel(b"r" * 16), msgspec.structs.replace(HELLO, name="n" * 10**6)):
        stranger.send_multipart(frames(message))
        until(listener, lambda: stranger.poll(0))
        assert isinstance(codec.decode(stranger.recv_multipart()).message, m.Refused)
    assert listener.peers == {}


def test_a_peer_that_lies_about_its_numbers_is_dropped_and_others_stay(
    listener: Listener, stranger: "zmq.Socket[bytes]"
) -> None:
    good = Dialer(listener.address, Identity.new("tokenizer", "tokenizer-0"), LINKS)
    try:
        until(listener, lambda: good.receive() is None or "tokenizer-0" in listener.peers)
        stranger.send_multipart(frames(HELLO))
        until(listener, lambda: "tokenizer-9" in listener.peers)
        for seq in (2**63 - 1, -1, 2**64 - 1):
            stranger.send_multipart(frames(m.Cancel(b"r" * 16), seq))
        events = until(listener, lambda: "tokenizer-9" not in listener.peers)
        assert not any(isinstance(event, PeerUp) for event in events)
        assert set(listener.peers) == {"tokenizer-0"}
    finally:
        good.close()
