"""Failures that users of other engines have reported, over HTTP on a running mesh: equal requests
with unequal answers, and log-probabilities that JSON cannot carry."""

import asyncio
import json
import math
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import RunningMesh

Json = dict[str, Any]
STORY = " ".join(f"On day {day} the river rose by {day * 7 % 11} feet." for day in range(40))
GREEDY: Json = {"temperature": 0}
WARM: Json = {"temperature": 1, "top_p": 0.9, "seed": 11}


def no_constant(name: str) -> float:
    raise AssertionError(f"{name} in JSON")


def ask(mesh: RunningMesh, path: str, **fields: object) -> Json:
    """A plain answer, read by a parser that takes no NaN and no infinity."""
    body = {"model": mesh.model, **fields}
    answer = httpx.post(f"{mesh.url}/v1/{path}", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=no_constant)


def complete(mesh: RunningMesh, prompt: str = STORY, **fields: object) -> Json:
    asked = {"prompt": prompt, "max_tokens": 24, "logprobs": 20, "ignore_eos": True, **fields}
    return ask(mesh, "completions", **asked)


def chat(mesh: RunningMesh, **fields: object) -> Json:
    asked: Json = {
        "messages": [{"role": "user", "content": "Tell me about the river."}],
        "reasoning_effort": "none",
        "max_completion_tokens": 16,
        "ignore_eos": True,
        **fields,
    }
    return ask(mesh, "chat/completions", **asked)


def numbers(value: object) -> list[float]:
    """All in it."""
    match value:
        case bool() | str() | None:
            return []
        case int() | float():
            return [value]
        case list():
            return [number for each in value for number in numbers(each)]
        case dict():
            return [number for each in value.values() for number in numbers(each)]
        case _:
            raise AssertionError(value)


def assert_real(logprobs: object) -> None:
    """Log-probabilities of the model, not the stand-in for those that are none."""
    found = numbers(logprobs)
    assert found
    assert all(math.isfinite(number) and -1000 < number <= 0 for number in found)


# ---------------------------------------------------------------- equal requests


def test_the_same_prompt_four_times_cold_then_cached(mesh: RunningMesh) -> None:
    answers = [complete(mesh, **GREEDY, cache_salt="cold, then warm") for _ in range(4)]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == 0
    assert min(cached[1:]) > 0
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_one_prompt_at_1_8_and_64_in_flight(mesh: RunningMesh, sampling: Json) -> None:
    body = {
        "model": mesh.model,
        "prompt": STORY,
        "max_tokens": 12,
        "logprobs": 5,
        "ignore_eos": True,
        **sampling,
    }

    async def crowd(num: int) -> list[Json]:
        limits = httpx.Limits(max_connections=num)
        async with httpx.AsyncClient(base_url=mesh.url, timeout=200, limits=limits) as client:
            salts = [f"{num}.{sampling['temperature']}.{i % 3}" for i in range(num)]  # some share
            asked = [client.post("/v1/completions", json={**body, "cache_salt": s}) for s in salts]
            return [answer.json() for answer in await asyncio.gather(*asked)]

    (alone,) = asyncio.run(crowd(1))
    for num in (8, 64):
        for answer in asyncio.run(crowd(num)):
            assert answer["choices"] == alone["choices"]


def test_a_temperature_of_almost_nothing_is_greedy(mesh: RunningMesh) -> None:
    greedy = complete(mesh, temperature=0)
    for temperature in (1e-6, 1e-30):
        tiny = complete(mesh, temperature=temperature, top_p=0.3, seed=3)
        assert tiny["choices"] == greedy["choices"]


@pytest.mark.parametrize(
    ("protocol", "seed"), [("chat", None), ("completions", 77), ("completions", 2**63 - 2)]
)
def test_four_choices_are_four_requests_with_the_seeds_that_usage_names(
    mesh: RunningMesh, protocol: str, seed: int | None
) -> None:
    """Those of a request without a seed, too: the gateway drew it."""

    def one(**fields: object) -> Json:
        sampling = {"temperature": 1.3, "frequency_penalty": 0.5, **fields}
        return chat(mesh, **sampling) if protocol == "chat" else complete(mesh, **sampling)

    four = one(n=4, **({} if seed is None else {"seed": seed}))
    seeds = four["usage"]["seeds"]
    assert four["usage"]["seed"] == seeds[0]
    assert seed is None or seeds[0] == seed
    assert len({json.dumps({**choice, "index": 0}) for choice in four["choices"]}) > 1
    for choice, its_seed in zip(four["choices"], seeds, strict=True):
        alone = one(seed=its_seed)
        assert {**choice, "index": 0} == alone["choices"][0]
        assert alone["usage"]["seed"] == its_seed


# ---------------------------------------------------------------- log-probabilities


def test_twenty_logprobs_with_a_narrow_nucleus(mesh: RunningMesh) -> None:
    narrow = {"temperature": 1, "top_p": 0.3, "seed": 5}
    answer = complete(mesh, **narrow)
    assert_real(answer["choices"][0]["logprobs"]["token_logprobs"])
    assert_real(answer["choices"][0]["logprobs"]["top_logprobs"])
    content = chat(mesh, **narrow, logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]
    entries = content["content"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {20}
    assert_real(
        [[entry["logprob"], *(t["logprob"] for t in entry["top_logprobs"])] for entry in entries]
    )


def test_twenty_logprobs_with_a_regex(mesh: RunningMesh) -> None:
    """Nearly all of the best ids are banned by it."""
    answer = complete(mesh, temperature=1, seed=5, regex="[xyz]{9}", ignore_eos=False)
    (choice,) = answer["choices"]
    assert set(choice["text"]) <= set("xyz")
    assert_real(choice["logprobs"]["token_logprobs"])
    assert_real(choice["logprobs"]["top_logprobs"])
    assert {len(best) for best in choice["logprobs"]["top_logprobs"]} == {20}


def test_an_echo_with_logprobs_and_top_k_1(mesh: RunningMesh) -> None:
    """A text that the model wrote greedily has, as a prompt, the log-probabilities it had then."""
    told = complete(mesh, **GREEDY, logprobs=1)["choices"][0]
    ids = ask_ids(mesh, STORY) + ask_ids(mesh, told["text"], add_special_tokens=False)
    fields: Json = {"prompt": ids, "max_tokens": 2, "logprobs": 1, "echo": True}
    scored = ask(mesh, "completions", **fields, top_k=1, temperature=1)["choices"][0]
    assert scored["text"].startswith("<｜begin▁of▁sentence｜>" + STORY + told["text"])
    probs = scored["logprobs"]["token_logprobs"]
    assert probs[0] is None
    assert_real(probs[1:])
    assert len(probs) == len(ids) + 2
    if scored["logprobs"]["tokens"][-26:-2] == told["logprobs"]["tokens"]:  # spelled as told
        assert probs[-26:-2] == told["logprobs"]["token_logprobs"]
    again = ask(mesh, "completions", **fields, top_k=1, temperature=1)["choices"][0]
    assert again == scored
    greedy = ask(mesh, "completions", **fields, temperature=0)["choices"][0]
    assert greedy == scored


def ask_ids(mesh: RunningMesh, text: str, **fields: object) -> list[int]:
    body = {"model": mesh.model, "prompt": text, **fields}
    return httpx.post(f"{mesh.url}/tokenize", json=body, timeout=30).json()["tokens"]


def test_prompt_logprobs_of_a_chunked_prompt_cached_or_not(mesh: RunningMesh) -> None:
    """They are those that an echo has, and a prompt of which a part is cached brings all."""
    prompt = STORY + STORY  # in several chunks
    fields: Json = {**GREEDY, "cache_salt": "prompt logprobs", "max_tokens": 3, "logprobs": 2}
    cold = complete(mesh, prompt, **fields, prompt_logprobs=2)
    warm = complete(mesh, prompt, **fields)
    again = complete(mesh, prompt, **fields, prompt_logprobs=2)
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm, again)
    ]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert again["choices"] == cold["choices"]
    (choice,) = cold["choices"]
    first, *entries = choice.pop("prompt_logprobs")
    assert warm["choices"] == [choice]
    echoed = complete(mesh, prompt, **fields, echo=True)["choices"][0]["logprobs"]
    assert first is None
    assert len(entries) == cold["usage"]["prompt_tokens"] - 1 > 600
    own = [next(iter(found.values())) for found in entries]
    assert [entry["logprob"] for entry in own] == echoed["token_logprobs"][1 : len(own) + 1]
    assert [entry["decoded_token"] for entry in own] == echoed["tokens"][1 : len(own) + 1]
    for found, entry in zip(entries, own, strict=True):
        best = sorted(found.values(), key=lambda each: each["rank"])
        assert [each["rank"] for each in best[:2]] == [1, 2]
        assert [each["logprob"] for each in best] == sorted(
            (each["logprob"] for each in best), reverse=True
        )
        assert (len(found) == 2) == (entry["rank"] <= 2)
