"""The admin port: drain, flush, log level; only for who has an admin key."""

import hashlib
import http.client
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from deepmesh.config import ConfigError, load_config
from deepmesh.wire.messages import FlushCache, SetLogLevel, Submit
from tests.services.gateway_harness import PATIENCE_S, Mesh, error_of, running_mesh, until

KEY = "operator"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with running_mesh(tmp_path, admin_port=0, admin_keys=[DIGEST], api_keys=[]) as made:
        yield made


def call(
    mesh: Mesh, method: str, path: str, body: object = None, key: str = KEY
) -> tuple[int, dict[str, Any]]:
    url = urlsplit(mesh.server.gateway.admin_url)
    client = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
    try:
        data = json.dumps(body).encode() if body is not None else None
        client.request(method, path, data, {"Authorization": f"Bearer {key}"})
        response = client.getresponse()
        return response.status, json.loads(response.read())
    finally:
        client.close()


@pytest.mark.parametrize("key", ["", "wrong", DIGEST])
def test_nothing_without_an_admin_key(mesh: Mesh, key: str) -> None:
    for method, path in (("GET", "/admin/status"), ("POST", "/admin/drain")):
        assert call(mesh, method, path, key=key)[0] == 401
    assert mesh.get("/health")[0].status == 200
    assert mesh.get("/admin/status", {"Authorization": f"Bearer {KEY}"})[0].status == 404


def test_a_drained_gateway_ends_what_runs_and_takes_nothing_new(mesh: Mesh) -> None:
    running = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    status, state = call(mesh, "POST", "/admin/drain")
    assert (status, state["draining"], state["open_requests"]) == (200, True, 1)
    refused = mesh.post().getresponse()
    assert refused.status == 503
    assert refused.getheader("retry-after")
    assert error_of(refused)["code"] == "draining"
    assert mesh.get("/ready")[0].status == 503
    assert mesh.get("/health")[0].status == 200
    mesh.tokenizer.answer(submit, b"{}")
    assert running.getresponse().status == 200
    assert call(mesh, "POST", "/admin/resume")[1]["draining"] is False
    again = mesh.post()
    mesh.tokenizer.answer(mesh.tokenizer.expect(Submit), b"{}")
    assert again.getresponse().status == 200


def test_orders_go_to_the_tokenizers(mesh: Mesh) -> None:
    assert call(mesh, "POST", "/admin/flush_cache") == (200, {"flushed": True})
    mesh.tokenizer.expect(FlushCache)
    level = logging.getLogger().level
    try:
        status, told = call(mesh, "POST", "/admin/log_level", {"level": "error"})
        names = ["gateway-0", "tokenizer-0", "scheduler-0"]
        assert (status, told) == (200, {"level": "error", "told": names})
        assert mesh.tokenizer.expect(SetLogLevel).level == "error"
        assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(level)


def test_at_debug_each_request_says_where_it_went_and_how_it_ended(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="services.gateway")
    running = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b"{}")
    running.getresponse().read()
    rid = submit.rid.hex()[:12]
    until(lambda: any(text.startswith(rid) and "HTTP 200" in text for text in caplog.messages))
    assert f"{rid} -> tokenizer-0" in caplog.messages


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (None, "the body is empty"),
        ({}, "level"),
        ({"level": "loud"}, "'loud'"),
        ({"level": "info", "x": 1}, "`x`"),
        ([1], "object"),
    ],
)
def test_a_bad_level_is_named(mesh: Mesh, body: object, word: str) -> None:
    status, told = call(mesh, "POST", "/admin/log_level", body)
    assert (status, told["error"]["param"]) == (400, "level")
    assert word in told["error"]["message"]
    assert "debug, info, warning, error" in told["error"]["message"]
    assert not mesh.tokenizer.has_mail


def test_unknown_routes(mesh: Mesh) -> None:
    assert call(mesh, "GET", "/admin/nothing")[0] == 404
    assert call(mesh, "GET", "/admin/drain")[0] == 405


def test_state_names_the_replicas(mesh: Mesh) -> None:
    state = call(mesh, "GET", "/admin/status")[1]
    (replica,) = state["replicas"]
    assert (replica["name"], replica["ready"], replica["running"]) == ("scheduler-0", True, 2)


def test_the_admin_port_is_not_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[gateway]\nadmin_port = 0\n")
    with pytest.raises(ConfigError, match=r"gateway\.admin_keys"):
        load_config(path)
