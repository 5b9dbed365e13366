"""Answers over HTTP with drafts on are those with drafts off, wherever an accepted run is cut."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import CONFIG, RunningMesh, running
from tests.e2e.http_streams import VARIABLE, Streams

Json = dict[str, Any]
LIMIT = 192  # tokens of a prompt and its answer
SHORT = CONFIG.replace("[scheduler]", f"[scheduler]\nmax_model_len = {LIMIT}")
DRAFTS = SHORT + '[executor]\ndraft_tokens = 5\ndraft_policy = "always"\n'
ASKED = "Repeat exactly: the river rose by seven feet and fell by three feet on the next day."
COPY: Json = {"messages": [{"role": "user", "content": ASKED}], "reasoning_effort": "none"}
COUNT = "1 2 3 4 5 6 7 8 9 10 11 12 13 14"
CITY: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORM: Json = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    yield from running(SHORT, tmp_path_factory.mktemp("o"))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    yield from running(DRAFTS, tmp_path_factory.mktemp("d"))


def bodies(mesh: RunningMesh, asked: list[Json]) -> list[tuple[str, Json]]:
    """Chats have messages, all else is a completion."""
    return [
        (
            "/v1/chat/completions" if "messages" in fields else "/v1/completions",
            {"model": mesh.model, **fields},
        )
        for fields in asked
    ]


async def _answers(mesh: RunningMesh, asked: list[Json]) -> list[Json]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=100) as client:

        async def answer(path: str, body: Json) -> Json:
            got = await client.post(path, json=body)
            assert got.status_code == 200, got.text
            found: Json = got.json()
            found["completion_tokens"] = found["usage"]["completion_tokens"]
            return {key: found[key] for key in found if key not in VARIABLE}

        return await asyncio.gather(*(answer(*each) for each in bodies(mesh, asked)))


def same(
    plain: RunningMesh, drafting: RunningMesh, asked: list[Json], but: Sequence[str] = ()
) -> list[Json]:
    """What both answer when all of it is asked at once; drafts were accepted meanwhile.

    `but`: names of what may differ.
    """
    name = "deepmesh_accepted_drafts_total"
    before = drafting.total(name)
    wanted, found = (asyncio.run(_answers(mesh, asked)) for mesh in (plain, drafting))
    for fields, one, other in zip(asked, wanted, found, strict=True):
        assert {**one, **dict.fromkeys(but)} == {**other, **dict.fromkeys(but)}, fields
    drafting.wait_idle()
    deadline = time.monotonic() + 15  # heartbeats bring it, perhaps after one that found it idle
    while drafting.total(name) <= before:
        assert time.monotonic() < deadline, "no draft was accepted"
    return wanted


def text_of(answer: Json) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def reasons(answers: list[Json]) -> set[str]:
    return {choice["finish_reason"] for answer in answers for choice in answer["choices"]}


def test_max_tokens_that_end_within_an_accepted_run(
    plain: RunningMesh, drafting: RunningMesh
) -> None:
    asked = [{**COPY, "temperature": 0, "max_completion_tokens": n} for n in range(1, 20)]
    asked += [{"prompt": COUNT, "temperature": 0, "max_tokens": n} for n in range(1, 8)]
    answers = same(plain, drafting, asked)
    counts = [answer["completion_tokens"] for answer in answers[:19]]
    assert counts == list(range(1, 20))


def test_stop_strings_that_begin_anywhere_in_an_accepted_run(
    plain: RunningMesh, drafting: RunningMesh
) -> None:
    base: Json = {**COPY, "temperature": 0, "max_completion_tokens": 40}
    whole = text_of(same(plain, drafting, [base])[0])
    cuts = range(2, min(len(whole) - 3, 50), 2)
    asked = [{**base, "stop": [whole[at : at + 3], "never in it"]} for at in cuts]
    answers = same(plain, drafting, asked)
    for fields, answer in zip(asked, answers, strict=True):
        stop = fields["stop"][0]
        assert text_of(answer) == whole[: whole.index(stop)]
    assert reasons(answers) == {"stop"}


def test_a_context_that_is_full_within_an_accepted_run(
    plain: RunningMesh, drafting: RunningMesh
) -> None:
    ids = list(range(300, 300 + LIMIT))
    asked = [
        {"prompt": ids[: LIMIT - left], "temperature": 0, "ignore_eos": True, "max_tokens": 64}
        for left in range(1, 14)
    ]
    answers = same(plain, drafting, asked)
    assert [answer["completion_tokens"] for answer in answers] == list(range(1, 14))
    assert reasons(answers) == {"length"}


def test_choices_logprobs_and_penalties(plain: RunningMesh, drafting: RunningMesh) -> None:
    warm: Json = {**COPY, "temperature": 0.9, "seed": 5, "max_completion_tokens": 24}
    penalties: Json = {"frequency_penalty": 0.7, "presence_penalty": 0.4}
    asked = [
        {**warm, "n": 3},
        {**warm, "n": 2, "logprobs": True, "top_logprobs": 4},
        {**warm, **penalties},
        {**warm, **penalties, "repetition_penalty": 1.3, "n": 2},
        {**warm, "logit_bias": {"301": 4.0, "302": -100.0}, "logprobs": True},
        {**warm, "temperature": 0, "logprobs": True, "top_logprobs": 2},
        {**warm, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
        {"prompt": COUNT, "logprobs": 3, "temperature": 0, "max_tokens": 17, "echo": True},
        {"prompt": [COUNT, "a b c a b c a b"], "temperature": 0, "max_tokens": 9, "n": 2},
    ]
    answers = same(plain, drafting, asked)
    assert len(answers[0]["choices"]) == 3
    tops = answers[1]["choices"][1]["logprobs"]["content"]
    assert tops
    assert all(len(token["top_logprobs"]) == 4 for token in tops)


def test_forms_are_kept_to_and_the_same(plain: RunningMesh, drafting: RunningMesh) -> None:
    form: Json = {
        **{"messages": [{"role": "user", "content": "Paris has 2100 people? In JSON."}]},
        **{"reasoning_effort": "none", "response_format": FORM},
    }
    asked = [{**form, "temperature": 1.0, "seed": n, "max_tokens": 90} for n in range(6)]
    asked += [{**form, "temperature": 0, "max_tokens": n} for n in (3, 4, 5, 6, 7, 90)]
    asked += [{**form, "temperature": 0, "max_tokens": 90, "stop": ['"people"']}]
    asked += [{**form, "temperature": 0.7, "seed": 1, "n": 2, "max_tokens": 90, "logprobs": True}]
    answers = same(plain, drafting, asked)
    assert reasons(answers[:6]) == {"stop"}
    assert all(text_of(answer).endswith("}") for answer in answers[:6])
    assert reasons(answers[6:9]) == {"length"}


def test_streams_bring_the_same_text(plain: RunningMesh, drafting: RunningMesh) -> None:
    base: Json = {**COPY, "stream": True, "temperature": 0}
    asked = [{**base, "max_completion_tokens": n} for n in (7, 16, 33)]
    asked += [{**base, "max_completion_tokens": 40, "stop": ["feet and"]}]
    found: list[list[str]] = []
    for mesh in (plain, drafting):
        streams = Streams(bodies(mesh, asked), under_way=1)
        asyncio.run(streams.run(mesh.url, 60.0))
        found.append([stream.text for stream in streams.streams])
        assert all(stream.num_ends == 1 for stream in streams.streams)
    assert found[0] == found[1]
    assert all(found[0])
