"""`docker compose up`, for real: images, a healthy mesh, a chat, one container of each kind killed.

Starts from nothing: an engine of its own, a base image out of Debian packages. Leaves nothing.
"""

import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepmesh.client import Client
from tests.system.conftest import TIMES
from tests.system.containers import PROJECT, SERVICES, ComposeMesh
from tests.system.engine import Engine, build, make_base
from tests.system.streams import Load

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

BACK_S = 120.0
# As a stranger in the network sees it. Reads [[address, server key, public key, secret key]].
KNOCK = """
import json, sys, zmq
from zmq.utils.monitor import parse_monitor_message
for address, server, public, secret in json.load(sys.stdin):
    socket = zmq.Context.instance().socket(zmq.DEALER)
    if server:
        socket.curve_serverkey, socket.curve_publickey = server.encode(), public.encode()
        socket.curve_secretkey = secret.encode()
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    socket.connect(address)
    event = parse_monitor_message(monitor.recv_multipart())["event"] if monitor.poll(10_000) else ""
    print(getattr(event, "name", "silence"))
    socket.disable_monitor()
    socket.close(linger=0)
"""


@pytest.fixture(scope="module")
def times(pytestconfig: pytest.Config) -> dict[str, str]:
    return pytestconfig.stash[TIMES]


@contextmanager
def timed(times: dict[str, str], what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    times[what] = f"{time.monotonic() - began:.1f} s"


@pytest.fixture(scope="module")
def engine(times: dict[str, str]) -> Iterator[Engine]:
    # Not a folder of pytest's: other runs on this machine remove those of earlier ones.
    folder = Path(tempfile.mkdtemp(prefix="deepmesh-system-"))
    with timed(times, "engine started"):
        engine = Engine(folder)
    try:
        with timed(times, "base image"):
            make_base(engine)
        with timed(times, "image of the services"):
            build(engine, "services")
        with timed(times, "image of the executors"):
            build(engine, "executor", TORCH="", KERNEL_LEVELS=_kernel_level())
        yield engine
    finally:
        with timed(times, "engine stopped, all removed"):
            engine.close()
    assert not folder.exists()


def _kernel_level() -> str:
    """Of this machine: the shipped image has all."""
    from kernels import native

    return native.supported_levels()[0]


@pytest.fixture(scope="module")
def mesh(engine: Engine, times: dict[str, str]) -> Iterator[ComposeMesh]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mesh = ComposeMesh(engine, port)
    try:
        with timed(times, "11 containers up and healthy"):
            mesh.up()
        yield mesh
    finally:
        with timed(times, "down"):
            mesh.down()
    for kind, columns in (
        ("ps -a", "{{.Names}}"),
        ("network ls", "{{.Name}}"),
        ("volume ls", "{{.Name}}"),
    ):
        left = engine.docker(*kind.split(), "--format", columns).split()
        assert [name for name in left if PROJECT in name] == []


@pytest.fixture(scope="module")
def answers(mesh: ComposeMesh) -> list[str]:
    """What comes when nothing is killed."""
    return Load(mesh.url).run()


def test_a_chat_streams_through_the_published_port(mesh: ComposeMesh) -> None:
    fields: dict[str, object] = {
        "model": "tiny",
        "temperature": 0,
        "thinking": {"type": "disabled"},
    }
    with Client(mesh.url, timeout_s=60) as client:
        events = list(
            client.stream_chat([{"role": "user", "content": "What is 417 + 256?"}], fields)
        )
    assert "".join(event.text for event in events if event.kind == "text") == "673"
    assert events[-1].kind == "finish"
    assert len(events) > 2


def test_only_the_gateways_port_is_published(mesh: ComposeMesh) -> None:
    published = {
        service: [
            (port, at[0]["HostIp"])
            for port, at in mesh.inspect(service)["NetworkSettings"]["Ports"].items()  # type: ignore[index]
            if at
        ]
        for service in SERVICES
    }
    assert published.pop("gateway-0") == [("8000/tcp", "127.0.0.1")]
    assert not any(published.values())


def test_containers_run_with_little(mesh: ComposeMesh) -> None:
    """No root, no capability, nothing of the image can be written to."""
    for service in SERVICES:
        script = "id -u; grep CapEff /proc/self/status; touch /x /opt/deepmesh/x 2>&1; echo $?"
        out = mesh.shell(service, script)
        assert out.startswith("10001\n"), out
        assert "CapEff:\t0000000000000000" in out
        assert out.count("Read-only file system") == 2


def test_services_without_tensors_have_no_torch(mesh: ComposeMesh) -> None:
    script = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('zmq') is None)"
    for service in ("gateway-0", "tokenizer-0", "router-0", "scheduler-0", "kvstore-0"):
        assert mesh.python(service, script) == "None False\n"


def test_each_container_sees_its_own_keys_and_no_others(mesh: ComposeMesh) -> None:
    for service in SERVICES:
        kind = service.partition("-")[0]
        found = mesh.shell(service, "find /keys -type f -exec stat -c '%a %n' {} +").splitlines()
        assert found == [f"600 /keys/{kind}/keys.toml"]


def test_mapped_files_are_shared_by_kvstore_and_executors_alone(mesh: ComposeMesh) -> None:
    for service in SERVICES:
        shared = bool(mesh.shell(service, "ls /shm/deepmesh").strip())
        assert shared is service.startswith(("kvstore", "executor")), service


def test_who_has_no_listed_key_gets_nowhere_in_the_network(mesh: ComposeMesh) -> None:
    """Asked from inside a container of the mesh, by one who knows all public keys."""
    import tomllib

    import zmq

    text = mesh.shell("gateway-0", "cat /keys/gateway/keys.toml")
    file = tomllib.loads(text)
    public = {name: keys[0] for name, keys in file["public"].items()}
    own_public, own_secret = (key.decode() for key in zmq.curve_keypair())
    gateways = (public["gateway"], file["secret"])
    knocks = [
        ("tcp://tokenizer-0:7000", public["tokenizer"], *gateways),  # whose business it is
        ("tcp://tokenizer-0:7000", public["tokenizer"], own_public, own_secret),
        ("tcp://scheduler-0:7200", public["scheduler"], *gateways),
        ("tcp://kvstore-0:7300", public["kvstore"], own_public, own_secret),
        ("tcp://router-0:7100", "", "", ""),  # no encryption
    ]
    out = mesh.python("router-0", KNOCK, json.dumps(knocks)).split()
    refused = "HANDSHAKE_FAILED_AUTH"
    assert out[:-1] == ["HANDSHAKE_SUCCEEDED", refused, refused, refused]
    assert out[-1] in ("HANDSHAKE_FAILED_PROTOCOL", "HANDSHAKE_FAILED_NO_DETAIL")
    assert "its key is not on the allow-list" in mesh.logs("kvstore-0", 30)


def test_the_operator_holds_the_mesh_and_lets_it_go_on(
    mesh: ComposeMesh, answers: list[str]
) -> None:
    assert mesh.order("pause").split() == ["scheduler-0:", "paused", "scheduler-1:", "paused"]
    assert mesh.order("resume").split() == ["scheduler-0:", "resumed", "scheduler-1:", "resumed"]
    assert Load(mesh.url).run() == answers


@pytest.mark.parametrize(
    "service",
    ["tokenizer-0", "router-0", "scheduler-0", "executor-0-1", "kvstore-0", "gateway-0"],
)
def test_a_killed_container_loses_no_request_and_comes_back(
    mesh: ComposeMesh, answers: list[str], times: dict[str, str], service: str
) -> None:
    load, killed = Load(mesh.url), list[float]()

    def kill() -> None:
        if load.moving.wait(120):
            killed.append(mesh.kill(service))

    killer = threading.Thread(target=kill)
    killer.start()
    # A gateway holds its clients' connections: with it they go, and the clients ask again.
    texts = load.run(may_retry=service == "gateway-0")
    killer.join()
    assert texts == answers
    assert killed, "the streams were over before all of them moved"
    took = mesh.wait_healthy([service], since=killed[0], timeout_s=BACK_S)[service]
    assert mesh.inspect(service)["RestartCount"] == 1
    times[f"{service} killed"] = (
        f"healthy again after {took:.1f} s, longest gap of a stream {load.longest_gap_s:.1f} s"
        + (f", {load.retries} asked again" if load.retries else "")
    )


def test_the_mesh_is_whole_again(mesh: ComposeMesh, answers: list[str]) -> None:
    assert Load(mesh.url).run() == answers
