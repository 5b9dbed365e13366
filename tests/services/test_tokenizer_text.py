"""Tokens to events: reproducible however they arrive, characters whole, stop strings held back."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepmesh.wire.messages import FinishReason, Submit, TokenRow
from deepmesh.wire.packed import pack_ids
from services.tokenizer.detokenize import Detokenizer, StopMatcher
from services.tokenizer.prepare import Generation, Preparer
from services.tokenizer.request import Request
from services.tokenizer.tokens import feed
from services.tokenizer.vocabulary import ModelError, Vocabulary
from tests.fakes import fake_logprobs
from tests.services.tokenizer_harness import HI, MODEL, PLAIN, TOKENIZER, ids_of, make_config
from tests.tiny import VOCAB_SIZE

VOCABULARY = Vocabulary((MODEL / "tokenizer.json").read_text("utf-8"))
PREPARER = Preparer(make_config(Path("/nowhere")), now_s=lambda: 1_700_000_100)
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">ü👋</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
OUTPUTS = [
    "Hello there, Grüße 👋🏽 日本",
    "hm, né</think>The answer 👋 is STOP here",
    f"I call</think>ok{CALL}",
    "never closed thinking 日",
    "",
]
TOOLS = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": HI,
        "tools": [{"type": "function", "function": TOOLS[0]}],
        "stop": ["STOP", "OP h"],
        "logprobs": True,
        "top_logprobs": 2,
    },
    "responses": {"input": "Hi", "tools": [{"type": "function", **TOOLS[0]}]},
    "messages": {
        "messages": HI,
        "max_tokens": 500,
        "tools": [{"name": "f", "input_schema": TOOLS[0]["parameters"]}],
        "stop_sequences": ["STOP"],
    },
    "completions": {"prompt": "x", "stop": ["STOP", "there"], "logprobs": 2, "echo": False},
}


def begin(protocol: str, *, stream: bool = True, **more: object) -> Request:
    """A request whose tokens the test feeds."""
    body = {"model": "tiny", "stream": stream, **BODIES[protocol], **more}
    rid = b"0123456789abcdef"
    submit = Submit(rid, protocol, msgspec.json.encode(body), 1, created_s=1_700_000_000)
    generation = PREPARER.prepare(submit, 8192)
    assert isinstance(generation, Generation)
    return Request(submit, "gateway-0", 0, generation=generation)


def play(request: Request, ids: list[int], cuts: list[int], reason: FinishReason) -> list[bytes]:
    """All events of a request whose tokens come in rows cut at `cuts`."""
    generation = request.generation
    assert generation is not None
    events: list[bytes] = []
    bounds = [0, *sorted(c for c in set(cuts) if 0 < c < len(ids)), len(ids)]
    for low, high in itertools.pairwise(bounds):
        if generation.text.stopped or low == high:
            break
        part = ids[low:high]
        logprobs = fake_logprobs(part, 2) if generation.n_logprobs >= 0 else (b"", b"", b"")
        events += feed(request, TokenRow(request.rid, low, pack_ids(part), *logprobs))
    if not request.has_started:
        events += generation.text.start(0)
    return events + generation.text.finish(reason)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(BODIES)), st.sampled_from(OUTPUTS), st.lists(st.integers(1, 60)))
@example("chat", OUTPUTS[2], list(range(60)))
@example("responses", OUTPUTS[2], [3])
def test_the_same_tokens_give_the_same_bytes(protocol: str, output: str, cuts: list[int]) -> None:
    ids = ids_of(output)
    once = play(begin(protocol), ids, [], FinishReason.STOP)
    again = play(begin(protocol), ids, cuts, FinishReason.STOP)
    assert once == again


@pytest.mark.parametrize("protocol", sorted(BODIES))
@pytest.mark.parametrize("output", OUTPUTS)
def test_streamed_and_plain_answers_agree(protocol: str, output: str) -> None:
    ids = ids_of(output)
    events = play(begin(protocol), ids, [], FinishReason.LENGTH)
    plain = begin(protocol, stream=False)
    assert play(plain, ids, [], FinishReason.LENGTH) == []
    assert plain.generation is not None
    body = msgspec.json.decode(plain.generation.text.body())
    assert told(protocol, stream_data(events)) == told_plain(protocol, body)


def stream_data(events: list[bytes]) -> list[dict[str, Any]]:
    data = [event.split(b"data: ", 1)[1] for event in events]
    return [msgspec.json.decode(line) for line in data if line.strip() != b"[DONE]"]


def told(protocol: str, data: list[dict[str, Any]]) -> tuple[str, list[str], str]:
    """Answer text, call ids, and finish reason of a stream."""
    match protocol:
        case "chat":
            deltas = [chunk["choices"][0]["delta"] for chunk in data]
            calls = [c for delta in deltas for c in delta.get("tool_calls") or () if "id" in c]
            text = "".join(delta.get("content") or "" for delta in deltas)
            ids = [call["id"] for call in calls]
            return text, ids, data[-1]["choices"][0]["finish_reason"]
        case "responses":
            return told_plain(protocol, data[-1]["response"])
        case "messages":
            blocks = [e["content_block"] for e in data if e["type"] == "content_block_start"]
            deltas = [e["delta"] for e in data if e["type"] == "content_block_delta"]
            ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
            text = "".join(delta.get("text", "") for delta in deltas)
            return text, ids, data[-2]["delta"]["stop_reason"]
        case _:
            text = "".join(chunk["choices"][0]["text"] for chunk in data)
            return text, [], data[-1]["choices"][0]["finish_reason"]


def told_plain(protocol: str, body: dict[str, Any]) -> tuple[str, list[str], str]:
    match protocol:
        case "chat":
            choice = body["choices"][0]
            calls = choice["message"].get("tool_calls") or []
            text = choice["message"]["content"] or ""
            return text, [call["id"] for call in calls], choice["finish_reason"]
        case "responses":
            items = body["output"]
            parts = [p for item in items if item["type"] == "message" for p in item["content"]]
            ids = [item["call_id"] for item in items if item["type"] == "function_call"]
            return "".join(part["text"] for part in parts), ids, body["status"]
        case "messages":
            text = "".join(b["text"] for b in body["content"] if b["type"] == "text")
            ids = [b["id"] for b in body["content"] if b["type"] == "tool_use"]
            return text, ids, body["stop_reason"]
        case _:
            choice = body["choices"][0]
            return choice["text"], [], choice["finish_reason"]


def test_call_ids_differ_between_calls_and_requests() -> None:
    ids = ids_of(f"x</think>{CALL}"), ids_of(f"x</think>{CALL.replace('invoke>', 'invoke>')}")
    _, (first,), _ = told("chat", stream_data(play(begin("chat"), ids[0], [], FinishReason.STOP)))
    other = begin("chat")
    submit = msgspec.structs.replace(other.submit, rid=b"another request!")
    generation = PREPARER.prepare(submit, 8192)
    assert isinstance(generation, Generation)
    other = Request(submit, "gateway-0", 0, generation=generation)
    _, (second,), _ = told("chat", stream_data(play(other, ids[1], [], FinishReason.STOP)))
    assert first != second


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12))
@example("👋🏽")
@example("日本語 né")
def test_completion_text_is_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    request = begin("completions", stop=None, logprobs=None)
    data = stream_data(play(request, ids, [], FinishReason.STOP))
    pieces = [chunk["choices"][0]["text"] for chunk in data]
    assert "".join(pieces) == text
    if "�" not in text:
        assert all("�" not in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_any_ids_decode_as_the_tokenizer_does(ids: list[int]) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert VOCABULARY.text_of(ids) == whole
    detokenizer = Detokenizer(VOCABULARY)
    pieces = "".join(detokenizer.push(token) for token in ids)
    assert whole.startswith(pieces)
    assert len(whole) - len(pieces) <= 1  # an unfinished character at the end


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 19)),
)
@example("Here is the English alphabet: ABC", ["DEFGHIJ"], [30])
@example("ABCDEFGHIJ", ["DEFGHIJ"], [4, 6])
def test_stop_strings(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    bounds = [0, *sorted(c for c in set(cuts) if c < len(text)), len(text)]
    for low, high in itertools.pairwise(bounds):
        sent += matcher.push(text[low:high])
        assert text.startswith(sent)
        if matcher.found:
            break
        behind = text[len(sent) : high]
        assert not behind or any(stop.startswith(behind) for stop in stops)  # not held for nothing
    if matcher.found:
        assert not any(stop in sent for stop in stops)
        assert any(text[len(sent) :].startswith(stop) for stop in stops)
    else:
        assert sent + matcher.flush() == text
        assert not any(stop in text for stop in stops)


def test_logprobs_stay_with_their_text() -> None:
    """A token whose text is held back brings its logprobs later, not earlier; none is lost."""
    ids = ids_of("go the ST UP then there")
    data = stream_data(play(begin("completions", stop=["STOP"]), ids, [], FinishReason.STOP))
    choices = [chunk["choices"][0] for chunk in data]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == "".join(choice["text"] for choice in choices) == TOKENIZER.decode(ids)
    for choice in choices[:-1]:
        assert choice["logprobs"]["tokens"], "text without its logprobs"


def test_parts_of_characters_have_names() -> None:
    ids = TOKENIZER.encode("👋", add_special_tokens=False).ids
    assert len(ids) > 1
    assert VOCABULARY.name_of(ids[0]).startswith("bytes:\\xf0")
    assert VOCABULARY.bytes_of(8_000_000) == b""


def test_only_byte_level_tokenizers_are_served() -> None:
    with pytest.raises(ModelError, match="byte-level"):
        Vocabulary('{"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}')


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_the_recipe_bears_any_tokens(protocol: str, ids: list[int]) -> None:
    """Untrained models say anything; no output may break the stream."""
    request = begin(protocol, **({} if protocol == "responses" else PLAIN))
    data = stream_data(play(request, ids, [1, 2, 3, 5, 8], FinishReason.LENGTH))
    assert data


CONTROL = sorted(VOCABULARY.control_ids - {TOKENIZER.token_to_id("<｜end▁of▁sentence｜>")})


def answer(request: Request, ids: list[int], cuts: list[int]) -> tuple[list[Any], list[int]]:
    """All that a client is told, but for usage, and the numbers of output tokens."""
    assert request.generation is not None
    events = play(request, ids, cuts, FinishReason.LENGTH)
    body = request.generation.text.body()
    data = stream_data(events) if events else [msgspec.json.decode(body)]
    counts: list[int] = []
    for event in data:
        for part in (event, event.get("response") or {}):
            usage = part.pop("usage", None) or {}
            counts += [usage[k] for k in ("completion_tokens", "output_tokens") if k in usage]
    return data, counts


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", sorted(BODIES))
@settings(max_examples=25, deadline=None)
@given(
    output=st.sampled_from(OUTPUTS),
    control=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(CONTROL)), max_size=9),
    cuts=st.lists(st.integers(1, 60)),
)
@example(output=OUTPUTS[0], control=[(n, CONTROL[n % len(CONTROL)]) for n in range(60)], cuts=[])
@example(output=OUTPUTS[2], control=[(n, CONTROL[n % len(CONTROL)]) for n in range(60)], cuts=[9])
def test_control_tokens_within_an_answer_are_counted_and_never_told(
    protocol: str,
    output: str,
    control: list[tuple[int, int]],
    cuts: list[int],
    *,
    stream: bool,
) -> None:
    """In no text, no logprobs; they break no character, no mark and no call."""
    more = {"stream_options": {"include_usage": True}} if stream and protocol == "chat" else {}
    clean = ids_of(output)
    ids = list(clean)
    for at, token in control:
        ids.insert(at, token)
    request = begin(protocol, stream=stream, **more)
    told, counts = answer(request, ids, cuts)
    assert told == answer(begin(protocol, stream=stream, **more), clean, [])[0]
    if counts:
        assert counts[-1] == request.position


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30) | st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_a_completion_shows_the_marks_but_no_control_tokens(ids: list[int]) -> None:
    data = stream_data(
        play(begin("completions", stop=None, logprobs=None), ids, [], FinishReason.LENGTH)
    )
    shown = [token for token in ids if token not in VOCABULARY.control_ids]
    whole = TOKENIZER.decode(shown, skip_special_tokens=False)
    text = "".join(chunk["choices"][0]["text"] for chunk in data)
    assert whole.startswith(text)
    assert len(whole) - len(text) <= 1  # an unfinished character at the end


@pytest.mark.parametrize("stream", [True, False])
def test_a_control_token_may_be_the_stop_string_of_a_completion(*, stream: bool) -> None:
    ids = ids_of("Hello<｜ref｜> there<｜User｜>more")
    request = begin("completions", stream=stream, stop=["<｜User｜>"])
    data, _ = answer(request, ids, [])
    text, _, reason = told("completions", data) if stream else told_plain("completions", data[0])
    assert (text, reason) == ("Hello there", "stop")


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_marks_that_mark_nothing_are_not_told(protocol: str) -> None:
    """Without tools, DSML has no meaning, and no answer opens its thinking again."""
    ids = ids_of("so</think>Hel｜DSML｜lo<think>, you</think>!")
    request = begin(protocol, stream=False, tools=None)
    data, _ = answer(request, ids, [])
    text, _, _ = told_plain(protocol, data[0])
    assert text == "Hello, you!"


def test_control_tokens_are_known_by_flag_or_spelling() -> None:
    texts = {"<｜User｜>": False, "[PAD]": True, "</think>": True, "｜DSML｜": True, "<b>": False}
    added = [
        {"id": at, "content": text, "special": special}
        for at, (text, special) in enumerate(texts.items())
    ]
    spec = {"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": added}
    assert Vocabulary(msgspec.json.encode(spec).decode()).control_ids == {0, 1}


def test_usage_counts_tokens_that_show_nothing() -> None:
    half = TOKENIZER.encode("👋", add_special_tokens=False).ids[:-1]
    for protocol, path in (("chat", "completion_tokens"), ("responses", "output_tokens")):
        request = begin(protocol, stream=False, logprobs=None, top_logprobs=None)
        play(request, [*ids_of("ok"), *half], [], FinishReason.LENGTH)
        assert request.generation is not None
        usage = msgspec.json.decode(request.generation.text.body())["usage"]
        assert usage[path] == len(ids_of("ok")) + len(half)
