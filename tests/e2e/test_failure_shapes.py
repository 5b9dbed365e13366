"""Failures of other servers that their users reported, over HTTP: none of them happens here."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import RunningMesh
from tests.services.test_tokenizer_boundaries import BYTE_IDS

ALPHABET = "Here is the English alphabet: ABC"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=mesh.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, mesh: RunningMesh, path: str, **body: object) -> dict[str, Any]:
    """The whole answer; its stream must tell the same text, end, and nothing broken on the way."""
    body = {"model": mesh.model, "seed": 1, **body}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()["choices"][0]
    text, reasoning, end = "", "", None
    with client.stream("POST", path, json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                delta = choice.get("delta", {})
                text += choice.get("text") or delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                end = choice["finish_reason"] or end
    message = whole.get("message", {})
    assert text == (whole.get("text") or message.get("content") or "")
    assert reasoning == (message.get("reasoning_content") or "")
    assert end == whole["finish_reason"]
    return whole


@pytest.mark.parametrize("echo", [True, False])
def test_prompt_ids_that_end_within_a_character(
    client: httpx.Client, mesh: RunningMesh, echo: bool
) -> None:
    """Two of its three bytes are the prompt's; the output begins with the third."""
    first, second, third = (BYTE_IDS[bytes([byte])] for byte in "日".encode())
    found = ask(
        client,
        mesh,
        "/v1/completions",
        prompt=[first, second],
        max_tokens=1,
        allowed_token_ids=[third],
        echo=echo,
    )
    assert found["text"] == "日"


def test_what_could_have_become_a_stop_string_is_sent_in_the_end(
    client: httpx.Client, mesh: RunningMesh
) -> None:
    found = ask(
        client,
        mesh,
        "/v1/completions",
        prompt="x",
        max_tokens=60,
        guided_choice=[ALPHABET],
        stop=["DEFGHIJ", "CD", "BCDE"],
    )
    assert (found["text"], found["finish_reason"]) == (ALPHABET, "stop")


def test_a_stop_string_within_a_form_ends_the_text_before_it(
    client: httpx.Client, mesh: RunningMesh
) -> None:
    found = ask(
        client,
        mesh,
        "/v1/completions",
        prompt="x",
        max_tokens=60,
        guided_choice=["ABCDEFGHIJ and more"],
        stop=["DEFGHIJ"],
    )
    assert (found["text"], found["finish_reason"]) == ("ABC", "stop")


def test_tools_that_may_not_be_called(client: httpx.Client, mesh: RunningMesh) -> None:
    found = ask(
        client,
        mesh,
        "/v1/chat/completions",
        **CHAT,
        tools=TOOLS,
        tool_choice="none",
        max_tokens=30,
    )
    assert not found["message"].get("tool_calls")
    assert found["finish_reason"] in ("stop", "length")


def test_thinking_that_is_cut_is_no_answer(client: httpx.Client, mesh: RunningMesh) -> None:
    chat = {"messages": CHAT["messages"], "thinking": {"type": "enabled"}}
    found = ask(client, mesh, "/v1/chat/completions", **chat, max_tokens=5)
    assert not found["message"].get("content")
    assert found["message"]["reasoning_content"]
    assert found["finish_reason"] == "length"


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_pattern_and_length_within_array_items(
    client: httpx.Client, mesh: RunningMesh, temperature: float
) -> None:
    word = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}
    item = {"type": "object", "properties": {"w": word}, "required": ["w"]}
    schema = {
        "type": "object",
        "properties": {
            "top": word,
            "list": {
                "type": "array",
                "items": {**item, "additionalProperties": False},
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "required": ["top", "list"],
        "additionalProperties": False,
    }
    found = ask(
        client,
        mesh,
        "/v1/completions",
        prompt="x",
        max_tokens=400,
        guided_json=schema,
        temperature=temperature,
    )
    answer = json.loads(found["text"])
    words = [answer["top"], *(each["w"] for each in answer["list"])]
    assert len(words) == 3
    assert all(re.fullmatch("[a-z]{1,3}", each) for each in words)


def test_a_stop_id_that_the_form_does_not_allow_ends_nothing(
    client: httpx.Client, mesh: RunningMesh
) -> None:
    """Where the form may not end, that id does not come; what it spells may, in other pieces."""
    (letter,) = client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()[
        "tokens"
    ]
    found = ask(
        client,
        mesh,
        "/v1/completions",
        prompt="x",
        max_tokens=40,
        guided_regex="(the |a ){4}",
        stop_token_ids=[letter],
        temperature=1.5,
    )
    assert found["finish_reason"] == "stop"
    assert re.fullmatch("(the |a ){4}", found["text"])


def test_an_id_may_come_again_at_once_behind_its_abort(
    client: httpx.Client, mesh: RunningMesh
) -> None:
    body = {"model": mesh.model, "prompt": "Once", "max_tokens": 40, "ignore_eos": True, "seed": 3}
    headers = {"x-request-id": "the-same-one"}
    calm = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    for _ in range(4):
        long = {**body, "max_tokens": 2000, "stream": True}
        with client.stream("POST", "/v1/completions", json=long, headers=headers) as stream:
            assert next(stream.iter_lines()).startswith("data: ")  # and it is dropped
        again = client.post("/v1/completions", json=body, headers=headers)
        assert again.status_code == 200, again.text
        assert again.json()["choices"][0]["text"] == calm
    mesh.wait_idle()
