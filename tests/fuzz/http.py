"""Bodies, queries and grammars of clients: an answer or a refusal within a second, never a bug."""

import time
from typing import Any

import msgspec

from deepmesh.grammar_judge import judge
from deepmesh.grammars import Kind, make_grammar
from deepmesh.wire.messages import ErrorCode, Submit
from services.tokenizer.generation import Generation
from services.tokenizer.refusal import Refusal
from services.tokenizer.service import prepare
from tests.fuzz.services import _preparer
from tests.fuzz.source import Source
from tests.fuzz.trees import damaged

LIMIT_S = 1.0
MAX_DETAIL = 4096  # characters of a refusal: it goes into an answer, a span and a log
CONTEXT = 512
_SCHEMA: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,9}$", "maxLength": 9},
        "b": {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["x", 1, None]}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "number", "multipleOf": 0.5, "format": "date"}},
}
_TOOL: Any = {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_SAMPLING: Any = {
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["a", "b"],
    "seed": 5,
    "stream": True,
    "model": "tiny",
}
_EXTRA: Any = {
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.5, "8": -100},
    "n": 2,
    "stop_token_ids": [5, 6],
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2, 3],
    "min_tokens": 1,
    "priority": 1,
    "cache_salt": "s",
}
_IMAGE: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}
BODIES: tuple[tuple[str, Any], ...] = (
    (
        "chat",
        {
            **_SAMPLING,
            **_EXTRA,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, _IMAGE]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "r"},
                {"role": "user", "content": "q", "name": "n"},
            ],
            "tools": [{"type": "function", "function": _TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_tokens": 5,
            "logprobs": True,
            "top_logprobs": 3,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "high",
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "metadata": {"a": "b"},
            "user": "u",
        },
    ),
    (
        "chat",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True},
            },
        },
    ),
    ("chat", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 2}),
    (
        "completions",
        {
            **_SAMPLING,
            **_EXTRA,
            "prompt": ["a", "b"],
            "max_tokens": 3,
            "echo": True,
            "logprobs": 2,
            "prompt_logprobs": None,
        },
    ),
    ("completions", {"model": "tiny", "prompt": [5, 6, 7], "guided_regex": "(a|b)+"}),
    ("completions", {"model": "tiny", "prompt": "x", "guided_choice": ["a", "b"]}),
    ("completions", {"model": "tiny", "prompt": "x", "guided_grammar": 'root ::= "a" | "b"'}),
    (
        "responses",
        {
            "model": "tiny",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
                {"role": "user", "content": "q"},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **_TOOL}],
            "tool_choice": "auto",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
            "max_output_tokens": 9,
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "metadata": {},
            "store": False,
        },
    ),
    (
        "messages",
        {
            "model": "tiny",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": True}],
                },
                {"role": "assistant", "content": "So"},
            ],
            "tools": [{"name": "f", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["a"],
            "metadata": {"user_id": "u"},
        },
    ),
    ("count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
    ("tokenize", {"model": "tiny", "prompt": "a b", "return_token_strs": True}),
    ("tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("detokenize", {"model": "tiny", "tokens": [1, 2, 3]}),
    ("models", {"id": "tiny"}),
    ("response", {"id": "resp_1", "stream": True, "starting_after": 4}),
    ("response_items", {"id": "resp_1", "limit": 5, "after": "x"}),
    ("response_delete", {"id": "resp_1"}),
    ("response_cancel", {"id": "resp_1"}),
)
_STORED = b'{"response": {"id": "resp_1", "status": "completed", "output": []}, "history": []}'
_NUMBERS = (b"1e999", b"-0", b"9" * 400, b"1." + b"0" * 300, b"NaN", b"Infinity", b"-1e-400")
_TEXTS = (rb'"\ud800"', b'"\xff\xfe"', rb'"\u0000"', b'"' + b"a" * 70_000 + b'"', b'""')


def bodies(data: bytes) -> None:
    """Whatever a client sends to any route of the API."""
    source = Source(data)
    protocol, body = source.pick(BODIES)
    text = msgspec.json.encode(damaged(body, source))
    for _ in range(source.below(3)):
        text = _spoilt(text, source)
    record = source.pick((None, None, b"", _STORED, _STORED[: source.below(80)]))
    began = time.process_time()
    found = prepare(_preparer(), Submit(b"r" * 16, protocol, text, 5, created_s=1), CONTEXT, record)
    took_s = time.process_time() - began
    assert took_s < LIMIT_S, f"{took_s:.2f} s"
    if isinstance(found, Refusal):
        assert found.code is not ErrorCode.INTERNAL, found.detail
        assert len(found.detail) <= MAX_DETAIL, "an answer that repeats the question"
        msgspec.json.encode(found.detail)
    elif isinstance(found, Generation):
        assert len(found.choices) <= 128
        assert found.max_tokens <= CONTEXT


def _spoilt(text: bytes, source: Source) -> bytes:
    """What is no JSON, or JSON that no encoder writes: twice the same key, deep, huge numbers."""
    at = source.below(len(text) + 1)
    match source.below(7):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + source.take(1 + source.below(4)) + text[at + 1 :]
        case 2:
            return b"[" * 5000 + text
        case 3:
            return text[:-1] + b"," + text[1:] if text[:1] == b"{" else text * 2
        case 4:
            return text[:-1] + b',"seed":' + source.pick(_NUMBERS) + b"}"
        case 5:
            key = source.pick((b"user", b"model", b"stop", b"cache_salt", b"prompt", b"input"))
            return text[:-1] + b',"' + key + b'":' + source.pick(_TEXTS) + b"}"
        case _:
            depth = 1 + source.below(3000)
            return text[:-1] + b',"metadata":' + b'{"a":' * depth + b"1" + b"}" * (depth + 1)


def grammars(data: bytes) -> None:
    """Schemas, regular expressions and Lark of clients: compiled or refused within their limits."""
    source = Source(data)
    kind = source.pick(_KINDS)
    began = time.process_time()
    if kind == "json_schema":
        text = msgspec.json.encode(damaged(_SCHEMA, source)).decode()
    else:
        parts = _REGEX if kind == "regex" else _LARK
        text = "".join(source.pick(parts) for _ in range(1 + source.below(30)))
        text += source.take(source.below(8)).decode("latin-1")
        text = text if kind == "regex" else f"start: {text}\n"
    problem = judge(make_grammar(kind, text))
    took_s = time.process_time() - began
    assert took_s < LIMIT_S, f"{took_s:.2f} s"
    assert isinstance(problem, str)


_KINDS: tuple[Kind, ...] = ("json_schema", "regex", "lark", "tools")
_REGEX = (
    *("a", "b", ".", "[a-z]", r"\w", r"\d", r"\p{L}", "(", ")", "|", "*", "+", "?", "{1,50}"),
    *("{1000}", "{1,}", "(a|b)*", "(.*)*", "[^a]", "é", "(?i)", "~", "&", "\\", "[", "^", "$"),
)
_LARK = (
    *('"a"', "/b+/", "/(a|b)*c{1,90}/", "start", "X", "|", "(", ")", "*", "?", "+", "\n", ":"),
    *("{1,99}", "[", "]", "\nX: /[a-z]+/\n", "\nx: x x | ", "%ignore /a/", "%json {", "}", '"'),
    *("<[5]>", "%import common.INT", "@", "->", "\n// c\n", "[lazy]", "[max_tokens=9]", "~", "&"),
)


def wire(data: bytes) -> None:
    """The decoder of every frame, under garbage and under damaged messages."""
    from deepmesh.wire import codec
    from tests.fuzz.mail import HEADER, frames_of
    from tests.wire.examples import EXAMPLES

    source = Source(data)
    if source.below(3) == 0:
        frames = [HEADER if source.below(2) else source.take(12), source.rest()]
    else:
        frames = frames_of(source.pick(EXAMPLES), source)
        if source.below(2):
            at = source.below(len(frames[1]))
            frames[1] = frames[1][:at] + source.take(3) + frames[1][at + source.below(4) :]
    try:
        message = codec.decode(frames).message
    except codec.WireError:
        return
    again = codec.encode(message, seq=0, sent_ns=0)  # bytes: a NaN is not equal to itself
    assert codec.encode(codec.decode(again).message, seq=0, sent_ns=0) == again
