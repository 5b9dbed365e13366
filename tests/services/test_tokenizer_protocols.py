"""Requests of every protocol through the tokenizer service, over real sockets."""

from collections.abc import Iterator

import pytest

from deepmesh.wire.messages import FinishReason, Generate, ResponseFinished
from deepmesh.wire.packed import unpack_ids
from tests.services.tokenizer_harness import EOS, HI, PLAIN, Bench, bench, ids_of


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("m")) as made:
        yield made


def test_chat_stream(mesh: Bench) -> None:
    body = {"model": "tiny", "messages": HI, "stream": True, **PLAIN}
    rid = mesh.gateway.submit("chat", body)
    mesh.scheduler.answer(mesh.scheduler.expect(Generate), [*ids_of("Hello there"), EOS])
    reply = mesh.gateway.reply(rid)
    assert reply.admitted
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in reply.data]
    assert "".join(deltas) == "Hello there"
    assert reply.data[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in reply.data)
    assert reply.events[-1] == b"data: [DONE]\n\n"


def test_chat_plain(mesh: Bench) -> None:
    rid = mesh.gateway.submit("chat", {"model": "tiny", "messages": HI})
    generate = mesh.scheduler.expect(Generate)
    ids = [*ids_of("Let me see.</think>Hello"), EOS]
    mesh.scheduler.answer(generate, ids, cached_tokens=3)
    reply = mesh.gateway.reply(rid)
    assert not reply.admitted
    message = reply.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Hello")
    usage = reply.json["usage"]
    assert usage["completion_tokens"] == len(ids)
    assert usage["prompt_tokens"] == generate.prompt_len == len(unpack_ids(generate.prompt_ids))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    end = reply.end
    assert isinstance(end, ResponseFinished)
    assert (end.status, end.completion_tokens, end.cached_tokens) == (200, len(ids), 3)


def test_length(mesh: Bench) -> None:
    rid = mesh.gateway.submit(
        "chat", {"model": "tiny", "messages": HI, "max_completion_tokens": 2, **PLAIN}
    )
    generate = mesh.scheduler.expect(Generate)
    assert generate.max_tokens == 2
    mesh.scheduler.answer(generate, ids_of("Hello there")[:2], reason=FinishReason.LENGTH)
    assert mesh.gateway.reply(rid).json["choices"][0]["finish_reason"] == "length"
