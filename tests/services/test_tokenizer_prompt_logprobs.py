"""`prompt_logprobs`: the field's form, who computes them, and what is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest

from deepmesh.wire.messages import (
    ErrorCode,
    Generate,
    PromptLogprobs,
    ResponseFailed,
    TokenBatch,
    TokenRow,
)
from deepmesh.wire.packed import pack_ids, unpack_ids
from services.tokenizer.sampling import MAX_PROMPT_LOGPROBS
from services.tokenizer.vocabulary import Vocabulary
from tests.services.test_tokenizer_choices import THINK_END, Table
from tests.services.test_tokenizer_core import HI, PLAIN
from tests.services.tokenizer_harness import EOS, MODEL, ids_of

VOCABULARY = Vocabulary((MODEL / "tokenizer.json").read_text("utf-8"))
BEST = (900, 901, 902)


def told(prompt: list[int], num_top: int) -> PromptLogprobs:
    """Token i of the prompt has the log-probability -i / 8 and is number 7; the best ids are
    always the same, the last of them the token itself where there are three."""
    own = -np.arange(1, len(prompt), dtype="<f4") / 8
    ids = np.tile(BEST[:num_top], (len(own), 1)).astype("<i4")
    values = np.tile(-np.arange(1, num_top + 1, dtype="<f4") / 1024, (len(own), 1))
    if num_top == 3:
        ids[:, 2], values[:, 2] = prompt[1:], own
    ranks = np.full(len(own), 3 if num_top == 3 else 7, "<i4")
    return PromptLogprobs(
        1, own.tobytes(), ids.tobytes(), values.astype("<f4").tobytes(), ranks=ranks.tobytes()
    )


def serve(table: Table, part: Generate, text: str, *, width: int | None = None) -> None:
    prompt = unpack_ids(part.prompt_ids).tolist()
    ids = [*ids_of(text), EOS]
    wide = part.n_prompt_logprobs if width is None else width
    found = told(prompt, wide) if wide >= 0 else None
    table.scheduler(TokenBatch(1, 1, [TokenRow(part.rid, 0, pack_ids(ids), prompt=found)]))
    table.finish(part, len(ids))


def answer(protocol: str, **fields: object) -> tuple[list[Generate], dict[str, Any]]:
    table = Table()
    parts = table.ask({"model": "tiny", **fields}, protocol)
    for part in parts:
        serve(table, part, "Hello")
    return parts, msgspec.json.decode(table.end.body)


def refusal(protocol: str, **fields: object) -> ResponseFailed:
    table = Table()
    assert not table.ask({"model": "tiny", **fields}, protocol)
    assert table.failure.code is ErrorCode.INVALID
    return table.failure


def test_a_chat_has_them_beside_its_choices() -> None:
    (part,), body = answer("chat", messages=HI, prompt_logprobs=2, **PLAIN)
    prompt = unpack_ids(part.prompt_ids).tolist()
    first, *entries = body["prompt_logprobs"]
    assert first is None
    assert len(entries) == len(prompt) - 1
    for number, (token, found) in enumerate(zip(prompt[1:], entries, strict=True), 1):
        assert list(found) == [str(token), *map(str, BEST[:2])]
        name = VOCABULARY.name_of(token)
        assert found[str(token)] == {"logprob": -number / 8, "rank": 7, "decoded_token": name}
        assert [found[str(best)]["rank"] for best in BEST[:2]] == [1, 2]
    assert part.n_logprobs == -1  # those of the output were not asked for


def test_a_token_among_the_best_has_one_entry() -> None:
    _, body = answer("completions", prompt="Once upon", prompt_logprobs=3)
    for found in body["choices"][0]["prompt_logprobs"][1:]:
        own, *best = found.values()
        assert own["rank"] == 3
        assert [entry["rank"] for entry in best] == [1, 2]


def test_none_of_the_best_is_the_token_alone() -> None:
    (part,), body = answer("completions", prompt=[5, 6, 7], prompt_logprobs=0)
    assert part.n_prompt_logprobs == 0
    assert [list(found or ()) for found in body["choices"][0]["prompt_logprobs"]] == [
        [],
        ["6"],
        ["7"],
    ]


def test_a_prompt_of_one_token_has_none() -> None:
    _, body = answer("completions", prompt=[5], prompt_logprobs=2)
    assert body["choices"][0]["prompt_logprobs"] == [None]


def test_an_echo_beside_it_has_its_own_number_of_best_ids() -> None:
    (part,), body = answer(
        "completions", prompt=[5, 6, 7], prompt_logprobs=1, echo=True, logprobs=2
    )
    assert part.n_prompt_logprobs == 2
    (choice,) = body["choices"]
    assert [len(found or ()) for found in choice["prompt_logprobs"]] == [0, 2, 2]
    assert [len(best or ()) for best in choice["logprobs"]["top_logprobs"][:3]] == [0, 2, 2]


def test_choices_share_those_of_their_prompt() -> None:
    """Computed once for each prompt; every choice has them, as vLLM's do."""
    parts, body = answer("completions", prompt=["Once", "The sea"], n=2, prompt_logprobs=1)
    assert [part.n_prompt_logprobs for part in parts] == [1, -1, 1, -1]
    found = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert found[0] == found[1] != found[2] == found[3]
    parts, body = answer("chat", messages=HI, n=3, prompt_logprobs=1, **PLAIN)
    assert [part.n_prompt_logprobs for part in parts] == [1, -1, -1]
    assert len(body["prompt_logprobs"]) == parts[0].prompt_len


def test_an_answer_behind_thinking_with_a_budget_does_not_compute_them_again() -> None:
    table = Table()
    (first,) = table.ask(
        {"model": "tiny", "messages": HI, "thinking_token_budget": 50, "prompt_logprobs": 1}
    )
    prompt = unpack_ids(first.prompt_ids).tolist()
    ids = [*ids_of("So"), THINK_END]
    row = TokenRow(first.rid, 0, pack_ids(ids), prompt=told(prompt, first.n_prompt_logprobs))
    table.scheduler(TokenBatch(1, 1, [row]))
    table.finish(first, len(ids))
    (second,) = table.generates()
    assert (first.n_prompt_logprobs, second.n_prompt_logprobs) == (1, -1)
    rest = [*ids_of("Hello"), EOS]
    table.row(second, len(ids), rest)
    table.finish(second, len(ids) + len(rest))
    assert len(msgspec.json.decode(table.end.body)["prompt_logprobs"]) == len(prompt)


@pytest.mark.parametrize("protocol", ["chat", "completions"])
def test_an_engine_that_does_not_bring_them_fails_the_request(protocol: str) -> None:
    table = Table()
    fields = {"messages": HI, **PLAIN} if protocol == "chat" else {"prompt": "x"}
    (part,) = table.ask({"model": "tiny", "prompt_logprobs": 1, **fields}, protocol)
    serve(table, part, "Hello", width=-1)
    assert table.failure.code is ErrorCode.INTERNAL
    assert "log-probabilities of the prompt" in table.failure.detail


@pytest.mark.parametrize("value", [-1, 21, 1.5, "x", True, []])
@pytest.mark.parametrize("protocol", ["chat", "completions"])
def test_other_values_are_refused(protocol: str, value: object) -> None:
    fields = {"messages": HI} if protocol == "chat" else {"prompt": "x"}
    assert refusal(protocol, prompt_logprobs=value, **fields).param == "prompt_logprobs"


@pytest.mark.parametrize("protocol", ["chat", "completions"])
def test_a_stream_is_refused(protocol: str) -> None:
    fields = {"messages": HI} if protocol == "chat" else {"prompt": "x"}
    found = refusal(protocol, prompt_logprobs=0, stream=True, **fields)
    assert found.param == "prompt_logprobs"
    assert "stream" in found.detail


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [("responses", {"input": "Hi"}), ("messages", {"messages": HI, "max_tokens": 5})],
)
def test_other_protocols_have_none(protocol: str, fields: dict[str, object]) -> None:
    assert refusal(protocol, prompt_logprobs=1, **fields).param == "prompt_logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")],
)
def test_an_answer_that_would_be_too_large_is_refused(
    fields: dict[str, object], param: str
) -> None:
    num = MAX_PROMPT_LOGPROBS // 21
    fits = {"prompt": [[5] * (num // 2)] * 2, "max_tokens": 1, **fields}
    assert len(Table().ask({"model": "tiny", **fits}, "completions")) == 2
    found = refusal("completions", **{**fits, "n": 2})
    assert found.param == param
    assert str(MAX_PROMPT_LOGPROBS) in found.detail
