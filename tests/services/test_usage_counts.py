"""Usage counts what the client got: tokens behind the end are in none of its counts."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmesh.wire.messages import FinishReason
from tests.services.test_tokenizer_protocols import HI, Bench, ids_of, run
from tests.services.test_tokenizer_protocols import mesh as module_mesh
from tests.services.test_tokenizer_text import CALL, begin, play, stream_data
from tests.services.tokenizer_harness import EOS, PLAIN
from tests.tiny import VOCAB_SIZE

mesh = module_mesh  # the fixture, under the name that the test asks for


def test_reasoning_and_output_tokens_are_counted_behind_the_cut(mesh: Bench) -> None:
    text = "Let me see.</think>Hello STOP and far more behind it"
    reply, _ = run(mesh, "chat", {"messages": HI, "stop": ["STOP"]}, text)
    message, usage = reply.json["choices"][0]["message"], reply.json["usage"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Hello ")
    least, most = len(ids_of("Let me see.</think>Hello")), len(ids_of(text[: text.index(" and")]))
    assert least < usage["completion_tokens"] <= most
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(ids_of("Let me see."))


def counts(protocol: str, ids: list[int], *, stream: bool, **more: object) -> tuple[int, int]:
    """(output tokens, reasoning tokens) that an answer tells."""
    if protocol == "chat":
        more = {"logprobs": None, "top_logprobs": None, "stop": None, **more}
        more |= {"stream_options": {"include_usage": True}} if stream else {}
    request = begin(protocol, stream=stream, **more)
    events = play(request, ids, [3, 4], FinishReason.LENGTH)
    assert request.generation is not None
    told = (
        stream_data(events)[-1] if stream else msgspec.json.decode(request.generation.text.body())
    )
    usage = told["response"]["usage"] if stream and protocol == "responses" else told["usage"]
    if protocol == "responses":
        return usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]
    return usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(19, VOCAB_SIZE - 1), max_size=30),
    answer=st.lists(st.integers(19, VOCAB_SIZE - 1), max_size=10),
)
def test_reasoning_tokens_are_those_that_the_model_made(
    protocol: str, ids: list[int], answer: list[int], *, stream: bool
) -> None:
    """Whatever it says, in however short tokens, it has not thought more than it has said."""
    assert counts(protocol, ids, stream=stream) == (len(ids), len(ids))
    whole = [*ids, *ids_of("</think>"), *answer]
    assert counts(protocol, whole, stream=stream) == (len(whole), len(ids))


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_reasoning_ends_at_its_end_or_where_calls_begin(protocol: str) -> None:
    thought, call = ids_of("Let me see."), ids_of(CALL)
    tags = ids_of("a <｜DSML｜ b ｜DSML｜ calls>")  # no block: the reasoning goes on
    for ids, expected in (
        ([*thought, *call], len(thought)),
        ([*thought, *tags, *call], len(thought) + len(tags)),
        ([*thought, *ids_of("</think>"), *call], len(thought)),
        ([*ids_of("</think>"), *call], 0),
        ([*thought, EOS], len(thought)),
    ):
        assert counts(protocol, ids, stream=False) == (len(ids), expected)
    without = counts(protocol, [*thought, *call], stream=False, tools=None)
    assert without == (len(thought) + len(call), len(thought) + len(call)), "calls are text here"


def test_answers_without_reasoning_tell_none() -> None:
    ids = ids_of("Let me</think>see.")
    assert counts("responses", ids, stream=False, reasoning={"effort": "none"}) == (len(ids), 0)
    request = begin("chat", stream=False, logprobs=None, top_logprobs=None, **PLAIN)
    play(request, ids, [], FinishReason.STOP)
    assert request.generation is not None
    usage = msgspec.json.decode(request.generation.text.body())["usage"]
    assert "completion_tokens_details" not in usage
