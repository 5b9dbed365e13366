"""Requests of every protocol through the tokenizer service, over real sockets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepmesh.config import TokenizerConfig
from deepmesh.wire.messages import (
    Ack,
    FinishReason,
    Generate,
    ResponseFinished,
    SamplingParams,
    StopAt,
)
from deepmesh.wire.packed import unpack_ids
from tests.fakes import Reply
from tests.services.tokenizer_harness import EOS, HI, PLAIN, TOKENIZER, Bench, bench, ids_of

CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("m")) as made:
        yield made


def run(
    mesh: Bench,
    protocol: str,
    body: dict[str, Any],
    output: str,
    *,
    eos: bool = True,
    reason: FinishReason = FinishReason.STOP,
    cached_tokens: int = 0,
    logprobs: bool = False,
) -> tuple[Reply, Generate]:
    """One request that the model answers with `output`."""
    rid = mesh.gateway.submit(protocol, {"model": "tiny", **body})
    generate = mesh.scheduler.expect(Generate)
    ids = [*ids_of(output), EOS] if eos else ids_of(output)
    mesh.scheduler.answer(
        generate, ids, reason=reason, cached_tokens=cached_tokens, logprobs=logprobs
    )
    return mesh.gateway.reply(rid), generate


def direct(mesh: Bench, protocol: str, body: object) -> dict[str, Any]:
    """A request that needs no model."""
    return mesh.gateway.reply(mesh.gateway.submit(protocol, body)).json


def chat_text(reply: Reply) -> str:
    deltas = [c["choices"][0]["delta"] for c in reply.data if c["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


# ---------------------------------------------------------------- chat


def test_chat_stream(mesh: Bench) -> None:
    reply, _ = run(mesh, "chat", {"messages": HI, "stream": True, **PLAIN}, "Hello there")
    assert reply.admitted
    assert chat_text(reply) == "Hello there"
    assert reply.data[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in reply.data)
    assert {chunk["created"] for chunk in reply.data} == {1_700_000_000}
    assert reply.events[-1] == b"data: [DONE]\n\n"


def test_chat_plain(mesh: Bench) -> None:
    reply, generate = run(
        mesh, "chat", {"messages": HI}, "Let me see.</think>Hello", cached_tokens=3
    )
    assert not reply.admitted
    assert reply.json["created"] == 1_700_000_000
    message = reply.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Hello")
    count = len(ids_of("Let me see.</think>Hello")) + 1
    usage = reply.json["usage"]
    assert usage["completion_tokens"] == count
    assert usage["total_tokens"] == count + usage["prompt_tokens"]
    assert usage["prompt_tokens"] == generate.prompt_len == len(unpack_ids(generate.prompt_ids))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    end = reply.end
    assert isinstance(end, ResponseFinished)
    assert (end.status, end.completion_tokens, end.cached_tokens) == (200, count, 3)


def test_usage_is_a_last_chunk_without_choices(mesh: Bench) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, **PLAIN}
    reply, generate = run(mesh, "chat", body, "Hello", cached_tokens=2)
    *chunks, last = reply.data
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids_of("Hello")) + 1
    assert last["usage"]["prompt_tokens"] == generate.prompt_len
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_usage_on_every_chunk(mesh: Bench) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "stream": True, "stream_options": options, **PLAIN}
    reply, _ = run(mesh, "chat", body, "Hello there")
    counts = [chunk["usage"]["completion_tokens"] for chunk in reply.data]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(ids_of("Hello there")) + 1)


def test_length(mesh: Bench) -> None:
    body = {"messages": HI, "max_completion_tokens": 2, "max_tokens": 900, **PLAIN}
    length = FinishReason.LENGTH
    reply, generate = run(mesh, "chat", body, "Hello", eos=False, reason=length)
    assert generate.max_tokens == 2
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert isinstance(reply.end, ResponseFinished)
    assert reply.end.finish_reason == "length"


def test_sampling_fields_win_over_thinking_mode(mesh: Bench) -> None:
    body = {
        "messages": HI,
        "temperature": 0,
        "top_p": 0.3,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"9": -100, "5": 2.5},
        "ignore_eos": True,
        "min_tokens": 3,
        "stop_token_ids": [77],
        "seed": 123,
        "cache_salt": "x",
    }
    _, generate = run(mesh, "chat", body, "x</think>y")
    assert generate.sampling == SamplingParams(
        temperature=0.0,
        top_k=7,
        top_p=0.3,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias=[(5, 2.5), (9, -100.0)],
        ignore_eos=True,
    )
    assert (generate.seed, generate.min_tokens) == (123, 3)
    assert unpack_ids(generate.stop_ids).tolist() == [77]
    assert generate.salt


def test_sampling_as_the_publisher_does_it(tmp_path: Path) -> None:
    settings = TokenizerConfig(thinking_sampling="deepseek")
    with bench(tmp_path, settings) as mesh:
        body = {"messages": HI, "temperature": 0, "top_p": 0.3, "top_k": 4}
        _, generate = run(mesh, "chat", body, "x</think>y")
        sampling = generate.sampling
        assert (sampling.temperature, sampling.top_k) == (1.0, 4)
        assert sampling.top_p >= 0.95
        _, generate = run(mesh, "chat", {**body, **PLAIN}, "y")
        assert generate.sampling.temperature == 0.0


def test_configured_defaults(tmp_path: Path) -> None:
    settings = TokenizerConfig(default_thinking=False, default_max_tokens=33)
    with bench(tmp_path, settings) as mesh:
        reply, generate = run(mesh, "chat", {"messages": HI}, "y")
        assert generate.max_tokens == 33
        assert reply.json["choices"][0]["message"]["content"] == "y"


def test_defaults(mesh: Bench) -> None:
    _, generate = run(mesh, "chat", {"messages": HI}, "x</think>y")
    assert generate.sampling == SamplingParams()
    assert generate.seed == 7  # the gateway's
    assert unpack_ids(generate.stop_ids).tolist() == [EOS]
    assert generate.max_tokens == 8192 - generate.prompt_len
    assert (generate.attempt, generate.reply_to) == (1, "tokenizer-0")


def test_a_limit_beyond_the_context_is_lowered_to_the_room(mesh: Bench) -> None:
    _, generate = run(mesh, "chat", {"messages": HI, "max_tokens": 300_000}, "x</think>y")
    assert generate.max_tokens == 8192 - generate.prompt_len


@pytest.mark.parametrize("role", ["developer", "system"])
def test_developer_is_system(mesh: Bench, role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, *HI]
    _, generate = run(mesh, "chat", {"messages": messages, **PLAIN}, "ok")
    prompt = TOKENIZER.decode(unpack_ids(generate.prompt_ids).tolist(), skip_special_tokens=False)
    assert "<｜System｜>Be brief.<｜User｜>Hi" in prompt


@pytest.mark.parametrize("key", ["thinking", "enable_thinking"])
def test_thinking_by_template_option(mesh: Bench, key: str) -> None:
    body = {"messages": HI, "chat_template_kwargs": {key: False}}
    reply, generate = run(mesh, "chat", body, "plain")
    assert generate.prompt_ids.endswith(ids_bytes("<｜Assistant｜></think>"))
    assert reply.json["choices"][0]["message"]["content"] == "plain"


def test_reasoning_is_an_input_alias(mesh: Bench) -> None:
    turn = {"role": "assistant", "reasoning": "because", "content": "x"}
    body = {"messages": [*HI, turn, *HI], "tools": CHAT_TOOLS}
    _, generate = run(mesh, "chat", body, "y</think>z")
    assert ids_bytes("<think>because</think>x") in generate.prompt_ids


def test_tool_calls(mesh: Bench) -> None:
    body = {"messages": HI, "tools": CHAT_TOOLS, "stream": True}
    reply, _ = run(mesh, "chat", body, f"hm</think>ok{CALL}")
    calls = [c["choices"][0]["delta"].get("tool_calls") for c in reply.data]
    parts = [call[0] for call in calls if call]
    assert parts[0]["function"]["name"] == "f"
    assert parts[0]["id"].startswith("call_")
    assert "".join(p["function"]["arguments"] for p in parts) == '{"a": 1}'
    assert reply.data[-1]["choices"][0]["finish_reason"] == "tool_calls"

    plain, _ = run(mesh, "chat", {**body, "stream": False}, f"hm</think>ok{CALL}")
    (call,) = plain.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_named_tool_is_called_without_thinking(mesh: Bench) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    body = {"messages": HI, "tools": CHAT_TOOLS, "tool_choice": choice, **PLAIN}
    opened = "\n\n<｜DSML｜ calls>\n"
    reply, generate = run(mesh, "chat", body, CALL.removeprefix(opened))
    assert generate.prompt_ids.endswith(ids_bytes(f"</think>{opened}"))
    (call,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(mesh: Bench, stream: bool) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": stream, **PLAIN}
    reply, generate = run(mesh, "chat", body, "a b", logprobs=True)
    assert generate.n_logprobs == 2
    answers = reply.data if stream else [reply.json]
    found = [c["choices"][0]["logprobs"] for c in answers]
    entries = [entry for group in found if group for entry in group["content"]]
    assert [entry["token"] for entry in entries] == ["a", " b"]
    assert entries[0]["logprob"] == -0.5
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-1.0, -2.0]


def test_stop_string_ends_the_generation(mesh: Bench) -> None:
    body = {"model": "tiny", "messages": HI, "stop": ["b c"], "stream": True, **PLAIN}
    rid = mesh.gateway.submit("chat", body)
    generate = mesh.scheduler.expect(Generate)
    ids = ids_of("a b c d e")
    mesh.scheduler.accept(generate)
    mesh.scheduler.tokens(rid, 0, ids)
    reply = mesh.gateway.reply(rid)
    assert chat_text(reply) == "a "
    assert reply.data[-1]["choices"][0]["finish_reason"] == "stop"
    stop = mesh.scheduler.expect(StopAt, lambda stop: stop.rid == rid)
    assert (stop.rid, stop.n_keep) == (rid, len(ids_of("a b c")))
    mesh.scheduler.finish(rid, stop.n_keep)
    mesh.scheduler.expect(Ack, lambda ack: any(r.rid == rid and r.done for r in ack.rows))


# ---------------------------------------------------------------- responses, messages


def test_responses_stream(mesh: Bench) -> None:
    body = {"input": "Hi", "stream": True, "temperature": 0.25, "metadata": {"a": "b"}}
    reply, generate = run(mesh, "responses", body, "hm</think>Hello")
    assert generate.sampling.temperature == 0.25
    kinds = [event["type"] for event in reply.data]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert [event["sequence_number"] for event in reply.data] == list(range(len(kinds)))
    deltas = [e["delta"] for e in reply.data if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Hello"
    final = reply.data[-1]["response"]
    assert (final["created_at"], final["temperature"]) == (1_700_000_000, 0.25)
    assert final["metadata"] == {"a": "b"}
    count = len(ids_of("hm</think>Hello")) + 1
    assert final["usage"]["output_tokens"] == count
    assert final["usage"]["total_tokens"] == count + generate.prompt_len
    assert reply.events[0].startswith(b"event: response.created\ndata: {")
    assert b"[DONE]" not in reply.text


def test_responses_plain_and_cut(mesh: Bench) -> None:
    body = {"input": "Hi", "max_output_tokens": 4, "reasoning": {"effort": "none"}}
    cut = FinishReason.LENGTH
    reply, generate = run(mesh, "responses", body, "Hello", eos=False, reason=cut)
    assert generate.max_tokens == 4
    assert reply.json["status"] == "incomplete"
    assert reply.json["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply.json["output"][0]["content"][0]["text"] == "Hello"


def test_responses_tool_call(mesh: Bench) -> None:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA}
    body = {"input": "Hi", "tools": [tool]}
    reply, _ = run(mesh, "responses", body, f"hm</think>{CALL}")
    call = reply.json["output"][-1]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')


def test_messages_stream(mesh: Bench) -> None:
    body = {"messages": HI, "max_tokens": 50, "stream": True, "top_k": 5}
    reply, generate = run(mesh, "messages", body, "hm</think>Hello", cached_tokens=2)
    assert (generate.max_tokens, generate.sampling.top_k) == (50, 5)
    assert reply.events[0].startswith(b"event: message_start\ndata: {")
    start = reply.data[0]["message"]
    assert start["usage"]["cache_read_input_tokens"] == 2
    assert start["usage"]["input_tokens"] == generate.prompt_len - 2
    deltas = [e["delta"] for e in reply.data if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "hm"
    assert "".join(d.get("text", "") for d in deltas) == "Hello"
    last = reply.data[-2]
    assert last["delta"]["stop_reason"] == "end_turn"
    assert last["usage"]["output_tokens"] == len(ids_of("hm</think>Hello")) + 1
    assert reply.data[-1] == {"type": "message_stop"}


def test_messages_plain(mesh: Bench) -> None:
    body = {"messages": HI, "max_tokens": 50, "stop_sequences": ["lo"], **PLAIN}
    rid = mesh.gateway.submit("messages", {"model": "tiny", **body})
    generate = mesh.scheduler.expect(Generate)
    mesh.scheduler.tokens(rid, 0, ids_of("Hello"))
    assert generate.rid == rid
    answer = mesh.gateway.reply(rid).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "lo")
    assert answer["content"] == [{"type": "text", "text": "Hel"}]


def test_failed_tools_say_so(mesh: Bench) -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "no disk"}
    messages = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "f", "input_schema": SCHEMA}]
    body = {"messages": messages, "tools": tools, "max_tokens": 9}
    _, generate = run(mesh, "messages", body, "x</think>y")
    prompt = TOKENIZER.decode(unpack_ids(generate.prompt_ids).tolist(), skip_special_tokens=False)
    assert "<tool_result>Error: no disk</tool_result>" in prompt


# ---------------------------------------------------------------- completions


def test_completion_stream(mesh: Bench) -> None:
    options = {"include_usage": True}
    body = {"prompt": "Once", "stream": True, "stream_options": options}
    reply, generate = run(mesh, "completions", body, " upon a time")
    assert generate.max_tokens == 16
    assert unpack_ids(generate.prompt_ids).tolist() == [0, *ids_of("Once")]
    choices = [chunk["choices"][0] for chunk in reply.data if chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == " upon a time"
    assert choices[-1]["finish_reason"] == "stop"
    assert reply.data[-1]["usage"]["completion_tokens"] == len(ids_of(" upon a time")) + 1
    assert reply.events[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("prompt", ["Once", ["Once"], "ids", "list of ids"])
def test_completion_prompts(mesh: Bench, prompt: object) -> None:
    ids = ids_of("Once")
    shapes = {"ids": ids, "list of ids": [ids]}
    body = {"prompt": shapes.get(str(prompt), prompt), "add_special_tokens": False, "echo": True}
    reply, generate = run(mesh, "completions", body, " upon")
    assert unpack_ids(generate.prompt_ids).tolist() == ids
    assert reply.json["choices"][0]["text"] == "Once upon"
    assert reply.json["object"] == "text_completion"


def test_completion_logprobs(mesh: Bench) -> None:
    body = {"prompt": "x", "logprobs": 2}
    reply, generate = run(mesh, "completions", body, "a b", logprobs=True)
    assert generate.n_logprobs == 2
    logprobs = reply.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", " b"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1]
    assert [len(best) for best in logprobs["top_logprobs"]] == [2, 2]


def test_completion_stop(mesh: Bench) -> None:
    rid = mesh.gateway.submit(
        "completions", {"model": "tiny", "prompt": "x", "stop": "DEFG", "stream": True}
    )
    mesh.scheduler.expect(Generate)
    for at, token in enumerate(ids_of("ABC DE DEFGH")):
        mesh.scheduler.tokens(rid, at, [token])
    reply = mesh.gateway.reply(rid)
    text = "".join(chunk["choices"][0]["text"] for chunk in reply.data)
    assert text == "ABC DE "
    assert reply.data[-1]["choices"][0]["finish_reason"] == "stop"
    mesh.scheduler.expect(StopAt, lambda stop: stop.rid == rid)


# ---------------------------------------------------------------- questions without a model


def test_models(mesh: Bench) -> None:
    listed = direct(mesh, "models", b"")
    assert [card["id"] for card in listed["data"]] == ["tiny", "other-name"]
    assert listed["data"][0]["max_model_len"] == 8192
    assert direct(mesh, "models", {"id": "other-name"})["id"] == "other-name"


def test_count_tokens(mesh: Bench) -> None:
    body = {"model": "tiny", "messages": HI, **PLAIN}
    _, generate = run(mesh, "messages", {**body, "max_tokens": 5}, "x")
    assert direct(mesh, "count_tokens", body) == {"input_tokens": generate.prompt_len}


def test_tokenize_and_back(mesh: Bench) -> None:
    body = {"prompt": "Grüße 👋", "return_token_strs": True}
    answer = direct(mesh, "tokenize", body)
    assert answer["tokens"] == [0, *ids_of("Grüße 👋")]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = direct(mesh, "detokenize", {"tokens": answer["tokens"][1:]})
    assert back == {"prompt": "Grüße 👋"}


def test_tokenize_messages(mesh: Bench) -> None:
    body = {"messages": HI, **PLAIN}
    _, generate = run(mesh, "chat", body, "x")
    tokens = direct(mesh, "tokenize", {"model": "tiny", **body})["tokens"]
    assert tokens == unpack_ids(generate.prompt_ids).tolist()


def test_a_long_prompt_is_encoded_beside_the_loop(mesh: Bench) -> None:
    text = "word " * 8000
    body = {"model": "tiny", "prompt": text[:-1], "add_special_tokens": False}
    assert len(msgspec.json.encode(body)) > 32 << 10
    answer = direct(mesh, "tokenize", body)
    assert answer["tokens"] == ids_of(text[:-1])


def test_alias_is_echoed(mesh: Bench) -> None:
    reply, _ = run(mesh, "chat", {"model": "other-name", "messages": HI, **PLAIN}, "x")
    assert reply.json["model"] == "other-name"


def ids_bytes(text: str) -> bytes:
    """Ids of a text as they appear in `prompt_ids`."""
    return b"".join(token.to_bytes(4, "little") for token in ids_of(text))


def test_run_folder_holds_sockets_and_signs_of_readiness_only(mesh: Bench) -> None:
    suffixes = {p.suffix for p in Path(mesh.config.mesh.run_dir).iterdir()}
    assert ".sock" in suffixes
    assert suffixes <= {".sock", ".ready"}
