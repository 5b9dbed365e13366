"""The gateway over real sockets: routes, keys, ids, limits, errors in the caller's shape."""

import hashlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from deepmesh.wire.messages import ErrorCode, Submit
from services.gateway.errors import CODE_NAME, HTTP_STATUS
from tests.services.gateway_harness import PATIENCE_S, Mesh, error_of, running_mesh, until

POSTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("http"), max_body_bytes=1 << 20) as mesh:
        yield mesh


@pytest.mark.parametrize(("path", "protocol"), POSTS.items())
def test_a_body_goes_to_the_tokenizer_as_it_came_and_the_answer_back(
    mesh: Mesh, path: str, protocol: str
) -> None:
    body = b'{"not even": json \xff'

    client = mesh.post(path, body)
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b'{"fine": true}')
    response = client.getresponse()

    assert (submit.protocol, submit.body, submit.next_event) == (protocol, body, 0)
    assert len(submit.rid) == 16
    assert 0 <= submit.seed < 2**63
    assert submit.created_s > 1_700_000_000
    assert response.status == 200
    assert response.getheader("content-type") == "application/json"
    assert response.read() == b'{"fine": true}'


def test_models_are_forwarded_too(mesh: Mesh) -> None:
    client = mesh.client()
    for path, body in (("/v1/models", b""), ("/v1/models/org/tiny", b'{"id":"org/tiny"}')):
        client.request("GET", path)
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.answer(submit, b"{}")
        response = client.getresponse()
        assert (submit.protocol, submit.body) == ("models", body)
        assert (response.status, response.read()) == (200, b"{}")


def test_each_request_has_a_rid_and_a_seed_of_its_own(mesh: Mesh) -> None:
    seen: list[Submit] = []
    client = mesh.client()
    for _ in range(3):
        client.request("POST", "/v1/completions", b"{}")
        seen.append(mesh.tokenizer.expect(Submit))
        mesh.tokenizer.answer(seen[-1], b"{}")
        client.getresponse().read()

    assert len({submit.rid for submit in seen}) == 3
    assert len({submit.seed for submit in seen}) == 3


@pytest.mark.parametrize("path", ["/nowhere", "/v1/embeddings", "/v1/chat/completions/"])
def test_unknown_routes_are_404_in_the_error_shape(mesh: Mesh, path: str) -> None:
    response = mesh.post(path).getresponse()

    assert response.status == 404
    assert error_of(response)["code"] == "unknown_route"


def test_wrong_methods_are_405_and_name_the_right_one(mesh: Mesh) -> None:
    client = mesh.client()
    client.request("GET", "/v1/chat/completions")
    response = client.getresponse()

    assert response.status == 405
    assert response.getheader("allow") == "POST, OPTIONS"
    assert "POST" in str(error_of(response)["message"])


def test_options_and_head(mesh: Mesh) -> None:
    options, _ = mesh.get("/v1/messages", method="OPTIONS")
    head, body = mesh.get("/health", method="HEAD")

    assert (options.status, options.getheader("allow")) == (204, "POST, OPTIONS")
    assert (head.status, body) == (200, b"")


def test_health_and_version_need_no_tokenizer(tmp_path: Path) -> None:
    with running_mesh(tmp_path, api_keys=["0" * 64]) as mesh:
        for path in ("/health", "/version", "/metrics", "/load", "/ping"):
            response, _ = mesh.get(path)
            assert response.status == 200, path


def connection(mesh: Mesh) -> socket.socket:
    return socket.create_connection(("127.0.0.1", mesh.server.port), PATIENCE_S)


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"Authorization": "Basic a"}],
)
def test_without_a_known_key_it_is_401_in_each_shape(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    with running_mesh(tmp_path, api_keys=[hashlib.sha256(b"secret").hexdigest()]) as mesh:
        openai = mesh.post("/v1/chat/completions", headers=headers).getresponse()
        anthropic = mesh.post("/v1/messages", headers=headers).getresponse()
        models, _ = mesh.get("/v1/models", headers)

        assert openai.status == anthropic.status == models.status == 401
        assert error_of(openai)["code"] == "invalid_api_key"
        body = json.loads(anthropic.read())
        assert body["type"] == "error"
        assert body["error"]["type"] == "authentication_error"
        assert body["request_id"] == anthropic.getheader("request-id")
        assert not mesh.tokenizer.has_mail


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer second"},
        {"authorization": "bearer second"},
        {"x-api-key": "second"},
    ],
)
def test_any_of_several_keys_opens(tmp_path: Path, headers: dict[str, str]) -> None:
    digests = [hashlib.sha256(key).hexdigest() for key in (b"first", b"second")]
    with running_mesh(tmp_path, api_keys=digests) as mesh:
        client = mesh.post(headers=headers)
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.answer(submit, b"{}")

        assert client.getresponse().status == 200
        assert submit.api_key_hash == digests[1]


def test_keys_do_not_share_the_prefix_cache(tmp_path: Path) -> None:
    keys = ("first", "second", "first")
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys[:2]]
    with running_mesh(tmp_path, api_keys=digests) as mesh:
        salts: list[bytes] = []
        for key in keys:
            client = mesh.post(headers={"x-api-key": key})
            submit = mesh.tokenizer.expect(Submit)
            mesh.tokenizer.answer(submit, b"{}")
            client.getresponse()
            salts.append(submit.tenant_salt)
        assert salts[0] == salts[2] != salts[1]
        assert all(salts)
        assert not any(salt.hex() in digest for salt in salts for digest in digests)


def test_without_keys_all_share_the_prefix_cache(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b"{}")
    client.getresponse()
    assert submit.tenant_salt == b""


# ---------------------------------------------------------------- ids


def test_the_clients_request_id_comes_back_on_every_answer(mesh: Mesh) -> None:
    for path in ("/health", "/nowhere", "/ready"):
        response, _ = mesh.get(path, {"X-Request-Id": "my.id-1"})
        assert response.getheader("x-request-id") == "my.id-1"


@pytest.mark.parametrize("bad", ["with space", "x" * 129, "", 'quote"', "ümlaut"])
def test_a_bad_request_id_is_replaced(mesh: Mesh, bad: str) -> None:
    response, _ = mesh.get("/health", {"X-Request-Id": bad.encode()})  # type: ignore[dict-item]

    assert re.fullmatch("req_[0-9a-f]{32}", response.getheader("x-request-id") or "")


def test_anthropic_routes_carry_request_id_under_their_own_name(mesh: Mesh) -> None:
    client = mesh.post("/v1/messages", headers={"x-request-id": "abc"})
    mesh.tokenizer.answer(mesh.tokenizer.expect(Submit), b"{}")
    response = client.getresponse()

    assert response.getheader("request-id") == response.getheader("x-request-id") == "abc"


@pytest.mark.parametrize("upper", [False, True])
def test_an_inbound_traceparent_is_continued(mesh: Mesh, upper: bool) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    header = f"00-{trace_id}-b7ad6b7169203331-01"
    client = mesh.post(headers={"traceparent": header.upper() if upper else header})
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b"{}")
    response = client.getresponse()

    assert submit.traceparent.split("-")[1] == trace_id == response.getheader("x-trace-id")
    assert submit.traceparent != header  # the gateway's own span is in between


def test_an_unsampled_trace_stays_unsampled(mesh: Mesh) -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    client = mesh.post(headers={"traceparent": header})
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b"{}")

    assert (submit.traceparent[:36], submit.traceparent[-3:]) == (header[:36], "-00")
    assert client.getresponse().getheader("x-trace-id") is None


@pytest.mark.parametrize("header", [None, "garbage", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_without_a_valid_traceparent_one_is_made(mesh: Mesh, header: str | None) -> None:
    client = mesh.post(headers={"traceparent": header} if header else {})
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b"{}")
    client.getresponse()

    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", submit.traceparent)
    assert "0" * 32 not in submit.traceparent


# ---------------------------------------------------------------- limits


def test_a_10_mb_body_is_413_and_the_client_sees_it(mesh: Mesh) -> None:
    response = mesh.post(body=bytes(10 << 20)).getresponse()

    assert response.status == 413
    assert error_of(response)["code"] == "request_too_large"
    assert not mesh.tokenizer.has_mail


def test_413_comes_before_the_body_when_its_length_is_announced(mesh: Mesh) -> None:
    with connection(mesh) as raw:
        raw.sendall(
            b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n"
            b"expect: 100-continue\r\n\r\n"
        )
        response = http.client.HTTPResponse(raw)
        response.begin()

        assert response.status == 413
        assert json.loads(response.read())["error"]["type"] == "request_too_large"


def test_a_chunked_body_is_413_as_soon_as_it_is_too_large(mesh: Mesh) -> None:
    with connection(mesh) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(17):  # 17 x 64 KiB > 1 MiB, and no last chunk
            raw.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
        response = http.client.HTTPResponse(raw)
        response.begin()

        assert response.status == 413
        assert error_of(response)["type"] == "invalid_request_error"


def test_a_body_of_just_the_limit_passes(mesh: Mesh) -> None:
    client = mesh.post(body=bytes(1 << 20))
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b"{}")

    assert client.getresponse().status == 200
    assert len(submit.body) == 1 << 20


def test_chunked_bodies_are_put_together(mesh: Mesh) -> None:
    client = mesh.client()
    client.request("POST", "/v1/completions", iter([b"ab", b"cd"]), encode_chunked=True)
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.answer(submit, b"{}")
    client.getresponse()

    assert submit.body == b"abcd"


def test_endless_headers_are_refused(mesh: Mesh) -> None:
    with connection(mesh) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            _send_for_ever(raw)


def _send_for_ever(raw: socket.socket) -> None:
    while True:
        raw.sendall(b"a" * 4096)


def test_a_body_that_stalls_is_408(tmp_path: Path) -> None:
    with running_mesh(tmp_path, idle_s=0.5) as mesh, connection(mesh) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
        response = http.client.HTTPResponse(raw)
        response.begin()

        assert response.status == 408
        assert error_of(response)["code"] == "body_timeout"


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nx: "])
def test_headers_that_stall_end_the_connection(tmp_path: Path, begun: bytes) -> None:
    with running_mesh(tmp_path, idle_s=0.2) as mesh, connection(mesh) as raw:
        raw.sendall(begun)

        assert raw.recv(1) == b""


def test_the_time_for_headers_is_not_the_time_of_the_answer(tmp_path: Path) -> None:
    with running_mesh(tmp_path, idle_s=0.5, keepalive_s=0.8) as mesh:
        client = mesh.post()
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.admit(submit)
        response = client.getresponse()
        assert response.read(8) == b": ping\n\n"  # later than idle_s
        mesh.tokenizer.finish(submit, 0, b"data: x\n\n")

        assert response.read().endswith(b"data: x\n\n")


def test_compressed_bodies_are_415(mesh: Mesh) -> None:
    response = mesh.post(headers={"content-encoding": "gzip"}).getresponse()

    assert response.status == 415
    assert error_of(response)["param"] == "content-encoding"


def test_beyond_max_requests_it_is_429_with_retry_after(tmp_path: Path) -> None:
    with running_mesh(tmp_path, max_requests=2) as mesh:
        first, second = mesh.post(), mesh.post()
        submits = [mesh.tokenizer.expect(Submit) for _ in range(2)]
        refused = mesh.post().getresponse()

        assert refused.status == 429
        assert int(refused.getheader("retry-after") or 0) >= 1
        assert error_of(refused)["type"] == "rate_limit_error"

        for submit in submits:
            mesh.tokenizer.answer(submit, b"{}")
        assert first.getresponse().status == second.getresponse().status == 200
        third = mesh.post()  # places are free again
        mesh.tokenizer.answer(mesh.tokenizer.expect(Submit), b"{}")
        assert third.getresponse().status == 200


def test_a_client_that_hangs_up_within_its_body_holds_no_place(tmp_path: Path) -> None:
    with running_mesh(tmp_path, max_requests=1) as mesh:
        with connection(mesh) as raw:
            raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
        inside = {"content-encoding": "gzip"}  # refused, but only once it has a place
        until(lambda: mesh.post(headers=inside).getresponse().status == 415)


# ---------------------------------------------------------------- failures behind the gateway


@pytest.mark.parametrize(
    ("code", "status", "openai", "anthropic"),
    [
        (ErrorCode.INVALID, 400, "invalid_request_error", "invalid_request_error"),
        (ErrorCode.TOO_LONG, 400, "invalid_request_error", "invalid_request_error"),
        (ErrorCode.UNKNOWN_MODEL, 404, "invalid_request_error", "not_found_error"),
        (ErrorCode.OVERLOADED, 429, "rate_limit_error", "rate_limit_error"),
        (ErrorCode.DEADLINE, 503, "overloaded_error", "overloaded_error"),
        (ErrorCode.ENGINE_RESTARTED, 503, "overloaded_error", "overloaded_error"),
        (ErrorCode.ENGINE_ERROR, 500, "server_error", "api_error"),
        (ErrorCode.INTERNAL, 500, "server_error", "api_error"),
    ],
)
def test_failures_keep_their_status_in_both_shapes(
    mesh: Mesh, code: ErrorCode, status: int, openai: str, anthropic: str
) -> None:
    theirs = {"/v1/chat/completions": openai, "/v1/responses": openai, "/v1/messages": anthropic}
    for path, kind in theirs.items():
        client = mesh.post(path)
        mesh.tokenizer.fail(mesh.tokenizer.expect(Submit), code, "the text", "max_tokens")
        response = client.getresponse()
        body = json.loads(response.read())

        assert response.status == status
        assert body["error"]["type"] == kind
        assert "the text" in body["error"]["message"]
        assert body["error"].get("param", "max_tokens") == "max_tokens"
        assert "max_tokens" in json.dumps(body)  # the field is named in either shape
        assert (response.getheader("retry-after") is not None) == (status in (429, 503))


def test_every_error_code_has_a_status() -> None:
    assert set(HTTP_STATUS) == set(CODE_NAME) == set(ErrorCode)


def test_a_body_that_is_not_kept_takes_no_memory_while_it_is_answered(tmp_path: Path) -> None:
    with running_mesh(tmp_path, resume_bytes=0, max_body_bytes=8 << 20) as mesh:
        clients: list[http.client.HTTPConnection] = []
        submits: list[Submit] = []
        before = rss_bytes()
        for _ in range(20):
            clients.append(mesh.post(body=bytes(8 << 20)))
            submit = mesh.tokenizer.expect(Submit)
            submits.append(msgspec.structs.replace(submit, body=b""))
        grown = rss_bytes() - before

        assert grown < 80 << 20  # 160 MiB have passed through
        for client, submit in zip(clients, submits, strict=True):
            mesh.tokenizer.answer(submit, b"{}")
            assert client.getresponse().status == 200


def rss_bytes() -> int:
    return psutil.Process().memory_info().rss
