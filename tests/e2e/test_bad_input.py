"""Bad input through the whole mesh: the caller's 4xx, the field's name, at once, nothing leaks."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import RunningMesh

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


def chat(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    return {"messages": HELLO, "max_tokens": 4, **fields}


CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "max_tokens 0": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "max_tokens negative": (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    "max_tokens absurd": (CHAT, chat(max_tokens=10**12), 400, "max_tokens"),
    "max_tokens text": (CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    "max_completion_tokens 0": (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    "no messages": (CHAT, {"messages": []}, 400, "messages"),
    "messages missing": (CHAT, {"max_tokens": 4}, 400, "messages"),
    "unknown role": (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0]"),
    "temperature": (CHAT, chat(temperature=-1), 400, "temperature"),
    "temperature text": (CHAT, chat(temperature="hot"), 400, "temperature"),
    "top_p": (CHAT, chat(top_p=1.5), 400, "top_p"),
    "min_p": (CHAT, chat(min_p=2), 400, "min_p"),
    "top_k": (CHAT, chat(top_k=-7), 400, "top_k"),
    "penalty": (CHAT, chat(presence_penalty=9), 400, "presence_penalty"),
    "logit_bias id": (CHAT, chat(logit_bias={"999999": 1}), 400, "logit_bias"),
    "logit_bias value": (CHAT, chat(logit_bias={"5": 1000}), 400, "logit_bias"),
    "top_logprobs": (CHAT, chat(logprobs=True, top_logprobs=50), 400, "top_logprobs"),
    "stop empty": (CHAT, chat(stop=[""]), 400, "stop"),
    "stop too many": (CHAT, chat(stop=[f"s{i}" for i in range(40)]), 400, "stop"),
    "stop_token_ids": (CHAT, chat(stop_token_ids=[999999]), 400, "stop_token_ids"),
    "seed": (CHAT, chat(seed=-1), 400, "seed"),
    "unsupported field": (CHAT, chat(best_of=3), 400, "best_of"),
    "unknown field": (CHAT, chat(frobnicate=True), 400, "frobnicate"),
    "completion ids out of range": (COMPLETIONS, {"prompt": [5, 999999]}, 400, "prompt"),
    "completion ids negative": (COMPLETIONS, {"prompt": [5, -1]}, 400, "prompt"),
    "completion prompt missing": (COMPLETIONS, {"max_tokens": 4}, 400, "prompt"),
    "completion suffix": (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "messages max_tokens 0": (MESSAGES, chat(max_tokens=0), 400, "max_tokens"),
    "messages empty": (MESSAGES, {"messages": [], "max_tokens": 4}, 400, "messages"),
    "responses input missing": (RESPONSES, {"max_output_tokens": 4}, 400, "input"),
    "responses max 0": (
        RESPONSES,
        {"input": "x", "max_output_tokens": 0},
        400,
        "max_output_tokens",
    ),
    "responses previous": (
        RESPONSES,
        {"input": "x", "previous_response_id": "resp_1"},
        400,
        "previous_response_id",
    ),
}


def error_of(path: str, answer: httpx.Response) -> dict[str, Any]:
    """The error object, checked to be in the shape of the route's protocol."""
    body = answer.json()
    assert answer.headers["x-request-id"]
    if path == MESSAGES:
        assert body["type"] == "error"
        assert body["request_id"]
        assert set(body["error"]) >= {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.fixture(scope="module")
def http(mesh: RunningMesh) -> httpx.Client:
    return httpx.Client(base_url=mesh.url, timeout=20)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_it_is_refused_at_once_and_names_the_field(
    http: httpx.Client, mesh: RunningMesh, case: str, stream: bool
) -> None:
    path, body, status, field = CASES[case]
    answer = http.post(path, json={"model": mesh.model, "stream": stream, **body})
    assert answer.status_code == status, answer.text
    error = error_of(path, answer)
    assert field in f"{error.get('param') or ''} {error['message']}", error
    assert answer.elapsed.total_seconds() < 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_malformed_json_is_a_400(http: httpx.Client, path: str) -> None:
    answer = http.post(path, content=b'{"model": "tiny", "messages": [', headers=JSON)
    assert answer.status_code == 400
    assert "JSON" in error_of(path, answer)["message"]


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_a_json_that_is_no_object_is_a_400(http: httpx.Client, path: str) -> None:
    answer = http.post(path, content=b"[1, 2]", headers=JSON)
    assert answer.status_code == 400
    error_of(path, answer)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_an_unknown_model_is_a_404(http: httpx.Client, path: str) -> None:
    body = chat(model="gpt-99", prompt="x", input="x")
    fields = {
        CHAT: ("model", "messages", "max_tokens"),
        MESSAGES: ("model", "messages", "max_tokens"),
        COMPLETIONS: ("model", "prompt"),
        RESPONSES: ("model", "input"),
    }[path]
    answer = http.post(path, json={k: body[k] for k in fields})
    assert answer.status_code == 404
    assert "gpt-99" in error_of(path, answer)["message"]


def test_a_prompt_longer_than_the_context_names_both_numbers(
    http: httpx.Client, mesh: RunningMesh
) -> None:
    answer = http.post(COMPLETIONS, json={"model": mesh.model, "prompt": [20] * 9000})
    assert answer.status_code == 400
    error = error_of(COMPLETIONS, answer)
    assert error["code"] == "context_length_exceeded"
    assert "9000" in error["message"].replace(",", "")
    assert "8192" in error["message"].replace(",", "")


def test_a_body_of_ten_megabytes_is_a_413_at_once(http: httpx.Client) -> None:
    start = time.monotonic()
    body = json.dumps(chat(model="tiny", pad="x" * 10_000_000)).encode()
    answer = http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 413
    assert time.monotonic() - start < 5


def test_unknown_routes_and_methods_have_the_error_shape(http: httpx.Client) -> None:
    for answer, status in ((http.get("/v1/nonsense"), 404), (http.get(CHAT), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_nothing_of_all_this_is_left(http: httpx.Client, mesh: RunningMesh) -> None:
    """Runs last in this file: the mesh is idle, and every block is free or cached."""
    mesh.wait_idle()
