"""Bad input: each is refused before any queue, with the field named."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmesh.wire.messages import ErrorCode, Generate, ResponseFailed, Submit
from services.tokenizer.answers import Answer
from services.tokenizer.fields import PROTOCOLS, How
from services.tokenizer.jobs import Follow, Job
from services.tokenizer.prepare import PROMPT_FIELD, Generation, Preparer
from services.tokenizer.refusal import Refusal
from services.tokenizer.service import prepare as try_to_prepare
from services.tokenizer.store_orders import Wanted
from services.tokenizer.vocabulary import Vocabulary
from tests.services.tokenizer_harness import HI, MODEL, PLAIN, Bench, bench, ids_of, make_config
from tests.tiny import VOCAB_SIZE

BASE: dict[str, dict[str, Any]] = {
    "chat": {"model": "tiny", "messages": HI},
    "responses": {"model": "tiny", "input": "Hi"},
    "messages": {"model": "tiny", "messages": HI, "max_tokens": 9},
    "count_tokens": {"model": "tiny", "messages": HI},
    "completions": {"model": "tiny", "prompt": "Hi"},
    "tokenize": {"model": "tiny", "prompt": "Hi"},
    "detokenize": {"model": "tiny", "tokens": [5]},
}
TOOL = {"type": "function", "function": {"name": "f"}}
MEANINGFUL = object()  # no rule's neutral value


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    return Preparer(make_config(Path("/nowhere")))


def prepare(
    preparer: Preparer, protocol: str, body: object, context: int = 8192
) -> Generation | Answer:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return preparer.prepare(Submit(bytes(16), protocol, raw, seed=1), context)


def refusal(preparer: Preparer, protocol: str, body: object, context: int = 8192) -> Refusal:
    with pytest.raises(Refusal) as caught:
        prepare(preparer, protocol, body, context)
    assert caught.value.detail.strip()
    return caught.value


REFUSED = [
    (protocol, name)
    for protocol, rules in PROTOCOLS.items()
    for name, rule in rules.items()
    if rule.how is How.REFUSED or rule.neutral
]


@pytest.mark.parametrize(("protocol", "field"), REFUSED)
def test_refused_fields_are_named_and_neutral_values_pass(
    preparer: Preparer, protocol: str, field: str
) -> None:
    found = refusal(preparer, protocol, BASE[protocol] | {field: {"some": "wish"}})
    assert (found.code, found.param) == (ErrorCode.INVALID, field)
    assert field in found.detail
    for value in (None, *PROTOCOLS[protocol][field].neutral):
        prepare(preparer, protocol, BASE[protocol] | {field: value})


@pytest.mark.parametrize("protocol", sorted(BASE))
def test_unknown_fields_are_named(preparer: Preparer, protocol: str) -> None:
    found = refusal(preparer, protocol, BASE[protocol] | {"temprature": 1})
    assert found.param == "temprature"
    assert prepare(preparer, protocol, BASE[protocol] | {"temprature": None})


@pytest.mark.parametrize("protocol", sorted(BASE))
def test_unknown_model(preparer: Preparer, protocol: str) -> None:
    found = refusal(preparer, protocol, BASE[protocol] | {"model": "gpt-9", "messages": []})
    assert (found.code, found.param) == (ErrorCode.UNKNOWN_MODEL, "model")
    assert "gpt-9" in found.detail


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages", "completions"])
@pytest.mark.parametrize("model", [5, "missing"])
def test_model_must_be_named(preparer: Preparer, protocol: str, model: object) -> None:
    body = BASE[protocol] | {"model": model}
    if model == "missing":
        del body["model"]
    assert refusal(preparer, protocol, body).param == "model"


@pytest.mark.parametrize("protocol", sorted(BASE))
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"5", b'{"model": NaN}', b"[" * 100_000]
)
def test_malformed_json(preparer: Preparer, protocol: str, body: bytes) -> None:
    assert refusal(preparer, protocol, body).code is ErrorCode.INVALID


def test_half_a_surrogate_pair_is_no_text(preparer: Preparer) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}'
    assert refusal(preparer, "chat", body).code is ErrorCode.INVALID


def test_deeply_nested_bodies(preparer: Preparer) -> None:
    deep = b'{"model":"tiny","metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"
    assert refusal(preparer, "chat", deep).code is ErrorCode.INVALID
    some = b'{"a":' * 300 + b"1" + b"}" * 300
    body = b'{"model":"tiny","messages":[{"role":"user","content":' + some + b"}]}"
    assert refusal(preparer, "chat", body).code is ErrorCode.INVALID


LIMITS = {
    "chat": ["max_tokens", "max_completion_tokens"],
    "responses": ["max_output_tokens"],
    "messages": ["max_tokens"],
    "completions": ["max_tokens"],
}


@pytest.mark.parametrize("value", [0, -1, 393_217, 10**30, 1.5, True, "5", [5]])
@pytest.mark.parametrize(("protocol", "field"), [(p, f) for p in LIMITS for f in LIMITS[p]])
def test_absurd_limits(preparer: Preparer, protocol: str, field: str, value: object) -> None:
    found = refusal(preparer, protocol, BASE[protocol] | {field: value})
    assert (found.code, found.param) == (ErrorCode.INVALID, field)


BAD_VALUES = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "x"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", [1]),
    (f"logit_bias.{VOCAB_SIZE}", {str(VOCAB_SIZE): 1}),
    ("logit_bias.x", {"x": 1}),
    ("logit_bias.-1", {"-1": 1}),
    ("logit_bias.5", {"5": 101}),
    ("logit_bias.5", {"5": True}),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", "x"),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("stop_token_ids[1]", [5, VOCAB_SIZE]),
    ("stop_token_ids[0]", [True]),
    ("stop_token_ids", 5),
    ("cache_salt", 5),
    ("stream", "yes"),
]


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages", "completions"])
@pytest.mark.parametrize(("param", "value"), BAD_VALUES)
def test_bad_sampling_values(preparer: Preparer, protocol: str, param: str, value: object) -> None:
    field = param.split(".")[0].split("[")[0]
    found = refusal(preparer, protocol, BASE[protocol] | {field: value})
    assert (found.code, found.param) == (ErrorCode.INVALID, param)


def test_min_tokens_must_fit(preparer: Preparer) -> None:
    body = BASE["chat"] | {"min_tokens": 6, "max_tokens": 5}
    assert refusal(preparer, "chat", body).param == "min_tokens"
    assert refusal(preparer, "chat", BASE["chat"] | {"min_tokens": 9000}).param == "min_tokens"


def image(kind: str, **more: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, **more}]}]


CHAT = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "x"}),
    ("messages", {"messages": None}),
    ("messages[0]", {"messages": ["x"]}),
    ("messages[1]", {"messages": [*HI, {"role": "wizard", "content": "x"}]}),
    ("messages[0]", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "y"}]}),
    ("messages[0].content[1].type", {"messages": image("image_url", image_url={"url": "x"})}),
    ("messages[0].content[1].type", {"messages": image("input_audio", input_audio={})}),
    ("messages[0].content[1].type", {"messages": image("file", file={"file_id": "x"})}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop[0]", {"stop": [5]}),
    ("stop", {"stop": 5}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": True}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("logprobs", {"logprobs": 5}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": "sometimes", "tools": [TOOL], **PLAIN}),
    ("tools", {"tools": 5}),
    ("reasoning_effort", {"reasoning_effort": "some"}),
    ("thinking", {"thinking": True}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    ("chat_template_kwargs.depth", {"chat_template_kwargs": {"depth": 3}}),
    ("enable_thinking", {"chat_template_kwargs": {"enable_thinking": "no"}}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.x", {"stream": True, "stream_options": {"x": 1}}),
    ("include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": {"type": "json_object"}}),  # no "json" in the prompt
]


@pytest.mark.parametrize(("param", "change"), CHAT)
def test_chat(preparer: Preparer, param: str, change: dict[str, Any]) -> None:
    found = refusal(preparer, "chat", BASE["chat"] | change)
    assert (found.code, found.param) == (ErrorCode.INVALID, param)


RESPONSES = [
    ("input", {"input": []}),
    ("input", {"input": None}),
    ("input", {"input": 5}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].content[1].type", {"input": image("input_image", image_url="data:,")}),
    ("input[0].content[1].type", {"input": image("input_file", file_id="x")}),
    ("store", {"store": True}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("include[0]", {"include": ["file_search_call.results"]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].type", {"tools": [{"type": "mcp"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
    ("reasoning", {"reasoning": {"effort": "some"}}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "strict": True}}}),
    ("top_logprobs", {"top_logprobs": 21}),
]


@pytest.mark.parametrize(("param", "change"), RESPONSES)
def test_responses(preparer: Preparer, param: str, change: dict[str, Any]) -> None:
    found = refusal(preparer, "responses", BASE["responses"] | change)
    assert (found.code, found.param) == (ErrorCode.INVALID, param)


MESSAGES = [
    ("messages", {"messages": []}),
    ("messages[1].content", {"messages": [*HI, {"role": "assistant", "content": ""}]}),
    ("messages[0].content[1].type", {"messages": image("image", source={})}),
    ("messages[0].content[1].type", {"messages": image("document", source={})}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice.type", {"tool_choice": {"type": "some"}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    (
        "tools[0].input_schema.type",
        {"tools": [{"name": "f", "input_schema": {}, "strict": True}]},
    ),
    ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
    ("stop_sequences[0]", {"stop_sequences": [""]}),
    ("system", {"system": 5}),
]


@pytest.mark.parametrize(("param", "change"), MESSAGES)
@pytest.mark.parametrize("protocol", ["messages", "count_tokens"])
def test_messages(preparer: Preparer, protocol: str, param: str, change: dict[str, Any]) -> None:
    found = refusal(preparer, protocol, BASE[protocol] | change)
    assert (found.code, found.param) == (ErrorCode.INVALID, param)


COMPLETIONS = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt[1]", {"prompt": ["a", 5]}),
    ("prompt[1]", {"prompt": [[5], []]}),
    ("prompt", {"prompt": 5}),
    ("prompt[1]", {"prompt": [5, VOCAB_SIZE]}),
    ("prompt[0]", {"prompt": [-1]}),
    ("prompt[0]", {"prompt": [True]}),
    ("prompt[1]", {"prompt": [5, "x"]}),
    ("prompt[0]", {"prompt": [1.0]}),
    ("suffix", {"suffix": "end"}),
    ("best_of", {"best_of": 3}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": True}),
]


@pytest.mark.parametrize(("param", "change"), COMPLETIONS)
def test_completions(preparer: Preparer, param: str, change: dict[str, Any]) -> None:
    found = refusal(preparer, "completions", BASE["completions"] | change)
    assert (found.code, found.param) == (ErrorCode.INVALID, param)


@pytest.mark.parametrize(
    ("protocol", "param", "change"),
    [
        ("tokenize", "prompt", {"messages": HI}),
        ("tokenize", "prompt", {"prompt": None}),
        ("detokenize", "tokens[0]", {"tokens": [9000]}),
        ("detokenize", "tokens", {"tokens": "x"}),
        ("detokenize", "tokens", {"tokens": None}),
    ],
)
def test_tokenizer_questions(
    preparer: Preparer, protocol: str, param: str, change: dict[str, Any]
) -> None:
    assert refusal(preparer, protocol, BASE[protocol] | change).param == param


@pytest.mark.timeout(30)
def test_the_bad_one_of_very_many_messages_is_found_without_parsing_all_for_each(
    preparer: Preparer,
) -> None:
    function = {"name": "f", "description": "d" * 1_000_000, "parameters": {"type": "object"}}
    messages = [{"role": "user", "content": "x"} for _ in range(40_000)]
    messages[30_000] = {"role": "king", "content": "x"}
    body = {
        **BASE["chat"],
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
    }
    assert refusal(preparer, "chat", body).param == "messages[30000]"


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages", "completions"])
def test_a_prompt_that_fills_the_context_names_both_numbers(
    preparer: Preparer, protocol: str
) -> None:
    fits = prepare(preparer, protocol, BASE[protocol])
    assert isinstance(fits, Generation)
    found = refusal(preparer, protocol, BASE[protocol], context=fits.prompt_len)
    assert (found.code, found.param) == (ErrorCode.TOO_LONG, PROMPT_FIELD[protocol])
    assert f"{fits.prompt_len} tokens" in found.detail
    barely = prepare(preparer, protocol, BASE[protocol], context=fits.prompt_len + 1)
    assert isinstance(barely, Generation)
    assert barely.max_tokens == 1


def test_formats_that_only_the_prompt_asks_for_pass(preparer: Preparer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    messages = [{"role": "user", "content": "Answer in json."}]
    for wanted in ({"type": "text"}, {"type": "json_object"}, schema):
        body = {"model": "tiny", "messages": messages, "response_format": wanted}
        assert isinstance(prepare(preparer, "chat", body), Generation)


@pytest.mark.parametrize("protocol", sorted(PROMPT_FIELD))
def test_what_cannot_fit_is_refused_before_it_is_encoded(preparer: Preparer, protocol: str) -> None:
    digits = "123" * (1 << 20)  # encoding them takes seconds
    field = PROMPT_FIELD[protocol]
    text: object = [{"role": "user", "content": digits}] if field == "messages" else digits
    began = time.process_time()
    refused = refusal(preparer, protocol, BASE[protocol] | {field: text})
    assert time.process_time() - began < 2
    assert (refused.code, refused.param) == (ErrorCode.TOO_LONG, field)
    longest = preparer.max_token_bytes
    assert longest is not None
    assert int(re.findall(r"at least (\d+) tokens", refused.detail)[0]) >= len(digits) // longest
    assert "8192" in refused.detail


def test_no_text_that_fits_is_refused_for_its_size(preparer: Preparer) -> None:
    spec = json.loads((MODEL / "tokenizer.json").read_text())
    longest = max(spec["model"]["vocab"], key=len)
    prompt = longest * 100
    count = len(ids_of(prompt))
    body = BASE["completions"] | {"prompt": prompt, "add_special_tokens": False}
    outcome = prepare(preparer, "completions", body, context=count + 1)
    assert isinstance(outcome, Generation)
    assert outcome.prompt_len == count


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_no_token_stands_for_more_bytes_than_the_longest(preparer: Preparer, text: str) -> None:
    assert preparer.max_token_bytes is not None
    assert len(text.encode()) <= len(ids_of(text)) * preparer.max_token_bytes


@pytest.mark.parametrize(
    "lossy",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Removed"}},
        {"added_tokens": [{"id": 0, "content": "<a>", "lstrip": True}]},
    ],
)
def test_a_vocabulary_that_drops_bytes_gives_no_bound(lossy: dict[str, object]) -> None:
    spec = json.loads((MODEL / "tokenizer.json").read_text())
    assert Vocabulary(json.dumps(spec)).max_token_bytes
    assert Vocabulary(json.dumps(spec | lossy)).max_token_bytes is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "function", "name", "effort", "a"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_json_is_answered_or_refused(preparer: Preparer, data: st.DataObject) -> None:
    protocol = data.draw(st.sampled_from(sorted(BASE)))
    names = st.sampled_from(sorted(PROTOCOLS[protocol]))
    changes = data.draw(st.dictionaries(names, JSON, max_size=3))
    raw = msgspec.json.encode(BASE[protocol] | changes)
    outcome = try_to_prepare(preparer, Submit(bytes(16), protocol, raw, seed=1), 8192)
    if isinstance(outcome, Refusal):
        assert outcome.code is not ErrorCode.INTERNAL, outcome.detail


def test_refusals_travel_and_nothing_reaches_the_scheduler(tmp_path: Path) -> None:
    with bench(tmp_path) as mesh:
        for protocol, body in BASE.items():
            rid = mesh.gateway.submit(protocol, body | {"model": "gpt-9"})
            end = mesh.gateway.reply(rid).end
            assert isinstance(end, ResponseFailed)
            assert (end.code, end.param) == (ErrorCode.UNKNOWN_MODEL, "model")
        rid = mesh.gateway.submit("chat", BASE["chat"] | {"max_tokens": 0})
        end = mesh.gateway.reply(rid).end
        assert isinstance(end, ResponseFailed)
        assert (end.code, end.param) == (ErrorCode.INVALID, "max_tokens")
        assert not mesh.scheduler.mail


class HeldPreparer(Preparer):
    """Long bodies wait in their thread until the test lets them go."""

    go = threading.Event()

    def prepare(
        self,
        submit: Submit,
        context: int,
        record: bytes | None = None,
        fingerprints: tuple[str, ...] = (),
    ) -> Generation | Answer | Wanted | Job | Follow:
        if len(submit.body) > 1 << 20:
            assert self.go.wait(20)
        return super().prepare(submit, context, record, fingerprints)


def test_the_bytes_in_preparation_are_bounded(tmp_path: Path) -> None:
    HeldPreparer.go.clear()
    mesh = Bench(make_config(tmp_path), make_preparer=HeldPreparer)
    try:
        large = BASE["chat"] | {"messages": [{"role": "user", "content": " " * (17 << 20)}]}
        first = mesh.gateway.submit("chat", large)
        second = mesh.gateway.submit("chat", large)
        end = mesh.gateway.reply(second).end
        assert isinstance(end, ResponseFailed)
        assert end.code is ErrorCode.OVERLOADED
        assert end.retry_after_s > 0
        mesh.gateway.submit("chat", BASE["chat"])  # a short one is not held up
        mesh.scheduler.expect(Generate)
        HeldPreparer.go.set()
        end = mesh.gateway.reply(first).end
        assert isinstance(end, ResponseFailed)
        assert end.code is ErrorCode.TOO_LONG
        third = mesh.gateway.reply(mesh.gateway.submit("chat", large)).end
        assert isinstance(third, ResponseFailed)
        assert third.code is ErrorCode.TOO_LONG  # there is room again
    finally:
        HeldPreparer.go.set()
        mesh.close()


class PanicException(BaseException):
    """As pyo3 raises it."""


class PanickingPreparer(Preparer):
    """The recipe panics while it converts."""

    def prepare(
        self,
        submit: Submit,
        context: int,
        record: bytes | None = None,
        fingerprints: tuple[str, ...] = (),
    ) -> Generation | Answer | Wanted | Job | Follow:
        if b"panic" in submit.body:
            raise PanicException("index out of bounds")
        return super().prepare(submit, context, record, fingerprints)


def test_a_panic_in_preparation_fails_its_request_alone(tmp_path: Path) -> None:
    mesh = Bench(make_config(tmp_path), make_preparer=PanickingPreparer)
    try:
        for size in (1, 100_000):  # in the loop, in a thread
            text = "panic" * size
            body = BASE["chat"] | {"messages": [{"role": "user", "content": text}]}
            end = mesh.gateway.reply(mesh.gateway.submit("chat", body)).end
            assert isinstance(end, ResponseFailed)
            assert end.code is ErrorCode.INTERNAL
        mesh.gateway.submit("chat", BASE["chat"])
        mesh.scheduler.expect(Generate)
    finally:
        mesh.close()
