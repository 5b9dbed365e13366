"""Structured output and tools through a whole mesh, as unmodified clients ask for them."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pydantic
import pytest

from tests.e2e.conftest import CONFIG, RunningMesh, running
from tests.e2e.http_streams import Streams

NO_THINKING: dict[str, Any] = {"extra_body": {"thinking": {"type": "disabled"}}}
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {
        "type": "function",
        "function": {
            "name": "dice",
            "parameters": {
                "type": "object",
                "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 99}},
                "required": ["sides"],
            },
        },
    },
]
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris? Answer in JSON."}]


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="any", max_retries=0) as client:
        yield client


class Place(pydantic.BaseModel):
    """What the SDK parses an answer to."""

    name: str = pydantic.Field(max_length=12)
    kind: str = pydantic.Field(pattern="^(town|village)$")
    height_m: int = pydantic.Field(ge=0, le=9000)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept_to(client: openai.OpenAI, mesh: RunningMesh, stream: bool) -> None:
    format_: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=ASK,
        response_format=format_,
        temperature=1.2,
        max_tokens=120,
        seed=3,
        stream=stream,
        **NO_THINKING,
    )
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
    else:
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content or ""
    found = json.loads(text)
    assert set(found) == {"city", "people"}
    assert len(found["city"]) <= 16
    assert 0 <= found["people"] <= 99999


def test_pydantic_models_come_back_parsed(client: openai.OpenAI, mesh: RunningMesh) -> None:
    answer = client.chat.completions.parse(
        model=mesh.model,
        messages=ASK,
        response_format=Place,
        max_tokens=120,
        seed=5,
        **NO_THINKING,
    )
    place = answer.choices[0].message.parsed
    assert place is not None
    assert place.kind in ("town", "village")


def test_responses_parse(client: openai.OpenAI, mesh: RunningMesh) -> None:
    answer = client.responses.parse(
        model=mesh.model,
        input=ASK[0]["content"],
        text_format=Place,
        reasoning={"effort": "none"},
        max_output_tokens=120,
        extra_body={"seed": 1},
    )
    assert answer.output_parsed is not None
    assert 0 <= answer.output_parsed.height_m <= 9000


def test_every_choice_keeps_to_the_schema(client: openai.OpenAI, mesh: RunningMesh) -> None:
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=ASK,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY},
        },
        n=3,
        seed=4,
        temperature=1.5,
        max_tokens=120,
        **NO_THINKING,
    )
    texts = [choice.message.content or "" for choice in answer.choices]
    assert [set(json.loads(text)) for text in texts] == [{"city", "people"}] * 3
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", "[A-C]{3}-[0-9]{2}", "[A-C]{3}-[0-9]{2}"),
        ("guided_choice", ["red", "green", "deep blue"], "red|green|deep blue"),
        ("guided_grammar", 'start: "x" y+ "."\ny: "y" | "z"\n', r"x[yz]+\."),
        ("ebnf", 'root ::= "x" y+ "."\ny ::= "y" | "z"\n', r"x[yz]+\."),
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_other_forms(
    mesh: RunningMesh, field: str, value: object, pattern: str, thinking: bool
) -> None:
    body = {
        "model": mesh.model,
        "messages": ASK,
        "seed": 1,
        "max_tokens": 300,
        field: value,
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] or ""
    if choice["finish_reason"] == "length":  # still thinking, or in the middle
        assert thinking or re.fullmatch(r"x[yz]*", text)
    else:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "dice"}}])
@pytest.mark.parametrize("thinking", [True, False])
def test_forced_calls_round_trip(
    client: openai.OpenAI, mesh: RunningMesh, choice: object, thinking: bool
) -> None:
    extra: dict[str, Any] = {"thinking_token_budget": 40} if thinking else NO_THINKING["extra_body"]
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=ASK,
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=400,
        seed=2,
        parallel_tool_calls=False,
        extra_body=extra,
    )
    (made,) = answer.choices
    assert made.finish_reason == "tool_calls", made
    assert made.message.tool_calls is not None
    (call,) = made.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "dice":
        assert 2 <= arguments["sides"] <= 99
    else:
        assert choice == "required"
        assert set(arguments) == {"city", "people"}
    # and the tool's answer goes back
    again = client.chat.completions.create(
        model=mesh.model,
        messages=[
            *ASK,
            made.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "17"},
        ],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=20,
        **NO_THINKING,
    )
    assert again.choices[0].message.tool_calls is None


def test_anthropics_any_forces_a_call(mesh: RunningMesh) -> None:
    with anthropic.Anthropic(base_url=mesh.url, api_key="any", max_retries=0) as claude:
        answer = claude.messages.create(
            model=mesh.model,
            messages=[{"role": "user", "content": "Paris?"}],
            tools=[{"name": "weather", "input_schema": CITY}],
            tool_choice={"type": "any"},
            thinking={"type": "disabled"},
            max_tokens=400,
            extra_body={"seed": 2},
        )
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert uses
    assert {use.name for use in uses} == {"weather"}
    assert all(set(use.input) == {"city", "people"} for use in uses)


def test_tools_with_choice_none_are_not_called(client: openai.OpenAI, mesh: RunningMesh) -> None:
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=ASK,
        tools=TOOLS,
        tool_choice="none",
        max_tokens=40,
        seed=1,
        **NO_THINKING,
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_thinking_that_does_not_end_leaves_no_answer(
    client: openai.OpenAI, mesh: RunningMesh
) -> None:
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=ASK,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}},
        max_tokens=6,
        seed=1,
    )
    (choice,) = answer.choices
    assert (choice.message.content or "", choice.finish_reason) == ("", "length")


def test_a_bad_schema_is_an_error_before_the_queue(
    client: openai.OpenAI, mesh: RunningMesh
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": []}}}
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(
            model=mesh.model,
            messages=ASK,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert "enum" in found.value.message
    assert found.value.param == "response_format.json_schema.schema.properties.a.enum"


def mask_worker(mesh: RunningMesh) -> psutil.Process:
    """The child of the executor that keeps outputs to grammars."""
    executor = psutil.Process(mesh.mesh.pids["executor-0-0"])
    (worker,) = [
        child for child in executor.children() if "services.executor.masks" in child.cmdline()
    ]
    return worker


def stream_bodies(mesh: RunningMesh, count: int) -> list[tuple[str, dict[str, object]]]:
    """Answers of about 100 tokens under a grammar, and one without."""
    bodies: list[tuple[str, dict[str, object]]] = []
    for seed in range(count):
        bodies.append(
            (
                "/v1/completions",
                {
                    "model": mesh.model,
                    "prompt": f"Numbers {seed}:",
                    "guided_regex": "([0-9]{1,3} ){60}",
                    "max_tokens": 150,
                    "temperature": 1.0,
                    "seed": seed,
                },
            )
        )
    free = {"model": mesh.model, "prompt": "Once", "max_tokens": 120, "ignore_eos": True, "seed": 1}
    return [*bodies, ("/v1/completions", free)]


def test_a_killed_mask_worker_loses_nothing(mesh: RunningMesh) -> None:
    """In the middle of four streams: the same tokens come as without the kill."""
    calm = Streams(stream_bodies(mesh, 4), under_way=10)
    asyncio.run(calm.run(mesh.url, 60))
    executor, old = mesh.mesh.pids["executor-0-0"], mask_worker(mesh).pid

    async def killed() -> Streams:
        streams = Streams(stream_bodies(mesh, 4), under_way=10)
        run = asyncio.create_task(streams.run(mesh.url, 60))
        await streams.in_the_middle()
        os.kill(old, signal.SIGKILL)
        await run
        return streams

    broken = asyncio.run(killed())
    for before, after in zip(calm.streams, broken.streams, strict=True):
        assert after.text == before.text
        assert after.num_ends == 1
    assert mesh.mesh.pids["executor-0-0"] == executor
    assert mask_worker(mesh).pid != old


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[RunningMesh]:
    """Nobody has used it: metrics lag behind answers, and what others did would be counted, too."""
    yield from running(CONFIG, tmp_path)


@pytest.mark.alone
def test_sixty_four_new_schemas_at_once(fresh: RunningMesh) -> None:
    """Few rows sit out a step for want of a mask."""
    mesh = fresh
    bodies: list[tuple[str, dict[str, object]]] = []
    for n in range(64):
        schema = {
            "type": "object",
            "properties": {f"k{n}_{i}": {"enum": [n, i, True]} for i in range(4)},
            "required": [f"k{n}_{i}" for i in range(4)],
            "additionalProperties": False,
        }
        body = {"model": mesh.model, "prompt": f"{n}", "guided_json": schema, "max_tokens": 100}
        body["seed"] = n
        bodies.append(("/v1/completions", body))
    streams = Streams(bodies, under_way=1)
    asyncio.run(streams.run(mesh.url, 100))
    mesh.wait_total("deepmesh_replica_finished_total", 64)
    null = mesh.total("deepmesh_null_rows_total")
    tokens = mesh.total("deepmesh_output_tokens_total")
    share = null / (null + tokens)
    print(f"null rows: {null:.0f} of {null + tokens:.0f}, {share:.1%}")
    whole = 0
    for stream, (_, body) in zip(streams.streams, bodies, strict=True):
        if stream.events[-1]["choices"][0]["finish_reason"] == "stop":
            whole += 1
            assert set(json.loads(stream.text)) >= set(body["guided_json"]["required"])
    assert whole >= 16
    assert share < 0.05


def test_the_trace_tells_of_the_grammar(mesh: RunningMesh) -> None:
    parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"
    body = {"model": mesh.model, "prompt": "a", "guided_regex": "b{5}", "max_tokens": 9}
    headers = {"traceparent": parent}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "bbbbb"
    deadline, found = time.monotonic() + 20, ""
    spans = mesh.mesh.run_dir / "traces" / "executor-0-0.jsonl"
    while parent[3:35] not in found or '"grammar"' not in found:
        assert time.monotonic() < deadline, "no span"
        # the span ends when the request leaves its slot: the next step says so
        httpx.post(f"{mesh.url}/v1/completions", json={**body, "max_tokens": 1}, timeout=30)
        lines = spans.read_text().splitlines()
        found = "\n".join(line for line in lines if parent[3:35] in line and '"grammar"' in line)
    assert "compile_ms" in found
