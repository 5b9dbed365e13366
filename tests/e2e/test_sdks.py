"""The unmodified openai and anthropic SDKs against a running mesh."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock
from openai.types.chat import ChatCompletion
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent

from tests.e2e.conftest import RunningMesh

HELLO = "Hello there"
MAX_TOKENS = 24
GREEDY = {"temperature": 0}  # some versions of the anthropic SDK have no such parameter


@pytest.fixture
def mesh(pair: RunningMesh) -> RunningMesh:
    """Two tokenizers: whichever serves a request, clients see one API."""
    return pair


@pytest.fixture
def client(mesh: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(mesh: RunningMesh) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=mesh.url, api_key="any", max_retries=0) as client:
        yield client


def plain_chat(
    client: openai.OpenAI, model: str, *, effort: openai.types.ReasoningEffort = "none"
) -> ChatCompletion:
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": HELLO}],
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        reasoning_effort=effort,
    )


# ---------------------------------------------------------------- openai: chat


@pytest.mark.parametrize("effort", ["none", "high"])
def test_chat_streamed_and_plain_say_the_same(
    client: openai.OpenAI, mesh: RunningMesh, effort: openai.types.ReasoningEffort
) -> None:
    plain = plain_chat(client, mesh.model, effort=effort)
    stream = client.chat.completions.create(
        model=mesh.model,
        messages=[{"role": "user", "content": HELLO}],
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        reasoning_effort=effort,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    choice = plain.choices[0]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    thought = "".join(
        getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices
    )
    assert text == (choice.message.content or "")
    assert thought == (getattr(choice.message, "reasoning_content", None) or "")
    assert text or thought
    assert bool(thought) == (effort == "high")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens <= MAX_TOKENS
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == [choice.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    assert plain.id.startswith("chatcmpl-")


def test_temperature_0_is_greedy_in_thinking_mode_too(
    client: openai.OpenAI, mesh: RunningMesh
) -> None:
    answers = [plain_chat(client, mesh.model, effort="high").choices[0] for _ in range(3)]

    assert answers[0] == answers[1] == answers[2]


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI, mesh: RunningMesh) -> None:
    texts = [
        client.completions.create(
            model=mesh.model,
            prompt="Once upon",
            max_tokens=MAX_TOKENS,
            temperature=1.5,
            seed=seed,
        )
        .choices[0]
        .text
        for seed in (7, 7, 8)
    ]

    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_logprobs_of_a_chat(client: openai.OpenAI, mesh: RunningMesh) -> None:
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=[{"role": "user", "content": HELLO}],
        max_completion_tokens=5,
        temperature=0,
        reasoning_effort="none",
        logprobs=True,
        top_logprobs=3,
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.token == token.top_logprobs[0].token  # greedy
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)


def test_a_stop_string_ends_a_chat(client: openai.OpenAI, mesh: RunningMesh) -> None:
    whole = plain_chat(client, mesh.model).choices[0].message.content
    assert whole is not None
    assert len(whole) > 6
    stop = whole[3:6]
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=[{"role": "user", "content": HELLO}],
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        reasoning_effort="none",
        stop=[stop],
    )

    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


# ---------------------------------------------------------------- openai: the rest


def test_completions_streamed_and_plain_say_the_same(
    client: openai.OpenAI, mesh: RunningMesh
) -> None:
    plain = client.completions.create(
        model=mesh.model, prompt="Once upon", max_tokens=MAX_TOKENS, temperature=0
    )
    chunks = list(
        client.completions.create(
            model=mesh.model, prompt="Once upon", max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
    )

    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert plain.choices[0].text == text != ""
    assert plain.usage is not None
    assert plain.usage.completion_tokens <= MAX_TOKENS
    assert plain.object == chunks[0].object == "text_completion"


def test_responses_streamed_and_plain_say_the_same(
    client: openai.OpenAI, mesh: RunningMesh
) -> None:
    plain = client.responses.create(
        model=mesh.model,
        input=HELLO,
        max_output_tokens=MAX_TOKENS,
        temperature=0,
        reasoning={"effort": "none"},
    )
    events = list(
        client.responses.create(
            model=mesh.model,
            input=HELLO,
            max_output_tokens=MAX_TOKENS,
            temperature=0,
            reasoning={"effort": "none"},
            stream=True,
        )
    )

    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert plain.output_text == text != ""
    assert events[0].type == "response.created"
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    assert last.response.output_text == text
    assert last.response.status == plain.status
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert plain.id.startswith("resp_")


def test_models_are_listed_and_found(client: openai.OpenAI, mesh: RunningMesh) -> None:
    assert mesh.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(mesh.model).id == mesh.model


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as chat:
        plain_chat(client, "gpt-nonesuch")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-nonesuch")

    assert chat.value.code == "model_not_found"


def test_a_bad_field_is_named(client: openai.OpenAI, mesh: RunningMesh) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model=mesh.model, messages=[{"role": "user", "content": "x"}], max_tokens=0
        )

    assert error.value.param == "max_tokens"
    assert error.value.request_id


def test_the_request_id_is_the_clients_own(client: openai.OpenAI, mesh: RunningMesh) -> None:
    answer = client.with_options(default_headers={"x-request-id": "mine-1"}).models.list()

    assert answer._request_id == "mine-1"  # where the SDK documents it to be


# ---------------------------------------------------------------- anthropic


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def test_messages_streamed_and_plain_say_the_same(
    claude: anthropic.Anthropic, mesh: RunningMesh
) -> None:
    plain = claude.messages.create(
        model=mesh.model,
        max_tokens=MAX_TOKENS,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": HELLO}],
        thinking={"type": "disabled"},
    )
    with claude.messages.stream(
        model=mesh.model,
        max_tokens=MAX_TOKENS,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": HELLO}],
        thinking={"type": "disabled"},
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert text_of(plain) == text == text_of(final) != ""
    assert plain.stop_reason == final.stop_reason
    assert plain.usage.output_tokens == final.usage.output_tokens <= MAX_TOKENS
    assert plain.usage.input_tokens > 0
    assert plain.id.startswith("msg_")
    assert plain._request_id  # where the SDK documents it to be


def test_messages_think_when_asked(claude: anthropic.Anthropic, mesh: RunningMesh) -> None:
    message = claude.messages.create(
        model=mesh.model,
        max_tokens=MAX_TOKENS,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": HELLO}],
        thinking={"type": "adaptive"},
    )

    assert isinstance(message.content[0], ThinkingBlock)


def test_count_tokens_agrees_with_usage(claude: anthropic.Anthropic, mesh: RunningMesh) -> None:
    counted = claude.messages.count_tokens(
        model=mesh.model,
        messages=[{"role": "user", "content": "count these words please"}],
        thinking={"type": "disabled"},
    )
    message = claude.messages.create(
        model=mesh.model,
        max_tokens=1,
        messages=[{"role": "user", "content": "count these words please"}],
        thinking={"type": "disabled"},
    )

    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_anthropic_errors_are_typed(claude: anthropic.Anthropic, mesh: RunningMesh) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(
            model="claude-nonesuch", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(
            model=mesh.model, max_tokens=0, messages=[{"role": "user", "content": "x"}]
        )

    assert unknown.value.request_id


def test_anthropic_lists_the_models(claude: anthropic.Anthropic, mesh: RunningMesh) -> None:
    assert mesh.model in [model.id for model in claude.models.list()]
    assert claude.models.retrieve(mesh.model).id == mesh.model
