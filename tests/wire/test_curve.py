"""Encrypted links: who has a listed key gets in, nobody else, and both sides say so."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from deepmesh.config import Config, load_config
from deepmesh.key_folder import make_keys
from deepmesh.wire import messages as m
from deepmesh.wire.inbox import AsyncInbox, Inbox
from deepmesh.wire.keys import KeysError
from deepmesh.wire.link import Identity, LinkEvent, Mail, PeerDown, PeerUp
from deepmesh.wire.sockets import Dialer, Listener

RID = b"r" * 16
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Hosts:
    """Machines of one mesh, each with a mesh.toml and a key folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"

    def config(self, name: str, *, keys: bool = True) -> Config:
        """The configuration on host `name`, whose keys lie in the folder of that name."""
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'[scheduler]\naddress = "{self.address}"\n'
            "[links]\nheartbeat_s = 0.05\ntimeout_s = 3.0\n"
            + (f'keys = "{name}"\n' if keys else "")
        )
        return load_config(path)

    def listener(self, name: str, *, keys: bool = True) -> Listener:
        config = self.config(name, keys=keys)
        me = Identity.new("scheduler", "scheduler-0", config)
        return Listener(self.address, me, config.links)

    def dialer(self, name: str, service: str = "tokenizer", *, keys: bool = True) -> Dialer:
        config = self.config(name, keys=keys)
        return Dialer(self.address, Identity.new(service, f"{service}-0", config), config.links)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")  # another mesh's
    return Hosts(tmp_path)


@contextmanager
def inbox_of(*endpoints: Listener | Dialer) -> Iterator[Inbox]:
    with closing(Inbox(*endpoints)) as inbox:
        yield inbox


def wait(inbox: Inbox, until: Callable[[list[LinkEvent]], bool]) -> list[LinkEvent]:
    seen: list[LinkEvent] = []
    deadline = time.monotonic() + PATIENCE_S
    while not until(seen):
        assert time.monotonic() < deadline, seen
        seen += inbox.wait(0.05)
    return seen


def both_up(events: list[LinkEvent]) -> bool:
    return sum(isinstance(event, PeerUp) for event in events) == 2


def refusal(
    caplog: pytest.LogCaptureFixture, listener: Listener, dialer: Dialer
) -> tuple[str, list[LinkEvent]]:
    """What is logged, and all events, until both sides have noticed a failed handshake."""
    with caplog.at_level(logging.WARNING), inbox_of(listener, dialer) as inbox:
        events = wait(
            inbox,
            lambda _: (
                bool(dialer.counters["failed_handshakes"])
                and bool(listener.counters["failed_handshakes"])
            ),
        )
        # it goes on trying, and stays out
        events += wait(inbox, lambda _: dialer.counters["failed_handshakes"] >= 3)
        assert listener.peers == {}
    return caplog.text, events


def test_a_listed_key_gets_in_and_messages_flow_both_ways(hosts: Hosts) -> None:
    listener, dialer = hosts.listener("ours"), hosts.dialer("ours")
    with inbox_of(listener, dialer) as inbox:
        wait(inbox, both_up)
        assert dialer.send(m.Credit(RID, 1), [b"block"])
        (mail,) = wait(inbox, bool)
        assert isinstance(mail, Mail)
        assert (mail.message, mail.attachments) == (m.Credit(RID, 1), [b"block"])
        assert listener.send("tokenizer-0", m.Cancel(RID))
        (mail,) = wait(inbox, bool)
        assert isinstance(mail, Mail)
        assert mail.message == m.Cancel(RID)


def test_nothing_readable_is_on_the_wire(hosts: Hosts) -> None:
    """A tap between the two sees the payload only if the link is plain."""
    for keys in (True, False):
        hosts.address = f"tcp://127.0.0.1:{free_port()}"
        listener = hosts.listener("ours", keys=keys)
        with closing(socket.create_server(("127.0.0.1", 0))) as tap:
            behind = hosts.address
            hosts.address = f"tcp://127.0.0.1:{tap.getsockname()[1]}"
            dialer = hosts.dialer("ours", keys=keys)
            seen = bytearray()
            with inbox_of(listener, dialer) as inbox:
                client, _ = tap.accept()
                port = int(behind.rpartition(":")[2])
                with client, socket.create_connection(("127.0.0.1", port)) as server:
                    client.setblocking(False)
                    server.setblocking(False)
                    deadline = time.monotonic() + PATIENCE_S
                    up = got = False
                    while not got:
                        assert time.monotonic() < deadline
                        for source, sink in ((client, server), (server, client)):
                            try:
                                data = source.recv(1 << 16)
                            except BlockingIOError:
                                continue
                            seen += data
                            sink.setblocking(True)
                            sink.sendall(data)
                            sink.setblocking(False)
                        for event in inbox.wait(0.01):
                            got = got or isinstance(event, Mail)
                        if dialer.peer is not None and not up:
                            up = dialer.send(m.Cancel(b"a secret request"))
        assert (b"a secret request" in seen) is not keys
        assert (b"tokenizer-0" in seen) is not keys


def test_an_unknown_key_is_refused(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    """A key pair that nobody listed, but everything else right: CURVE alone would let it in."""
    ours, theirs = hosts.folder / "ours", hosts.folder / "theirs"
    stranger = (theirs / "tokenizer" / "keys.toml").read_text()
    server = next(
        line
        for line in (ours / "tokenizer" / "keys.toml").read_text().splitlines()
        if line.startswith("scheduler")
    )
    lines = [server if line.startswith("scheduler") else line for line in stranger.splitlines()]
    (theirs / "tokenizer" / "keys.toml").write_text("\n".join(lines))
    listener, dialer = hosts.listener("ours"), hosts.dialer("theirs")
    text, events = refusal(caplog, listener, dialer)
    assert events == []
    assert "scheduler-0: refused a link from 127.0.0.1: its key is not on the allow-list" in text
    assert text.count("refused a link from") == 1  # not once a try
    assert f"tokenizer-0: no link with {hosts.address}: our key is not on its allow-list" in text


def test_a_wrong_server_key_is_noticed(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    text, events = refusal(caplog, hosts.listener("ours"), hosts.dialer("theirs"))
    assert events == []
    assert "it has another key than links.keys says" in text
    assert "scheduler-0: failed handshake" in text


def test_no_key_is_refused(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    dialer = hosts.dialer("ours", keys=False)
    text, events = refusal(caplog, hosts.listener("ours"), dialer)
    assert events == []
    assert "it encrypts its links and this side has no links.keys" in text
    assert "does not encrypt" in text


def test_a_dialler_with_keys_talks_to_no_plain_listener(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    listener, dialer = hosts.listener("ours", keys=False), hosts.dialer("ours")
    with caplog.at_level(logging.WARNING), inbox_of(listener, dialer) as inbox:
        events = wait(inbox, lambda _: dialer.counters["failed_handshakes"] >= 2)
    assert events == []
    assert "it does not encrypt its links" in caplog.text


def test_a_key_stands_for_its_service(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has the tokenizer's key cannot pass for an executor."""
    config = hosts.config("ours")
    as_tokenizer = Identity.new("tokenizer", "executor-0-0", config)
    liar = as_tokenizer._replace(service="executor")
    listener, dialer = hosts.listener("ours"), Dialer(hosts.address, liar, config.links)
    with caplog.at_level(logging.WARNING), inbox_of(listener, dialer) as inbox:
        events = wait(inbox, lambda _: bool(dialer.refused_reason))
    assert events == []
    assert dialer.refused_reason == "a executor with the key of a tokenizer"


def test_only_services_that_dial_it_get_in(hosts: Hosts) -> None:
    """A gateway has a key of the mesh, but no business with a scheduler."""
    with pytest.raises(KeysError, match="no service there that a gateway dials"):
        hosts.dialer("ours", "gateway")


def test_garbage_on_the_port_is_harmless(hosts: Hosts) -> None:
    listener, dialer = hosts.listener("ours"), hosts.dialer("ours")
    port = int(hosts.address.rpartition(":")[2])
    with inbox_of(listener, dialer) as inbox:
        wait(inbox, both_up)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 4096, bytes(64), b""):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            with stranger, contextlib.suppress(OSError):  # it may hang up at any point
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass
        assert dialer.send(m.Cancel(RID))
        events = wait(inbox, bool)
        assert [type(event) for event in events] == [Mail]


def test_a_raw_client_without_a_listed_key_reaches_no_one(hosts: Hosts) -> None:
    """What a foreign program does that knows the server's key, and makes a key of its own."""
    listener = hosts.listener("ours")
    assert listener._keys is not None
    public, secret = zmq.curve_keypair()
    with inbox_of(listener) as inbox, zmq.Context.instance().socket(zmq.DEALER) as raw:
        raw.curve_publickey, raw.curve_secretkey = public, secret
        raw.setsockopt(zmq.CURVE_SERVERKEY, listener._keys.public)
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(hosts.address)
        with contextlib.suppress(zmq.Again):  # refused already
            raw.send(b"hello", zmq.NOBLOCK)
        events = wait(inbox, lambda _: bool(listener.counters["failed_handshakes"]))
        assert events == []
        assert listener.counters["bad_frames"] == 0  # nothing of it came through


def test_a_listener_that_is_put_right_is_reached_again(hosts: Hosts) -> None:
    wrong, dialer = hosts.listener("theirs"), hosts.dialer("ours")
    with inbox_of(dialer) as inbox:
        inbox.add(wrong)
        wait(inbox, lambda _: bool(dialer.counters["failed_handshakes"]))
        inbox.endpoints.remove(wrong)
        wrong.close()
        right = hosts.listener("ours")
        inbox.add(right)
        wait(inbox, both_up)


def test_keys_are_replaced_one_process_at_a_time(hosts: Hosts) -> None:
    """The documented order: new files everywhere, the others restart, then the service itself."""
    ours = hosts.folder / "ours"
    old_listener, old_dialer = hosts.listener("ours"), hosts.dialer("ours")
    make_keys(ours, rotate=["scheduler", "tokenizer"])
    new_dialer = hosts.dialer("ours", "executor")  # knows both keys of the scheduler
    with inbox_of(old_listener, old_dialer, new_dialer) as inbox:
        wait(inbox, lambda events: sum(isinstance(e, PeerUp) for e in events) == 4)
        assert {*old_listener.peers} == {"tokenizer-0", "executor-0"}
    with inbox_of(hosts.listener("ours"), hosts.dialer("ours")) as inbox:
        wait(inbox, both_up)  # both have new keys
    make_keys(ours, retire=True)
    with inbox_of(hosts.listener("ours"), hosts.dialer("ours")) as inbox:
        wait(inbox, both_up)


def test_an_asyncio_service_is_as_strict(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[str]:
        done = asyncio.Event()
        names: list[str] = []

        def on_event(endpoint: Listener | Dialer, event: LinkEvent) -> None:
            match event:
                case PeerUp() if endpoint is good:
                    good.send(m.Cancel(RID))
                case PeerUp() if isinstance(endpoint, Listener):
                    names.append(event.peer.name)
                case Mail():
                    names.append(type(event.message).__name__)
                    if bad.counters["failed_handshakes"]:
                        done.set()
                    else:
                        loop.call_later(0.1, good.send, m.Cancel(RID))
                case PeerDown() | PeerUp():
                    names.append(f"unexpected {event}")

        loop = asyncio.get_running_loop()
        inbox = AsyncInbox(on_event)
        good, bad = hosts.dialer("ours"), hosts.dialer("theirs")
        for endpoint in (hosts.listener("ours"), good, bad):
            inbox.add(endpoint)
        inbox.start(loop)
        try:
            await asyncio.wait_for(done.wait(), PATIENCE_S)
        finally:
            inbox.close()
        return names

    names = asyncio.run(scenario())
    assert names[0] == "tokenizer-0"
    assert set(names) == {"tokenizer-0", "Cancel"}


def test_plain_tcp_stays_on_this_machine() -> None:
    links = load_config(None).links
    me = Identity.new("scheduler", "s")
    for address in ("tcp://0.0.0.0:7100", "tcp://*:7100", "tcp://10.0.0.1:7100", "tcp://host:1"):
        with pytest.raises(ValueError, match="plain tcp is allowed on loopback only"):
            Listener(address, me, links)
        with pytest.raises(ValueError, match="plain tcp is allowed on loopback only"):
            Dialer(address, me, links)
    listener = Listener("tcp://localhost:*", me, links)
    assert listener.address.startswith("tcp://127.0.0.1:")
    listener.close()


def test_a_name_is_followed_to_its_host(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    hosts.address = f"tcp://LOCALHOST:{free_port()}"  # looked up, unlike "localhost"
    dialer = hosts.dialer("ours")
    assert dialer.receive() == []
    listener = hosts.listener("ours")
    with inbox_of(listener, dialer) as inbox:
        wait(inbox, both_up)
    hosts.address = "tcp://no-such-host.invalid:7000"
    with caplog.at_level(logging.WARNING), inbox_of(hosts.dialer("ours")) as inbox:
        wait(inbox, lambda _: "no-such-host.invalid" in caplog.text)


def test_a_listener_binds_where_it_is_told(hosts: Hosts) -> None:
    hosts.address = f"tcp://mesh-host-that-is-not-there:{free_port()}"
    path = hosts.folder / "bound.toml"
    path.write_text(
        f'[scheduler]\naddress = "{hosts.address}"\n[links]\nkeys = "ours"\nbind = "0.0.0.0"\n'
    )
    config = load_config(path)
    me = Identity.new("scheduler", "scheduler-0", config)
    listener = Listener(config.scheduler_address(0), me, config.links)
    assert listener.address == hosts.address.replace("mesh-host-that-is-not-there", "0.0.0.0")
    listener.close()


def test_the_last_closed_listener_ends_the_thread_of_the_door(hosts: Hosts) -> None:
    import threading

    def doors() -> int:
        return sum(thread.name == "zap" for thread in threading.enumerate())

    assert doors() == 0
    first = hosts.listener("ours")
    hosts.address = f"tcp://127.0.0.1:{free_port()}"
    second = hosts.listener("ours")
    assert doors() == 1
    first.close()
    assert doors() == 1
    second.close()
    assert doors() == 0
