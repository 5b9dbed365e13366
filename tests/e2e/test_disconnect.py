"""A client that goes away gives its blocks back; one that does not read stalls nobody."""

import json
import socket
import time
from urllib.parse import urlsplit

import httpx

from tests.e2e.conftest import RunningMesh

LONG_TOKENS = 4000
PROMPT = "Once upon a time"
LONG = {"max_tokens": LONG_TOKENS, "ignore_eos": True, "temperature": 0, "prompt": PROMPT}


def open_request(mesh: RunningMesh, body: dict[str, object]) -> socket.socket:
    """POST to /v1/completions on a bare socket, and read nothing."""
    url = urlsplit(mesh.url)
    data = json.dumps({"model": mesh.model, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((url.hostname, url.port), timeout=20)
    connection.sendall(head.encode() + data)
    return connection


def test_killing_the_client_of_a_stream_frees_its_blocks(mesh: RunningMesh) -> None:
    mesh.wait_idle()
    before = mesh.total("deepmesh_output_tokens_total")
    connection = open_request(mesh, {**LONG, "stream": True})
    assert b"200 OK" in connection.recv(4096)
    mesh.wait_total("deepmesh_requests_running", 1)
    connection.close()
    mesh.wait_idle()
    assert mesh.total("deepmesh_output_tokens_total") - before < LONG_TOKENS / 2


def test_killing_the_client_of_a_plain_request_frees_its_blocks(mesh: RunningMesh) -> None:
    mesh.wait_idle()
    before = mesh.total("deepmesh_output_tokens_total")
    connection = open_request(mesh, LONG)
    mesh.wait_total("deepmesh_requests_running", 1)
    connection.close()
    mesh.wait_idle()
    assert mesh.total("deepmesh_output_tokens_total") - before < LONG_TOKENS / 2


def test_a_client_that_does_not_read_stalls_nobody(mesh: RunningMesh) -> None:
    deaf = open_request(mesh, {**LONG, "stream": True, "logprobs": 5})
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    mesh.wait_total("deepmesh_requests_running", 1)
    start = time.monotonic()
    answers = [
        httpx.post(
            mesh.url + "/v1/completions",
            json={"model": mesh.model, "prompt": "Two words", "max_tokens": 8},
            timeout=30,
        )
        for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert time.monotonic() - start < 20
    deaf.close()
    mesh.wait_total("deepmesh_requests_running", 0)
