"""Streams over real sockets: bytes, headers, pings, disconnects, slow clients, credits."""

import http.client
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepmesh.wire.messages import Cancel, Credit, ErrorCode, ResponseFinished, Submit
from services.gateway.streams import StreamLimits
from tests.services.gateway_harness import PATIENCE_S, Mesh, error_of, running_mesh, until

CREDIT_EVENTS = StreamLimits().credit_events


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("stream")) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def pinging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("ping"), keepalive_s=0.05) as mesh:
        yield mesh


def test_events_reach_the_client_one_by_one_and_byte_for_byte(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: one\n\n")
    response = client.getresponse()

    assert response.read(len(b"data: one\n\n")) == b"data: one\n\n"
    mesh.tokenizer.events(submit, 1, b"data: two\n\n", "data: \N{SNOWMAN}\n\n".encode())
    assert response.read(11) == b"data: two\n\n"
    mesh.tokenizer.finish(submit, 3, b"data: [DONE]\n\n")

    assert response.read() == "data: \N{SNOWMAN}\n\ndata: [DONE]\n\n".encode()
    assert response.status == 200
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert response.getheader("cache-control") == "no-cache"
    assert response.getheader("x-accel-buffering") == "no"
    assert response.getheader("x-request-id")


def test_a_stream_may_come_all_in_its_last_message(mesh: Mesh) -> None:
    client = mesh.post("/v1/responses")
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.finish(submit, 0, b"data: all\n\n")
    response = client.getresponse()

    assert response.getheader("content-type", "").startswith("text/event-stream")
    assert response.read() == b"data: all\n\n"


def test_headers_go_out_on_admission_before_any_event(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.admit(submit)

    response = client.getresponse()  # would wait for ever if headers waited for an event
    mesh.tokenizer.finish(submit, 0, b"data: x\n\n")
    assert (response.status, response.read()) == (200, b"data: x\n\n")


def test_the_connection_serves_the_next_request_after_a_stream(mesh: Mesh) -> None:
    client = mesh.client()
    for _ in range(2):
        client.request("POST", "/v1/completions", b"{}")
        mesh.tokenizer.finish(mesh.tokenizer.expect(Submit), 0, b"data: x\n\n")
        assert client.getresponse().read() == b"data: x\n\n"


def test_a_refusal_before_admission_is_a_real_status(mesh: Mesh) -> None:
    client = mesh.post()
    mesh.tokenizer.fail(
        mesh.tokenizer.expect(Submit), ErrorCode.TOO_LONG, "5000 tokens", "messages"
    )
    response = client.getresponse()

    assert response.status == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_nothing_follows_the_end(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh:
        client = mesh.post()
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.events(submit, 0, b"data: a\n\n")
        mesh.tokenizer.finish(submit, 1, b"data: b\n\n")
        mesh.tokenizer.finish(submit, 1, b"data: b\n\n")
        mesh.tokenizer.fail(submit, ErrorCode.INTERNAL)
        mesh.tokenizer.events(submit, 2, b"data: c\n\n")

        assert client.getresponse().read() == b"data: a\n\ndata: b\n\n"


def test_repeated_events_are_dropped(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n", b"data: 1\n\n")
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    mesh.tokenizer.events(submit, 1, b"data: 1\n\n", b"data: 2\n\n")
    mesh.tokenizer.finish(submit, 2, b"data: 2\n\n", b"data: 3\n\n")

    body = b"".join(b"data: %d\n\n" % i for i in range(4))
    assert client.getresponse().read() == body


def test_a_skipped_event_ends_the_stream_with_an_error(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    mesh.tokenizer.events(submit, 2, b"data: 2\n\n")
    text = client.getresponse().read()

    assert text.startswith(b'data: 0\n\ndata: {"error":')
    assert mesh.tokenizer.expect(Cancel).rid == submit.rid


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/v1/chat/completions", b"data: "),
        ("/v1/completions", b"data: "),
        ("/v1/responses", b"event: error\ndata: "),
        ("/v1/messages", b"event: error\ndata: "),
    ],
)
def test_a_failure_after_the_headers_is_an_event_of_the_protocol(
    mesh: Mesh, path: str, prefix: bytes
) -> None:
    client = mesh.post(path)
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    mesh.tokenizer.fail(submit, ErrorCode.ENGINE_RESTARTED, "lost")
    response = client.getresponse()
    first, last = response.read().split(b"\n\n", 1)

    assert (response.status, first) == (200, b"data: 0")
    assert last.startswith(prefix)
    assert last.endswith(b"\n\n")
    event = json.loads(last.removeprefix(prefix))
    if path == "/v1/responses":
        assert event == {
            "type": "error",
            "code": "engine_restarted",
            "message": "lost",
            "param": None,
            "sequence_number": 1,
        }
    else:
        assert event["error"]["message"] == "lost"
        assert event["error"]["type"] == "overloaded_error"
    if path == "/v1/messages":
        assert event["type"] == "error"


def test_the_failure_of_a_followed_response_has_the_next_number(mesh: Mesh) -> None:
    client = mesh.client()
    client.request("GET", "/v1/responses/resp_1?stream=true&starting_after=41")
    submit = mesh.tokenizer.expect(Submit)
    asked = {"id": "resp_1", "stream": True, "starting_after": 41}
    assert (submit.protocol, json.loads(submit.body)) == ("response", asked)
    mesh.tokenizer.events(submit, 0, b"data: 42\n\n", b"data: 43\n\n")
    mesh.tokenizer.fail(submit, ErrorCode.CANCELLED, "cancelled")
    response = client.getresponse()
    last = response.read().split(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"event: error\ndata: ")) == {
        "type": "error",
        "code": "cancelled",
        "message": "cancelled",
        "param": None,
        "sequence_number": 44,
    }


# ---------------------------------------------------------------- pings


@pytest.mark.parametrize(
    ("path", "ping"),
    [
        ("/v1/chat/completions", b": ping\n\n"),
        ("/v1/responses", b": ping\n\n"),
        ("/v1/messages", b'event: ping\ndata: {"type": "ping"}\n\n'),
    ],
)
def test_idle_streams_are_kept_alive_between_events(pinging: Mesh, path: str, ping: bytes) -> None:
    client = pinging.post(path)
    submit = pinging.tokenizer.expect(Submit)
    pinging.tokenizer.events(submit, 0, b"data: 0\n\n")
    response = client.getresponse()

    assert response.read(9 + 2 * len(ping)) == b"data: 0\n\n" + 2 * ping
    pinging.tokenizer.finish(submit, 1, b"data: 1\n\n")
    assert response.read().replace(ping, b"") == b"data: 1\n\n"


def test_plain_answers_get_no_pings(pinging: Mesh) -> None:
    plain, streamed = pinging.post(), pinging.post("/v1/completions")
    first, second = pinging.tokenizer.expect(Submit), pinging.tokenizer.expect(Submit)
    if first.protocol != "chat":
        first, second = second, first
    pinging.tokenizer.admit(second)
    assert streamed.getresponse().read(8) == b": ping\n\n"  # so the other had the time, too
    pinging.tokenizer.answer(first, b"{}")
    pinging.tokenizer.finish(second, 0, b"data: x\n\n")

    assert plain.getresponse().read() == b"{}"


# ---------------------------------------------------------------- disconnects


def test_hanging_up_on_a_stream_cancels_it_at_once(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    response = client.getresponse()
    response.read(9)
    response.close()
    client.close()

    assert mesh.tokenizer.expect(Cancel) == Cancel(submit.rid)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_hanging_up_while_waiting_for_a_plain_answer_cancels_it_at_once(
    mesh: Mesh, path: str
) -> None:
    client = mesh.post(path)
    submit = mesh.tokenizer.expect(Submit)
    client.close()

    assert mesh.tokenizer.expect(Cancel) == Cancel(submit.rid)


def test_hanging_up_cancels_the_request_that_runs_also_when_another_waits_behind_it(
    mesh: Mesh,
) -> None:
    client = mesh.post()
    client.sock.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    submit = mesh.tokenizer.expect(Submit)
    client.close()

    assert mesh.tokenizer.expect(Cancel) == Cancel(submit.rid)


def test_a_reset_connection_counts_as_hanging_up(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()

    assert mesh.tokenizer.expect(Cancel) == Cancel(submit.rid)


def test_a_late_event_of_a_cancelled_request_is_answered_with_another_cancel(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    client.close()
    mesh.tokenizer.expect(Cancel)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")  # as if the first had been lost

    assert mesh.tokenizer.expect(Cancel) == Cancel(submit.rid)


def test_a_finished_request_is_not_cancelled(mesh: Mesh) -> None:
    client = mesh.post()
    mesh.tokenizer.answer(mesh.tokenizer.expect(Submit), b"{}")
    client.getresponse().read()
    client.close()
    other = mesh.post("/v1/completions")

    submit = mesh.tokenizer.expect(Submit)  # the next mail is the next request
    mesh.tokenizer.answer(submit, b"{}")
    other.getresponse()


# ---------------------------------------------------------------- slow clients


def test_credits_say_how_many_events_the_client_has_taken(mesh: Mesh) -> None:
    client = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    for index in range(2 * CREDIT_EVENTS):
        mesh.tokenizer.events(submit, index, b"data: x\n\n")
    response = client.getresponse()
    response.read(2 * CREDIT_EVENTS * 9)

    taken = mesh.tokenizer.expect(Credit)
    assert taken.rid == submit.rid
    assert CREDIT_EVENTS <= taken.num_events <= 2 * CREDIT_EVENTS
    if taken.num_events <= CREDIT_EVENTS:
        assert mesh.tokenizer.expect(Credit).num_events == 2 * CREDIT_EVENTS
    mesh.tokenizer.finish(submit, 2 * CREDIT_EVENTS)
    response.read()


def deaf_client(mesh: Mesh) -> socket.socket:
    """Sends a request and reads nothing of the answer."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(PATIENCE_S)
    raw.connect(("127.0.0.1", mesh.server.port))
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    return raw


def test_a_client_that_does_not_read_stalls_no_other_and_gets_no_credit(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh, deaf_client(mesh) as deaf:
        stuck = mesh.tokenizer.expect(Submit)
        for index in range(200):  # 13 MB: more than the kernel's buffers, less than the gateway's
            mesh.tokenizer.events(stuck, index, b"data: " + bytes(65536) + b"\n\n")

        for _ in range(20):
            client = mesh.post("/v1/completions")
            submit = mesh.tokenizer.expect(Submit, skip=Credit)
            mesh.tokenizer.finish(submit, 0, b"data: quick\n\n")
            assert client.getresponse().read() == b"data: quick\n\n"

        deaf.close()
        while not isinstance(mail := mesh.tokenizer.expect_any(Cancel, Credit), Cancel):
            assert mail.num_events < 150
        assert mail.rid == stuck.rid


def test_a_client_too_far_behind_loses_its_stream_only(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh, deaf_client(mesh) as deaf:
        stuck = mesh.tokenizer.expect(Submit)
        for index in range(32):  # 32 MiB: beyond the buffer of 16 MiB and the kernel's
            mesh.tokenizer.events(stuck, index, bytes(1 << 20))

        assert mesh.tokenizer.expect(Cancel).rid == stuck.rid
        response = http.client.HTTPResponse(deaf)
        response.begin()
        assert b"slow_consumer" in response.read()[-300:]  # the reason, if it reads after all


def test_a_client_that_reads_nothing_for_too_long_is_cut_off(tmp_path: Path) -> None:
    with running_mesh(tmp_path, slow_consumer_s=0.3) as mesh, deaf_client(mesh) as deaf:
        stuck = mesh.tokenizer.expect(Submit)
        for index in range(200):
            mesh.tokenizer.events(stuck, index, bytes(65536))

        assert mesh.tokenizer.expect(Cancel, skip=Credit).rid == stuck.rid
        until(lambda: mesh.get("/load")[1] == b'{"server_load":0}')
        with pytest.raises(ConnectionResetError):
            read_on(deaf)


def read_on(raw: socket.socket) -> None:
    """To the end of the connection, which must not be an orderly one."""
    while raw.recv(1 << 16):
        pass


def test_many_streams_at_once_keep_their_events_apart(mesh: Mesh) -> None:
    clients = [mesh.post("/v1/completions", b"%d" % i) for i in range(50)]
    submits = [mesh.tokenizer.expect(Submit) for _ in clients]
    for index in range(5):
        for submit in submits:
            mesh.tokenizer.events(submit, index, b"data: %s\n\n" % submit.body)
    for submit in submits:
        mesh.tokenizer.send(ResponseFinished(submit.rid, 200))

    for i, client in enumerate(clients):
        assert client.getresponse().read() == b"data: %d\n\n" % i * 5
