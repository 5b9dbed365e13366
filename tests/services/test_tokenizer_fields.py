"""What each field does: the table covers all that clients send, and what it promises happens."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from deepmesh.wire.messages import ErrorCode, FinishReason, PromptLogprobs, Submit
from deepmesh.wire.packed import pack_ids, unpack_ids
from services.tokenizer.completions import CompletionStream
from services.tokenizer.fields import PROTOCOLS
from services.tokenizer.generation import Generation
from services.tokenizer.prepare import Preparer
from services.tokenizer.refusal import Refusal
from services.tokenizer.request import Request
from services.tokenizer.text_stream import Token
from services.tokenizer.vocabulary import Vocabulary
from tests.services.tokenizer_harness import EOS, HI, MODEL, PLAIN, TOKENIZER, ids_of, make_config

VOCABULARY = Vocabulary((MODEL / "tokenizer.json").read_text("utf-8"))
PREPARER = Preparer(make_config(Path("/nowhere")), now_s=lambda: 1_700_000_100)

# what deepseek-recipe accepts and silently ignores: each must be in the table, one way or other
SILENT = {
    "chat": """max_completion_tokens logit_bias presence_penalty frequency_penalty top_k min_p
    repetition_penalty stop_token_ids min_tokens ignore_eos best_of parallel_tool_calls functions
    function_call chat_template_kwargs guided_json structured_outputs user store metadata
    service_tier n stream_options cache_salt priority thinking_token_budget
    include_stop_str_in_output""",
    "responses": """previous_response_id conversation background store include truncation prompt
    max_tool_calls parallel_tool_calls""",
    "messages": "top_k output_config output_format thinking cache_control mcp_servers",
    "completions": "n best_of echo logprobs suffix stream_options include_stop_str_in_output",
}


@pytest.mark.parametrize("protocol", sorted(SILENT))
def test_every_field_that_the_recipe_drops_has_a_rule(protocol: str) -> None:
    missing = set(SILENT[protocol].split()) - set(PROTOCOLS[protocol])
    assert not missing


def prepare(protocol: str, **fields: object) -> Generation:
    body = {"model": "tiny", **fields}
    submit = Submit(bytes(16), protocol, msgspec.json.encode(body), 1, priority=5)
    outcome = PREPARER.prepare(submit, 8192)
    assert isinstance(outcome, Generation)
    return outcome


def refused(protocol: str, **fields: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        prepare(protocol, **fields)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value


def prompt_of(generation: Generation) -> str:
    ids = unpack_ids(generation.prompt_ids).tolist()
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def answer(generation: Generation, text: str) -> dict[str, Any]:
    """The plain answer when the model says `text`."""
    stream = generation.text
    stream.start(0)
    for token in ids_of(text):
        stream.push(Token(token))
        if stream.stopped:
            break
    stream.finish(FinishReason.STOP)
    return msgspec.json.decode(stream.body())


@pytest.mark.parametrize("value", [-1, 1.5, True, "high"])
def test_nobody_prefers_himself(value: object) -> None:
    assert refused("chat", messages=HI, priority=value).param == "priority"


def test_who_stands_back_does_so_from_the_priority_of_his_key() -> None:
    generation = prepare("chat", messages=HI, priority=3)
    submit = Submit(bytes(16), "chat", b"", 1, priority=5, tenant_salt=b"t")
    generate = Request(submit, "gateway-0", 0, generation=generation).generate("me", "")
    assert (generate.priority, generate.tenant) == (2, b"t")


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages", "completions"])
def test_choices_are_refused_where_there_are_none(protocol: str) -> None:
    base = {"prompt": "x"} if protocol == "completions" else {"messages": HI}
    base = {"input": "x"} if protocol == "responses" else base
    if protocol in ("chat", "completions"):
        assert len(prepare(protocol, **base, n=4).choices) == 4
        assert not prepare(protocol, **base, n=1).choices
        for value in (0, 129, 1.5, True, "2"):
            assert refused(protocol, **base, n=value).param == "n"
        assert refused(protocol, **base, best_of=2).param == "best_of"
    else:
        assert refused(protocol, **base, max_tokens=5, n=2).param in ("n", "max_tokens")


def test_too_many_choices_in_all() -> None:
    assert refused("completions", prompt=["x"] * 65, n=2).param == "n"
    assert refused("completions", prompt=["x"] * 129).param == "prompt"
    assert len(prepare("completions", prompt=["x"] * 64, n=2).choices) == 128


def test_a_wrong_prompt_of_several_is_named() -> None:
    assert refused("completions", prompt=["x", []]).param == "prompt[1]"
    assert refused("completions", prompt=[[5], [5, -1]]).param == "prompt[1][1]"


@pytest.mark.parametrize("thinking", [True, False])
def test_the_last_message_is_continued(thinking: bool) -> None:
    begun = {"role": "assistant", "content": "Once upon"}
    options = {} if thinking else PLAIN
    for fields in (
        {"continue_final_message": True, "add_generation_prompt": False},
        {"continue_final_message": True},
    ):
        generation = prepare("chat", messages=[*HI, begun], **fields, **options)
        assert prompt_of(generation).endswith("</think>Once upon")


def test_what_cannot_be_continued_is_refused() -> None:
    found = refused("chat", messages=HI, continue_final_message=True)
    assert found.param == "messages[0].role"
    for fields in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "continue_final_message": True},
    ):
        assert refused("chat", messages=HI, **fields).param == "add_generation_prompt"


@pytest.mark.parametrize(
    "content",
    [
        "Well, <｜User｜>",
        [{"type": "text", "text": "Well, "}, {"type": "text", "text": "<｜User｜>"}],
    ],
)
def test_anthropics_prefill_is_continued_and_spells_no_special_token(content: object) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    generation = prepare("messages", messages=messages, max_tokens=9)
    ids = unpack_ids(generation.prompt_ids).tolist()
    assert prompt_of(generation).endswith("<｜Assistant｜></think>Well, <｜User｜>")
    assert ids.count(TOKENIZER.token_to_id("<｜User｜>")) == 1
    body = answer(generation, "yes")
    assert body["content"] == [{"type": "text", "text": "yes"}]


def test_prefill_does_not_go_with_thinking() -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    found = refused("messages", messages=messages, max_tokens=9, thinking={"type": "enabled"})
    assert found.param == "thinking"
    empty = [*HI, {"role": "assistant", "content": ""}]
    assert refused("messages", messages=empty, max_tokens=9).param == "messages[1].content"


@pytest.mark.parametrize(
    ("effort", "told"), [("low", "50"), ("high", "75"), ("max", "100"), ("none", "")]
)
def test_effort_by_template_option(effort: str, told: str) -> None:
    generation = prepare("chat", messages=HI, chat_template_kwargs={"reasoning_effort": effort})
    prompt = prompt_of(generation)
    assert f"Reasoning Effort: {told}" in prompt if told else prompt.endswith("</think>")


@pytest.mark.parametrize(
    ("protocol", "param", "fields"),
    [
        ("chat", "thinking.depth", {"thinking": {"type": "enabled", "depth": 3}}),
        ("chat", "stream_options.x", {"stream": True, "stream_options": {"x": 1}}),
        ("chat", "chat_template_kwargs.x", {"chat_template_kwargs": {"x": 1}}),
        ("responses", "reasoning.depth", {"reasoning": {"depth": 3}}),
        ("responses", "include[0]", {"include": ["file_search_call.results"]}),
        (
            "messages",
            "thinking.budget_tokens",
            {"thinking": {"type": "enabled", "budget_tokens": 0}},
        ),
    ],
)
def test_keys_inside_of_fields_are_known_or_named(
    protocol: str, param: str, fields: dict[str, object]
) -> None:
    base: dict[str, object] = {"input": "x"} if protocol == "responses" else {"messages": HI}
    assert refused(protocol, **base, **fields).param == param


# ---------------------------------------------------------------- stop strings in the text

STOPS = ["STOP", "END"]


@pytest.mark.parametrize("shown", [True, False])
def test_the_stop_string_stays_if_asked(shown: bool) -> None:
    chat = prepare("chat", messages=HI, stop=STOPS, include_stop_str_in_output=shown, **PLAIN)
    completion = prepare("completions", prompt="x", stop=STOPS, include_stop_str_in_output=shown)
    wanted = "one END" if shown else "one "
    for generation, read in (
        (chat, lambda body: body["choices"][0]["message"]["content"]),
        (completion, lambda body: body["choices"][0]["text"]),
    ):
        body = answer(generation, "one END two STOP")
        assert read(body) == wanted
        assert body["choices"][0]["finish_reason"] == "stop"


def test_the_stop_string_comes_before_the_finish_reason_of_a_stream() -> None:
    generation = prepare(
        "chat", messages=HI, stop="STOP", include_stop_str_in_output=True, stream=True, **PLAIN
    )
    stream, events = generation.text, list[bytes]()
    stream.start(0)
    for token in [*ids_of("one STOP two"), EOS]:
        events += stream.push(Token(token))
        if stream.stopped:
            break
    events += stream.finish(FinishReason.STOP)
    chunks = [msgspec.json.decode(e[6:]) for e in events if b"[DONE]" not in e]
    contents = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert "".join(contents) == "one STOP"
    assert [reason for reason in reasons if reason] == ["stop"] == reasons[-1:]


def test_a_stop_string_that_never_came_is_not_shown() -> None:
    generation = prepare("chat", messages=HI, stop="STOP", include_stop_str_in_output=True, **PLAIN)
    assert answer(generation, "one two")["choices"][0]["message"]["content"] == "one two"


# ---------------------------------------------------------------- what may be sampled


def test_bad_words_are_spelled_as_the_model_would() -> None:
    generation = prepare("chat", messages=HI, bad_words=["sea"])
    spelled = [unpack_ids(ids).tolist() for ids in generation.sampling.bad_words]
    assert spelled == [ids_of("sea"), ids_of(" sea")]
    assert refused("chat", messages=HI, bad_words=["x", ""]).param == "bad_words[1]"


def test_only_these_tokens() -> None:
    generation = prepare("completions", prompt="x", allowed_token_ids=[9, 5, 9])
    assert unpack_ids(generation.sampling.allowed_token_ids).tolist() == [5, 9]
    for value in ([], [-1], [10**6], "x", [True]):
        found = refused("completions", prompt="x", allowed_token_ids=value)
        assert found.param.startswith("allowed_token_ids")


def test_an_echo_brings_the_logprobs_of_the_prompt() -> None:
    ids = ids_of("Once upon a")
    generation = prepare("completions", prompt=ids, echo=True, logprobs=1, max_tokens=5)
    assert (generation.n_logprobs, generation.n_prompt_logprobs) == (1, 1)
    text = generation.text
    assert isinstance(text, CompletionStream)
    count = len(ids) - 1
    own = np.arange(1, count + 1, dtype="<f4")
    found = PromptLogprobs(1, (-own).tobytes(), pack_ids([7] * count), (-own).tobytes())
    text.take_prompt(found)
    text.start(0)
    text.push(Token(ids_of(" time")[0], -0.5, [(5, -0.5)]))
    text.finish(FinishReason.LENGTH)
    choice = msgspec.json.decode(text.body())["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Once upon a time"
    assert logprobs["tokens"] == [*map(VOCABULARY.name_of, ids), " time"]
    assert logprobs["token_logprobs"] == [None, *(-own).tolist(), -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {VOCABULARY.name_of(7): -1.0}
    starts = [
        choice["text"].index(token, at)
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    ]
    assert starts == logprobs["text_offset"]


@pytest.mark.parametrize(
    ("fields", "best"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"top_logprobs": 2}, 2),
    ],
)
def test_responses_bring_logprobs(fields: dict[str, object], best: int) -> None:
    effort = {"reasoning": {"effort": "none"}}
    generation = prepare("responses", input="Hi", **fields, **effort)
    assert generation.n_logprobs == best
    stream, ids = generation.text, ids_of("a b")
    stream.start(0)
    for token in ids:
        stream.push(Token(token, -0.5, [(token, -0.5), (5, -1.0)][:best]))
    stream.finish(FinishReason.STOP)
    (item,) = msgspec.json.decode(stream.body())["output"]
    entries = item["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", " b"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [best] * 2
