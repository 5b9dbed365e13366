"""Over HTTP: a model whose numbers are no numbers for one token fails the requests that have it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deepmesh.supervisor import Mesh
from tests.e2e.conftest import CONFIG, RunningMesh, running
from tests.services.test_not_finite import SPOILED, spoiled_copy

Json = dict[str, Any]
WHY = "not finite"


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    folder = tmp_path_factory.mktemp("n")
    model = spoiled_copy(tmp_path_factory.mktemp("model"), float("nan"))
    config = CONFIG.replace('name = "e2e"', 'name = "spoiled"')
    lines = [f'model = "{model}"' if x.startswith("model =") else x for x in config.split("\n")]
    yield from running("\n".join(lines), folder)


def body(mesh: RunningMesh, prompt: list[int], **fields: object) -> Json:
    asked = {"prompt": prompt, "max_tokens": 40, "temperature": 0.7, "seed": 3, "logprobs": 1}
    no_spoiled = {"logit_bias": {str(SPOILED): -100}}
    return {"model": mesh.mesh.config.served_model, **asked, **no_spoiled, **fields}


def error_of(answer: httpx.Response) -> str:
    assert answer.status_code == 500, answer.text
    return answer.json()["error"]["message"]


def pids(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.pids)


def test_only_requests_with_it_fail_and_no_process_ends(spoiled: RunningMesh) -> None:
    before = pids(spoiled.mesh)
    good = [body(spoiled, [700 + i, 701, 702, 703], cache_salt=f"{i}") for i in range(6)]
    bad = [body(spoiled, [700 + i, SPOILED, 702]) for i in range(3)]

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=spoiled.url, timeout=100) as client:
            asked = [good[0], bad[0], good[1], good[2], bad[1], good[3], bad[2], *good[4:]]
            return list(
                await asyncio.gather(*(client.post("/v1/completions", json=b) for b in asked))
            )

    found = asyncio.run(together())
    failed = [answer for answer in found if answer.status_code != 200]
    assert len(failed) == len(bad)
    assert all(WHY in error_of(answer) for answer in failed)
    answers = [answer.json() for answer in found if answer.status_code == 200]
    for asked, answer in zip(good, answers, strict=True):
        url = f"{spoiled.url}/v1/completions"
        alone = httpx.post(url, json={**asked, "cache_salt": "alone"}, timeout=100).json()
        assert alone["choices"] == answer["choices"]
    spoiled.wait_idle()
    assert pids(spoiled.mesh) == before


def test_a_stream_that_comes_upon_it_ends_with_the_error(spoiled: RunningMesh) -> None:
    """Its first token is the spoiled one: the second cannot be sampled."""
    before = pids(spoiled.mesh)
    only = {"allowed_token_ids": [SPOILED], "logit_bias": {}, "stream": True}
    events: list[Json] = []
    request = body(spoiled, [700, 701], **only)
    url = f"{spoiled.url}/v1/completions"
    with httpx.stream("POST", url, json=request, timeout=100) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    assert "error" not in events[0]
    assert WHY in events[-1]["error"]["message"]
    spoiled.wait_idle()
    assert pids(spoiled.mesh) == before
    again = httpx.post(url, json=body(spoiled, [700, 701]), timeout=100)
    assert again.status_code == 200
