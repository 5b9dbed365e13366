"""`docker compose up`, for real: images, a healthy mesh, and what each container has and has not.

Starts from nothing: an engine of its own, a base image out of Debian packages. Leaves nothing.
"""

import json
import tomllib

import pytest
import zmq

from deepmesh import __version__
from deepmesh.client import Client, ClientError
from deepmesh.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR
from tests.system.conftest import KEY
from tests.system.containers import EXECUTORS, SERVICES, ComposeMesh
from tests.system.engine import TAG, TARGETS, Engine

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

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


def test_a_chat_streams_through_the_published_port(mesh: ComposeMesh) -> None:
    fields: dict[str, object] = {
        "model": "tiny",
        "temperature": 0,
        "thinking": {"type": "disabled"},
    }
    question: list[dict[str, object]] = [{"role": "user", "content": "What is 417 + 256?"}]
    with Client(mesh.url, api_key=KEY, timeout_s=60) as client:
        events = list(client.stream_chat(question, fields))
    assert "".join(event.text for event in events if event.kind == "text") == "673"
    assert events[-1].kind == "finish"
    assert len(events) > 2
    with Client(mesh.url, timeout_s=60) as stranger, pytest.raises(ClientError, match="no API key"):
        list(stranger.stream_chat(question, fields))


def test_images_hold_their_own_service_and_say_what_they_are(engine: Engine) -> None:
    """Also that nothing which a service imports is missing: every module of it is imported."""
    script = (
        "import importlib, importlib.util as u, pkgutil, services;"
        "names = [m.name for m in pkgutil.iter_modules(services.__path__)];"
        "[importlib.import_module(m.name) for name in names if name != 'executor'"
        " for m in pkgutil.walk_packages([services.__path__[0] + '/' + name], f'services.{name}.')"
        " if not m.name.endswith('__main__')];"
        "print(names, u.find_spec('torch') is not None, u.find_spec('kernels') is not None)"
    )
    labels = "{{json .Config.Labels}}"
    for target in TARGETS[:-2]:
        image = f"deepmesh/{target}:{TAG}"
        argv = ["run", "--rm", "--network", "none", "--entrypoint", "python3", image]
        assert engine.docker(*argv, "-c", script).strip() == f"['{target}'] False False"
    for target in TARGETS:
        said = json.loads(engine.docker("inspect", "-f", labels, f"deepmesh/{target}:{TAG}"))
        assert said["org.opencontainers.image.version"] == __version__
        assert said["deepmesh.wire"] == f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"


def test_only_the_gateways_port_is_published(mesh: ComposeMesh) -> None:
    published = {
        service: [
            (port, at[0]["HostIp"])
            for port, at in mesh.inspect(service)["NetworkSettings"]["Ports"].items()  # type: ignore[index]
            if at
        ]
        for service in (*SERVICES, "redis")
    }
    assert published.pop("gateway-0") == [("8000/tcp", "127.0.0.1")]
    assert not any(published.values())


def test_containers_run_with_little(mesh: ComposeMesh) -> None:
    """No root, no capability, nothing of the image can be written to."""
    for service in (*SERVICES, "redis"):
        script = "id -u; grep CapEff /proc/self/status; touch /x /opt/deepmesh/x 2>&1; echo $?"
        out = mesh.shell(service, script)
        assert out.startswith("10001\n"), out
        assert "CapEff:\t0000000000000000" in out
        assert out.count("Read-only file system") >= (1 if service == "redis" else 2)
        limits: dict[str, int] = mesh.inspect(service)["HostConfig"]  # type: ignore[assignment]
        assert limits["PidsLimit"] == 2048
        is_sized = not service.startswith(("executor", "kvstore"))  # theirs is the operator's
        assert limits["Memory"] == ((1 if service == "redis" else 4) << 30 if is_sized else 0)


def test_each_container_sees_its_own_keys_and_no_others(mesh: ComposeMesh) -> None:
    for service in SERVICES:
        kind = service.partition("-")[0]
        found = mesh.shell(service, "find /keys -type f -exec stat -c '%a %n' {} +").splitlines()
        assert found == [f"600 /keys/{kind}/keys.toml"]
        secrets = mesh.shell(service, "ls /run/secrets 2>/dev/null || true").split()
        assert secrets == (["api_keys"] if kind == "gateway" else [])


def test_mapped_files_are_shared_by_kvstore_and_executors_alone(mesh: ComposeMesh) -> None:
    for service in SERVICES:
        shared = bool(mesh.shell(service, "ls /shm/deepmesh").strip())
        assert shared is service.startswith(("kvstore", "executor")), service


def test_loading_is_seen_in_the_logs(mesh: ComposeMesh) -> None:
    for executor in EXECUTORS:
        log = mesh.logs(executor, 200)
        assert "loading: " in log, log
        assert " loaded in " in log, log


def test_who_has_no_listed_key_gets_nowhere_in_the_network(mesh: ComposeMesh) -> None:
    """Asked from inside a container of the mesh, by one who knows all public keys."""
    text = mesh.shell("gateway-0", "cat /keys/gateway/keys.toml")
    file = tomllib.loads(text)
    public = {name: keys[0] for name, keys in file["public"].items()}
    own_public, own_secret = (key.decode() for key in zmq.curve_keypair())
    gateways = (public["gateway"], file["secret"])
    knocks = [
        ("tcp://tokenizer:7000", public["tokenizer"], *gateways),  # whose business it is
        ("tcp://tokenizer:7000", public["tokenizer"], own_public, own_secret),
        ("tcp://scheduler-0:7200", public["scheduler"], *gateways),
        ("tcp://kvstore-0:7300", public["kvstore"], own_public, own_secret),
        ("tcp://router-0:7100", "", "", ""),  # no encryption
    ]
    out = mesh.python("router-0", KNOCK, json.dumps(knocks)).split()
    refused = "HANDSHAKE_FAILED_AUTH"
    assert out[:-1] == ["HANDSHAKE_SUCCEEDED", refused, refused, refused]
    assert out[-1] in ("HANDSHAKE_FAILED_PROTOCOL", "HANDSHAKE_FAILED_NO_DETAIL")
    assert "its key is not on the allow-list" in mesh.logs("kvstore-0", 200)
