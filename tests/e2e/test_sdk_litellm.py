"""The unmodified litellm and langchain-openai packages, against a mesh with two tokenizers."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched from outside

import litellm
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.e2e.conftest import RunningMesh

HELLO = [{"role": "user", "content": "Hello there"}]
pytestmark = pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning")  # litellm's own types
ROUTES = ["openai", "hosted_vllm", "deepseek", "anthropic"]


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """litellm keeps its connections; the tests leave none behind."""
    yield
    litellm.in_memory_llm_clients_cache.flush_cache()


def ask(pair: RunningMesh, route: str, **fields: Any) -> Any:  # noqa: ANN401  its own models
    base = pair.url if route == "anthropic" else f"{pair.url}/v1"
    return litellm.completion(
        model=f"{route}/{pair.model}",
        messages=fields.pop("messages", HELLO),
        api_base=base,
        api_key="any",
        num_retries=0,
        **{"max_tokens": 16, "temperature": 0, **fields},
    )


@pytest.mark.parametrize("route", ROUTES)
def test_chat_streamed_and_plain_say_the_same(pair: RunningMesh, route: str) -> None:
    plain = ask(pair, route)
    streamed = list(ask(pair, route, stream=True))
    message = plain.choices[0].message
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == (message.content or "")
    assert plain.usage.completion_tokens <= 16
    assert plain.usage.prompt_tokens > 0


@pytest.mark.parametrize("route", ROUTES)
def test_errors_have_their_types(pair: RunningMesh, route: str) -> None:
    with pytest.raises(litellm.exceptions.BadRequestError):
        ask(pair, route, max_tokens=0)
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(
            model=f"{route}/gpt-nonesuch",
            messages=HELLO,
            api_base=pair.url if route == "anthropic" else f"{pair.url}/v1",
            api_key="any",
            max_tokens=4,
            num_retries=0,
        )


def test_thinking_comes_as_reasoning(pair: RunningMesh) -> None:
    answer = ask(pair, "deepseek", thinking={"type": "enabled"})
    assert answer.choices[0].message.reasoning_content


def test_embeddings_are_not_here(pair: RunningMesh) -> None:
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.embedding(
            model=f"openai/{pair.model}",
            input=["x"],
            api_base=f"{pair.url}/v1",
            api_key="any",
            num_retries=0,
        )


# ---------------------------------------------------------------- langchain-openai


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chain(pair: RunningMesh, **fields: Any) -> ChatOpenAI:  # noqa: ANN401
    return ChatOpenAI(
        model=pair.model,
        base_url=f"{pair.url}/v1",
        api_key="any",  # type: ignore[arg-type]
        temperature=0,
        max_retries=0,
        **{"max_tokens": 16, "reasoning_effort": "none", **fields},
    )


def test_langchain_streams_what_it_says(pair: RunningMesh) -> None:
    model = chain(pair)
    plain = model.invoke("Hello there")
    streamed = "".join(str(chunk.content) for chunk in model.stream("Hello there"))
    assert plain.content == streamed != ""
    assert isinstance(plain, AIMessage)
    assert plain.usage_metadata is not None
    assert plain.usage_metadata["output_tokens"] <= 16


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(pair: RunningMesh, method: Any) -> None:  # noqa: ANN401
    model = chain(pair, max_tokens=400).with_structured_output(
        Person, method=method, include_raw=True
    )
    found: Any = model.invoke("Who? Answer in JSON.")
    raw = found["raw"]
    if raw.response_metadata["finish_reason"] != "length":
        assert isinstance(found["parsed"], Person), found


def test_langchain_tools_go_round(pair: RunningMesh) -> None:
    model = chain(pair, max_tokens=300).bind_tools([weather], tool_choice="required")
    question = HumanMessage("Weather in Rome?")
    first = model.invoke([question])
    assert isinstance(first, AIMessage)
    assert first.tool_calls
    results = [
        ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        for call in first.tool_calls
    ]
    last = chain(pair).bind_tools([weather]).invoke([question, first, *results])
    assert isinstance(last, AIMessage)
