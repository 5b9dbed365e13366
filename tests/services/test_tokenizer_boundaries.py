"""However the model's tokens cut a text, clients get the same text, calls, reasons and counts."""

import itertools
import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepmesh.wire.messages import FinishReason
from services.tokenizer.request import Request
from services.tokenizer.text_stream import Token
from services.tokenizer.vocabulary import Vocabulary
from tests.services.test_tokenizer_text import begin, stream_data
from tests.services.tokenizer_harness import MODEL, TOKENIZER, ids_of

VOCABULARY = Vocabulary((MODEL / "tokenizer.json").read_text("utf-8"))
BYTE_IDS = {
    VOCABULARY.bytes_of(token): token
    for token in range(TOKENIZER.get_vocab_size())
    if len(VOCABULARY.bytes_of(token)) == 1
}
MARKS = {mark: TOKENIZER.token_to_id(mark) for mark in ("</think>", "｜DSML｜")}
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">ü👋 < b</｜DSML｜ parameter>\n'
    '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true"></｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
CALLS = [("f", '{"a": "ü👋 < b"}'), ("f", '{"a": ""}')]
CASES = [  # what the model says; thinking, text and calls that clients get, and why it ends
    ("Hm, é</think>Grüße 👋🏽", ("Hm, é", "Grüße 👋🏽", [], "stop")),
    (f"I call</think>ok{CALL}", ("I call", "ok", CALLS, "tool_calls")),
    ("I call</think>a < b and </th and <｜DS", ("I call", "a < b and </th and <｜DS", [], "stop")),
    ("no end of thinking 日", ("no end of thinking 日", "", [], "stop")),
    (
        "t</think>Here is the English alphabet: ABC",
        ("t", "Here is the English alphabet: ABC", [], "stop"),
    ),
    ("t</think>ABCDEFGHIJ and more", ("t", "ABC", [], "stop")),
]
STOP = "DEFGHIJ"


def cut_ids(text: str, cuts: list[int]) -> list[int]:
    """Tokens of a text whose bytes no token may cross at `cuts`; single bytes where it must be.

    Only the marks themselves are whole: each is one token of the vocabulary, and what spells one
    with other tokens is text, to the model and to the recipe alike.
    """
    ids: list[int] = []
    at = 0
    for piece in re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text):
        ids += [MARKS[piece]] if piece in MARKS else cut_bytes(piece.encode(), cuts, at)
        at += len(piece.encode())
    assert b"".join(map(VOCABULARY.bytes_of, ids)) == text.encode()
    return ids


def cut_bytes(data: bytes, cuts: list[int], at: int) -> list[int]:
    bounds = sorted({0, len(data), *(cut - at for cut in cuts if 0 < cut - at < len(data))})
    ids: list[int] = []
    for low, high in itertools.pairwise(bounds):
        piece = data[low:high]
        try:
            ids += ids_of(piece.decode())
        except UnicodeDecodeError:
            ids += [BYTE_IDS[piece[i : i + 1]] for i in range(len(piece))]
    return ids


def feed(request: Request, ids: list[int]) -> tuple[list[bytes], int]:
    """All events, and how many tokens were taken."""
    generation = request.generation
    assert generation is not None
    events, count = generation.text.start(0), 0
    for token in ids:
        best = [(token, -0.5), (5, -1.0)] if generation.n_logprobs > 0 else []
        events += generation.text.push(Token(token, -0.5, best))
        count += 1
        if generation.text.stopped:
            break
    return events + generation.text.finish(FinishReason.STOP), count


def told_chat(data: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]], str]:
    """Thinking, text, calls and reason of a chat stream."""
    thought, text, calls, reason = "", "", list[list[str]](), ""
    for chunk in data:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            kinds = [k for k in ("reasoning_content", "content", "tool_calls") if delta.get(k)]
            assert len(kinds) <= 1, "a delta is of one kind"
            thought += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"].get("arguments") or ""
            reason = choice["finish_reason"] or reason
    return thought, text, [(name, arguments) for name, arguments in calls], reason


CUTS = st.lists(st.integers(0, 400), max_size=60)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(CASES), CUTS, st.booleans())
@example(CASES[0], list(range(200)), True)
@example(CASES[1], list(range(400)), True)
@example(CASES[1], list(range(400)), False)
@example(CASES[2], list(range(400)), False)
def test_a_chat_is_the_same_however_its_tokens_are_cut(
    case: tuple[str, tuple[str, str, list[tuple[str, str]], str]], cuts: list[int], logprobs: bool
) -> None:
    output, told = case
    ids = cut_ids(output, cuts)
    wish = {"logprobs": logprobs, "top_logprobs": 2 if logprobs else None}
    request = begin("chat", stop=[STOP], stream_options={"include_usage": True}, **wish)
    events, count = feed(request, ids)
    *chunks, last = stream_data(events)
    assert told_chat(chunks) == told
    assert last["usage"]["completion_tokens"] == count
    assert all("�" not in event.decode() for event in events)
    plain = begin("chat", stream=False, stop=[STOP], **wish)
    feed(plain, ids)
    assert plain.generation is not None
    body = msgspec.json.decode(plain.generation.text.body())
    message = body["choices"][0]["message"]
    assert (message.get("reasoning_content") or "", message["content"] or "") == told[:2]
    assert body["usage"] == last["usage"]


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(CASES[:4]), CUTS)
@example(CASES[1], list(range(400)))
def test_messages_and_responses_say_what_the_chat_says(
    case: tuple[str, tuple[str, str, list[tuple[str, str]], str]], cuts: list[int]
) -> None:
    output, (thought, text, calls, _) = case
    ids = cut_ids(output, cuts)
    messages = begin("messages", stream=False)
    feed(messages, ids)
    assert messages.generation is not None
    blocks = msgspec.json.decode(messages.generation.text.body())["content"]
    assert "".join(b["thinking"] for b in blocks if b["type"] == "thinking") == thought
    assert "".join(b["text"] for b in blocks if b["type"] == "text") == text
    used = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    assert used == [(name, msgspec.json.decode(arguments)) for name, arguments in calls]
    responses = begin("responses", stream=False)
    feed(responses, ids)
    assert responses.generation is not None
    items = msgspec.json.decode(responses.generation.text.body())["output"]
    made = [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
    assert made == calls
    parts = [part for i in items if i["type"] == "message" for part in i["content"]]
    assert "".join(part["text"] for part in parts) == text


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), CUTS, st.lists(st.text(min_size=1, max_size=3), max_size=2))
@example("Here is the English alphabet: ABC", [], ["DEFGHIJ"])
@example("ABCDEFGHIJ", list(range(12)), ["DEFGHIJ"])
def test_logprobs_of_a_completion_stay_with_their_text(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    """Each token comes once and in order, its offset is where its text begins, and no chunk holds
    text whose token is still to come."""
    ids = cut_ids(text, cuts)
    request = begin("completions", stop=stops or None, logprobs=2)
    events, _ = feed(request, ids)
    data = stream_data(events)
    sent, tokens, offsets = "", list[str](), list[int]()
    for chunk in data:
        choice = chunk["choices"][0]
        sent += choice["text"]
        logprobs = choice["logprobs"]
        tokens += logprobs["tokens"]
        offsets += logprobs["text_offset"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"])
        whole = [token for token in tokens if not token.startswith("bytes:")]
        if len(whole) == len(tokens) and choice["finish_reason"] is None:
            assert len("".join(tokens)) >= len(sent)
    assert text.startswith(sent)
    assert tokens == [VOCABULARY.name_of(token) for token in ids[: len(tokens)]]
    assert offsets == sorted(offsets)
    assert all(offset <= len(sent) for offset in offsets)


def chat_logprobs(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        entry
        for chunk in data
        for choice in chunk["choices"]
        for kind in ("reasoning_content", "content")
        for entry in ((choice.get("logprobs") or {}).get(kind) or ())
    ]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CASES[:1] + CASES[4:5]), CUTS)
def test_a_chat_brings_the_logprobs_of_all_text_that_it_sends(
    case: tuple[str, tuple[str, str, list[tuple[str, str]], str]], cuts: list[int]
) -> None:
    output, (thought, text, _, _) = case
    events, _ = feed(begin("chat", stop=[STOP]), cut_ids(output, cuts))
    entries = chat_logprobs(stream_data(events))
    told = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert told.replace("</think>", "") == thought + text
    assert all(entry["logprob"] == -0.5 for entry in entries)


@pytest.mark.parametrize("protocol", ["chat", "completions"])
def test_a_prompt_that_ends_within_a_character_gives_no_broken_text(protocol: str) -> None:
    """Two of three bytes in the prompt; the output begins with the third: no U+FFFD is sent."""
    whole = "日".encode()
    head = [BYTE_IDS[whole[i : i + 1]] for i in range(2)]
    rest = [BYTE_IDS[whole[2:]], *ids_of("本 ok")]
    if protocol == "completions":
        request = begin(protocol, prompt=head, stop=None, logprobs=None, echo=True)
    else:
        request = begin(protocol, stop=None, logprobs=None, top_logprobs=None)
    events, _ = feed(request, rest)
    text = "".join(
        choice.get("text") or choice.get("delta", {}).get("reasoning_content") or ""
        for chunk in stream_data(events)
        for choice in chunk["choices"]
    )
    if protocol == "completions":
        assert text == "日本 ok"
    assert text.endswith("本 ok")


def test_tools_that_may_not_be_called_leave_the_text_alone() -> None:
    """tool_choice none: markup of calls is the model's mistake, not a call."""
    request = begin("chat", tool_choice="none")
    events, _ = feed(request, ids_of(f"x</think>ok{CALL}"))
    thought, text, calls, reason = told_chat(stream_data(events))
    assert (thought, calls, reason) == ("x", [], "stop")
    assert text.startswith("ok")


def test_thinking_that_never_ends_is_thinking_alone() -> None:
    for protocol in ("chat", "messages", "responses"):
        request = begin(protocol, stream=False)
        feed(request, ids_of("on and on"))
        assert request.generation is not None
        body = request.generation.text.body().decode()
        assert "on and on" in body
        answer = msgspec.json.decode(body)
        if protocol == "chat":
            message = answer["choices"][0]["message"]
            assert message["reasoning_content"] == "on and on"
            assert not message["content"]
