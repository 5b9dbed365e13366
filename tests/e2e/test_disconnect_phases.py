"""A client that hangs up, whatever its request is doing then, costs a few steps at most."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deepmesh.supervisor import Mesh
from tests.e2e.conftest import MODEL_FOLDER, RunningMesh

pytestmark = pytest.mark.alone  # steps are counted that pass meanwhile

STEP_MS = 20
SLOW = f"""
[mesh]
name = "phases"
run_dir = "RUN_DIR"
model = "{MODEL_FOLDER}"
[links]
heartbeat_s = 0.05
timeout_s = 5.0
[gateway]
port = 0
[scheduler]
audit = true
max_rows = 1
chunk_tokens = 128
step_tokens = 128
[executor]
kind = "fake"
fake_step_ms = {STEP_MS}
fake_mask_ms = 0.1
"""
HELLO = [{"role": "user", "content": "Hello"}]
LONG = {"max_tokens": 3000, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PREFILL: dict[str, object] = {"prompt": [9] * 7000, "max_tokens": 1000, "ignore_eos": True}
CHAT = ("/v1/chat/completions", {"messages": HELLO, **LONG})
PHASES: dict[str, tuple[str, dict[str, object]]] = {
    "decode": (CHAT[0], {**CHAT[1], "stream": True}),
    "decode, several choices": (CHAT[0], {**CHAT[1], "stream": True, "n": 3}),
    "decode, plain": CHAT,
    "decode, with tools": (
        CHAT[0],
        {"messages": HELLO, "max_tokens": 3000, "stream": True, "tools": [TOOL]},
    ),
    "decode, responses": ("/v1/responses", {"input": "x", "stream": True, "ignore_eos": True}),
    "decode, messages": ("/v1/messages", {"messages": HELLO, "stream": True, **LONG}),
    "prefill": ("/v1/completions", {**PREFILL, "stream": True}),
    "prefill, plain": ("/v1/completions", PREFILL),
}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One request at a time, and each step takes its time."""
    folder = tmp_path_factory.mktemp("s")
    path = folder / "mesh.toml"
    path.write_text(SLOW.replace("RUN_DIR", str(folder / "run")))
    with Mesh(Path(path)) as mesh:
        yield RunningMesh(mesh, path)


def begin(mesh: RunningMesh, path: str, body: dict[str, object]) -> socket.socket:
    """Send a request on a bare socket, and read nothing."""
    url = urlsplit(mesh.url)
    data = json.dumps({"model": mesh.model, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((url.hostname, url.port), timeout=20)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("phase", sorted(PHASES))
def test_a_request_that_runs_ends_with_its_connection(slow: RunningMesh, phase: str) -> None:
    slow.wait_idle()
    path, body = PHASES[phase]
    connection = begin(slow, path, body)
    if phase.startswith("decode") and body.get("stream"):
        assert b"200 OK" in connection.recv(4096)
    slow.wait_total("deepmesh_requests_running", 1)
    steps = slow.total("deepmesh_steps_total")
    connection.close()
    slow.wait_total("deepmesh_requests_running", 0)
    slow.wait_total("deepmesh_requests_waiting", 0)
    took = slow.total("deepmesh_steps_total") - steps
    assert took * STEP_MS <= 1500, f"{took} steps"  # heartbeats and scrapes included
    slow.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_leaves_the_queue(slow: RunningMesh, stream: bool) -> None:
    slow.wait_idle()
    first = begin(slow, CHAT[0], {**CHAT[1], "stream": True})
    slow.wait_total("deepmesh_requests_running", 1)
    second = begin(slow, CHAT[0], {**CHAT[1], "stream": stream, "n": 2})
    slow.wait_total("deepmesh_requests_waiting", 2)
    second.close()
    slow.wait_total("deepmesh_requests_waiting", 0)
    assert slow.total("deepmesh_requests_running") == 1
    first.close()
    slow.wait_idle()


def test_nobody_is_left(slow: RunningMesh) -> None:
    """Runs last in this file."""
    slow.wait_idle()
    slow.wait_total("deepmesh_streams_running", 0)
