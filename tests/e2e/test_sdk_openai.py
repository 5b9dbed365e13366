"""What programs do with the unmodified openai package, against a mesh with two tokenizers."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from tests.e2e.conftest import RunningMesh

HELLO = [{"role": "user", "content": "Hello there"}]
PLAIN = {"temperature": 0, "reasoning_effort": "none", "max_completion_tokens": 24}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(pair: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="any", max_retries=0) as client:
        yield client


# ---------------------------------------------------------------- choices, logprobs, usage


def test_choices_of_one_request(client: openai.OpenAI, pair: RunningMesh) -> None:
    ask = {
        "model": pair.model,
        "messages": HELLO,
        "max_completion_tokens": 12,
        "temperature": 2,
        "seed": 5,
        "reasoning_effort": "none",
        "extra_body": {"min_tokens": 12},
    }
    many = client.chat.completions.create(**ask, n=3)
    one = client.chat.completions.create(**ask)
    chunks = list(
        client.chat.completions.create(
            **ask, n=3, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [choice.message.content for choice in many.choices]
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert chunks[-1].usage == many.usage
    assert many.usage is not None
    assert one.usage is not None
    assert many.usage.prompt_tokens == one.usage.prompt_tokens


def test_a_list_of_prompts(client: openai.OpenAI, pair: RunningMesh) -> None:
    prompts = ["Once upon", "The sea"]
    ask = {"model": pair.model, "max_tokens": 6, "temperature": 0}
    both = client.completions.create(**ask, prompt=prompts)
    alone = [client.completions.create(**ask, prompt=p).choices[0].text for p in prompts]
    assert [choice.text for choice in both.choices] == alone
    echoed = client.completions.create(**ask, prompt=prompts[0], echo=True)
    assert echoed.choices[0].text.endswith(prompts[0] + alone[0])


def test_logprobs_of_thinking_too(client: openai.OpenAI, pair: RunningMesh) -> None:
    answer = client.chat.completions.create(
        model=pair.model,
        messages=HELLO,
        temperature=0,
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=2,
        reasoning_effort="high",
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    entries = [*(logprobs.content or ()), *(getattr(logprobs, "reasoning_content", None) or ())]
    assert entries
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens


def test_effort_and_budget(client: openai.OpenAI, pair: RunningMesh) -> None:
    answer = client.chat.completions.create(
        model=pair.model,
        messages=HELLO,
        temperature=0,
        max_completion_tokens=20,
        extra_body={"thinking": {"type": "enabled", "budget_tokens": 3}},
    )
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) <= 3


# ---------------------------------------------------------------- formats and tools


def test_parse_into_a_model(client: openai.OpenAI, pair: RunningMesh) -> None:
    answer = client.chat.completions.parse(
        model=pair.model,
        messages=[{"role": "user", "content": "Who? Answer in JSON."}],
        response_format=Person,
        max_completion_tokens=200,
        temperature=0.7,
        seed=2,
        reasoning_effort="none",
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_responses_parse_into_a_model(client: openai.OpenAI, pair: RunningMesh) -> None:
    answer = client.responses.parse(
        model=pair.model,
        input="Who? Answer in JSON.",
        text_format=Person,
        max_output_tokens=400,
        temperature=0,
        reasoning={"effort": "none"},
    )
    assert answer.status == "incomplete" or isinstance(answer.output_parsed, Person)


@pytest.mark.parametrize("effort", ["none", "low"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_tool_goes_round(
    client: openai.OpenAI, pair: RunningMesh, choice: object, effort: str
) -> None:
    budget = {"thinking_token_budget": 8} if effort != "none" else {}
    ask = {
        "model": pair.model,
        "tools": [WEATHER],
        "max_completion_tokens": 300,
        "temperature": 0,
        "reasoning_effort": effort,
        "extra_body": budget,
    }
    messages: list[object] = [{"role": "user", "content": "Weather in Rome for 2 days?"}]
    first = client.chat.completions.create(messages=messages, tool_choice=choice, **ask)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    for call in message.tool_calls:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather"
        assert set(arguments) == {"city", "days"}
        assert 1 <= arguments["days"] <= 7
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    messages += [message.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(
        messages=messages, **{**ask, "max_completion_tokens": 16}
    )
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_streamed_calls_are_those_of_the_plain_answer(
    client: openai.OpenAI, pair: RunningMesh
) -> None:
    ask = {
        "model": pair.model,
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_completion_tokens": 300,
        "temperature": 0,
        "reasoning_effort": "none",
    }
    plain = client.chat.completions.create(**ask).choices[0].message
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0].message
    assert [c.function.arguments for c in final.tool_calls or ()] == [
        c.function.arguments for c in plain.tool_calls or ()
    ]


# ---------------------------------------------------------------- responses


def test_a_conversation_by_previous_response(client: openai.OpenAI, pair: RunningMesh) -> None:
    ask = {"model": pair.model, "max_output_tokens": 8, "reasoning": {"effort": "none"}}
    first = client.responses.create(input="My name is Ann.", temperature=0, **ask)
    for _ in range(4):  # whichever tokenizer serves it
        second = client.responses.create(
            input="Who am I?", previous_response_id=first.id, temperature=0, **ask
        )
        assert second.previous_response_id == first.id
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + 8
        found = client.responses.retrieve(second.id)
        assert found.output_text == second.output_text
    items = client.responses.input_items.list(first.id)
    assert [item.type for item in items.data] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as lost:
        client.responses.create(input="x", previous_response_id=first.id, **ask)
    assert lost.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(second.id)


def test_a_streamed_response_is_stored(client: openai.OpenAI, pair: RunningMesh) -> None:
    with client.responses.stream(
        model=pair.model,
        input="Hello",
        max_output_tokens=200,
        temperature=0,
        reasoning={"effort": "none"},
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_a_running_response_is_cancelled_from_elsewhere(
    client: openai.OpenAI, pair: RunningMesh
) -> None:
    stream = client.responses.create(
        model=pair.model,
        input="Hello",
        max_output_tokens=4000,
        stream=True,
        reasoning={"effort": "none"},
        extra_body={"ignore_eos": True},
    )
    created = next(iter(stream))
    assert created.type == "response.created"
    assert client.responses.cancel(created.response.id).status == "cancelled"
    kinds = [event.type for event in stream]
    assert kinds[-1] == "error"
    assert client.responses.retrieve(created.response.id).status == "cancelled"
    pair.wait_idle()


# ---------------------------------------------------------------- errors, timeouts, cancellation


def test_vision_is_refused_by_the_place_of_the_image(
    client: openai.OpenAI, pair: RunningMesh
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(openai.BadRequestError, match="does not take images") as error:
        client.chat.completions.create(
            model=pair.model, messages=[{"role": "user", "content": [image]}]
        )
    assert error.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("field", "value"), [("best_of", 2), ("n", 1000), ("frobnicate", 1), ("functions", [])]
)
def test_what_is_not_supported_is_named(
    client: openai.OpenAI, pair: RunningMesh, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=pair.model, messages=HELLO, extra_body={field: value})
    assert error.value.param == field


def test_a_timeout_cancels_the_request(client: openai.OpenAI, pair: RunningMesh) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=pair.model,
            prompt="Once",
            max_tokens=6000,
            timeout=httpx.Timeout(0.5),
            extra_body={"ignore_eos": True},
        )
    pair.wait_idle()


def test_closing_a_stream_cancels_all_its_choices(client: openai.OpenAI, pair: RunningMesh) -> None:
    stream = client.chat.completions.create(
        model=pair.model,
        messages=HELLO,
        n=4,
        stream=True,
        max_completion_tokens=4000,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    pair.wait_idle()


def test_many_at_once_from_asyncio(pair: RunningMesh) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="any") as client:
            asks = [
                client.chat.completions.create(model=pair.model, messages=HELLO, seed=1, **PLAIN)
                for _ in range(16)
            ]
            cancelled = asyncio.create_task(
                client.chat.completions.create(
                    model=pair.model,
                    messages=HELLO,
                    max_completion_tokens=4000,
                    extra_body={"ignore_eos": True},
                )
            )
            answers = await asyncio.gather(*asks)
            cancelled.cancel()
            return [answer.choices[0].message.content or "" for answer in answers]

    assert len(set(asyncio.run(main()))) == 1
    pair.wait_idle()


def test_logprobs_of_an_echoed_prompt(client: openai.OpenAI, pair: RunningMesh) -> None:
    """What evaluations ask for: how likely is this text?"""
    ask = {"model": pair.model, "temperature": 0, "logprobs": 1}
    told = client.completions.create(prompt="Once upon a time", max_tokens=4, **ask).choices[0]
    text = "Once upon a time" + told.text
    scored = client.completions.create(prompt=text, max_tokens=1, echo=True, **ask).choices[0]
    assert told.logprobs is not None
    assert scored.logprobs is not None
    probs = scored.logprobs.token_logprobs
    assert probs is not None
    assert probs[0] is None
    assert all(p <= 0 for p in probs[1:])
    expected = told.logprobs.token_logprobs
    assert expected is not None
    if scored.logprobs.tokens and scored.logprobs.tokens[-5:-1] == told.logprobs.tokens:
        assert probs[-5:-1] == pytest.approx(expected, abs=1e-3)


def test_prompt_logprobs_as_vllm_has_them(client: openai.OpenAI, pair: RunningMesh) -> None:
    """Through `extra_body`, as its users write it; beside the choices of a chat, in each choice
    of a completion."""
    more = {"extra_body": {"prompt_logprobs": 2}}
    ask = {"model": pair.model, "temperature": 0}
    chat = client.chat.completions.create(
        **ask, messages=HELLO, max_completion_tokens=4, reasoning_effort="none", n=2, **more
    )
    text = client.completions.create(
        **ask, prompt=["Once upon", "The sea"], max_tokens=2, n=2, **more
    )
    assert chat.model_extra is not None
    found = [chat.model_extra["prompt_logprobs"]]
    assert chat.usage is not None
    assert len(found[0]) == chat.usage.prompt_tokens
    for choice in text.choices:
        assert choice.model_extra is not None
        found.append(choice.model_extra["prompt_logprobs"])
    assert found[1] == found[2] != found[3] == found[4]
    for entries in found:
        assert entries[0] is None
        for entry in entries[1:]:
            own, *others = entry.values()
            assert {*own} == {"logprob", "rank", "decoded_token"}
            assert own["logprob"] <= 0
            assert own["rank"] >= 1
            assert sorted(e["rank"] for e in others + [own] * (own["rank"] < 3)) == [1, 2]
    told = [next(iter(entry.values()))["decoded_token"] for entry in found[1][1:]]
    assert "".join(told) == "Once upon"


@pytest.mark.parametrize("more", [{"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}])
def test_prompt_logprobs_that_cannot_be_are_refused(
    client: openai.OpenAI, pair: RunningMesh, more: dict[str, object]
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=pair.model, messages=HELLO, extra_body=more)
    assert error.value.param == "prompt_logprobs"
