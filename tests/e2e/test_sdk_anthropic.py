"""What programs do with the unmodified anthropic package, against a mesh with two tokenizers."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock

from tests.e2e.conftest import RunningMesh

HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0}
OFF: Any = {"type": "disabled"}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(pair: RunningMesh) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=pair.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_goes_round(
    claude: anthropic.Anthropic,
    pair: RunningMesh,
    choice: Any,  # noqa: ANN401
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
    ask: dict[str, Any] = {
        "model": pair.model,
        "tools": [TOOL],
        "thinking": OFF,
        "extra_body": GREEDY,
    }
    first = claude.messages.create(messages=messages, tool_choice=choice, max_tokens=300, **ask)
    assert first.stop_reason == "tool_use"
    uses = [block for block in first.content if isinstance(block, ToolUseBlock)]
    assert uses
    assert all(isinstance(use.input, dict) and set(use.input) == {"city"} for use in uses)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    second = claude.messages.create(messages=messages, max_tokens=8, **ask)
    assert second.stop_reason in ("end_turn", "max_tokens", "tool_use")
    with claude.messages.stream(
        messages=messages[:1], tool_choice=choice, max_tokens=300, **ask
    ) as stream:
        final = stream.get_final_message()
    assert [b.input for b in final.content if isinstance(b, ToolUseBlock)] == [
        u.input for u in uses
    ]


def test_thinking_with_a_budget(claude: anthropic.Anthropic, pair: RunningMesh) -> None:
    message = claude.messages.create(
        model=pair.model,
        max_tokens=24,
        messages=HELLO,
        thinking={"type": "enabled", "budget_tokens": 3},
        extra_body=GREEDY,
    )
    assert isinstance(message.content[0], ThinkingBlock)
    assert message.usage.output_tokens <= 24
    assert any(isinstance(block, TextBlock) for block in message.content[1:])


def test_a_prefill_is_continued(claude: anthropic.Anthropic, pair: RunningMesh) -> None:
    whole = claude.messages.create(
        model=pair.model, max_tokens=12, messages=HELLO, thinking=OFF, extra_body=GREEDY
    )
    assert isinstance(whole.content[0], TextBlock)
    text = whole.content[0].text
    begun = text[: max(1, len(text) // 2)].rstrip()
    rest = claude.messages.create(
        model=pair.model,
        max_tokens=12,
        messages=[*HELLO, {"role": "assistant", "content": begun}],
        extra_body=GREEDY,
    )
    assert isinstance(rest.content[0], TextBlock)
    assert rest.usage.input_tokens + (rest.usage.cache_read_input_tokens or 0) > (
        whole.usage.input_tokens
    )


def test_an_output_format_is_kept_to(claude: anthropic.Anthropic, pair: RunningMesh) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = claude.messages.create(
        model=pair.model,
        max_tokens=60,
        messages=HELLO,
        thinking=OFF,
        extra_body={**GREEDY, "output_config": config},
    )
    assert message.stop_reason == "end_turn"
    assert isinstance(message.content[0], TextBlock)
    assert isinstance(json.loads(message.content[0].text)["ok"], bool)


def test_stop_sequences(claude: anthropic.Anthropic, pair: RunningMesh) -> None:
    whole = claude.messages.create(
        model=pair.model, max_tokens=24, messages=HELLO, thinking=OFF, extra_body=GREEDY
    )
    assert isinstance(whole.content[0], TextBlock)
    text = whole.content[0].text
    stop = text[3:6]
    cut = claude.messages.create(
        model=pair.model,
        max_tokens=24,
        messages=HELLO,
        thinking=OFF,
        stop_sequences=[stop],
        extra_body=GREEDY,
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert isinstance(cut.content[0], TextBlock)
    assert cut.content[0].text == text[: text.index(stop)]


def test_vision_is_refused(claude: anthropic.Anthropic, pair: RunningMesh) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    content: Any = [{"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError, match="does not take images"):
        claude.messages.create(
            model=pair.model, max_tokens=4, messages=[{"role": "user", "content": content}]
        )


def test_a_timeout_cancels_the_request(claude: anthropic.Anthropic, pair: RunningMesh) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        claude.messages.create(
            model=pair.model,
            max_tokens=6000,
            messages=HELLO,
            timeout=0.5,
            extra_body={"ignore_eos": True},
        )
    pair.wait_idle()


def test_leaving_a_stream_cancels_the_request(
    claude: anthropic.Anthropic, pair: RunningMesh
) -> None:
    with claude.messages.stream(
        model=pair.model, max_tokens=6000, messages=HELLO, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    pair.wait_idle()
