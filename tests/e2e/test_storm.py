"""Many requests at once on a KV pool far too small: nothing is lost, no bit differs."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from deepmesh.wire.packed import pack_ids
from tests.e2e.conftest import RunningMesh
from tests.e2e.wire_client import Answer, WireClient
from tests.tiny import VOCAB_SIZE

NUM_REQUESTS = 200
NUM_ALONE = 20  # of them are run again, one at a time
MIN_PREEMPTIONS = 50
CONFIG = """
[mesh]
name = "storm"
run_dir = "{run_dir}"
model = "{model}"
[gateway]
port = 0
[scheduler]
max_rows = 24
step_tokens = 512
audit = true
[executor]
global_blocks = 14
window_blocks = 60
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("s")
    path = folder / "mesh.toml"
    model = Path(__file__).parents[2] / "models" / "tiny"
    path.write_text(CONFIG.format(run_dir=folder / "run", model=model))
    with Mesh(path) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def client(mesh: Mesh) -> Iterator[WireClient]:
    client = WireClient(mesh.config.scheduler_address(0))
    client.wait_stats(lambda s: s.ready, 60)
    yield client
    client.close()


def storm(seed: int) -> list[m.Generate]:
    """Prompts around the block and chunk edges, greedy and sampled, short answers."""
    rng = random.Random(seed)
    requests: list[m.Generate] = []
    for n in range(NUM_REQUESTS):
        prompt_len = rng.choice([3, 55, 60, 62, 63, 64, 65, 120, 127, 128, 250])
        ids = [0, *(rng.randrange(20, VOCAB_SIZE) for _ in range(prompt_len - 1))]
        requests.append(
            m.Generate(
                rid=rng.randbytes(16),
                attempt=1,
                reply_to="tokenizer-test",
                prompt_ids=pack_ids(ids),
                prompt_len=prompt_len,
                sampling=m.SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), top_p=0.95),
                seed=n,
                max_tokens=rng.choice([8, 40, 70, 90]),
                n_logprobs=0,
                n_prompt_logprobs=2 if n % 3 == 0 else -1,
            )
        )
    return requests


@pytest.mark.timeout(300)
def test_a_storm_with_aborts_and_preemptions_loses_nothing_and_changes_no_bit(
    client: WireClient,
) -> None:
    requests = storm(7)
    rng = random.Random(11)
    aborts = {r.rid: rng.choice([0, 1, 5, 20]) for r in rng.sample(requests, NUM_REQUESTS // 5)}

    got = client.run(requests, abort_after=aborts, timeout_s=200)
    client.settle()

    assert all(len(answer.ends) == 1 for answer in got.values())
    after = client.wait_stats(lambda s: s.running == 0 and s.inflight_tokens == 0)
    print(f"{after.preemptions} preemptions in {after.steps} steps")
    assert after.preemptions >= MIN_PREEMPTIONS, after
    free = [f + c for f, c in zip(after.free_blocks, after.cached_blocks, strict=True)]
    assert free == list(after.total_blocks)

    for request in requests[:: NUM_REQUESTS // NUM_ALONE]:  # one at a time, on the same mesh
        alone = client.run([again(request)])
        compare(got[request.rid], next(iter(alone.values())), request, request.rid in aborts)


def again(request: m.Generate) -> m.Generate:
    """The same request under another id, and past the prefix cache."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return m.Generate(**{**fields, "rid": bytes(reversed(request.rid)), "salt": request.rid})


def compare(storm: Answer, alone: Answer, request: m.Generate, aborted: bool) -> None:
    end = storm.ends[0]
    assert isinstance(end, m.Finished), end
    if aborted and end.reason == m.FinishReason.ABORT:
        n = len(storm.ids)
        assert storm.ids == alone.ids[:n]
        assert storm.logprobs == alone.logprobs[: 4 * n]
        assert not n or storm.prompt == alone.prompt
        return
    assert end.final_pos == len(storm.ids)
    assert len(storm.ids) == request.max_tokens  # no stop id was given
    assert storm.ids == alone.ids
    assert storm.logprobs == alone.logprobs
    assert storm.prompt == alone.prompt
    assert (storm.prompt is None) == (request.n_prompt_logprobs < 0)


class Stream:
    """What one HTTP client saw of its stream."""

    def __init__(self) -> None:
        self.text = ""
        self.logprobs: list[float] = []
        self.num_ends = 0
        self.hung_up = False

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.num_ends += 1
        elif line.startswith("data: "):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            self.text += choice["text"]
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])


async def ask(
    client: httpx.AsyncClient, body: dict[str, object], hang_up_after: int | None
) -> Stream:
    """One streamed completion; hangs up after so many tokens."""
    seen = Stream()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            seen.take(line)
            if hang_up_after is not None and len(seen.logprobs) >= hang_up_after:
                seen.hung_up = True
                return seen
    return seen


def http_storm(seed: int) -> list[dict[str, object]]:
    rng = random.Random(seed)
    return [
        {
            "model": "tiny",
            "prompt": [
                rng.randrange(20, VOCAB_SIZE) for _ in range(rng.choice([3, 59, 61, 62, 126]))
            ],
            "max_tokens": rng.choice([48, 70, 90]),
            "temperature": rng.choice([0.0, 0.8]),
            "seed": n,
            "ignore_eos": True,
            "logprobs": 1,
            "stream": True,
            "cache_salt": f"{n}",
        }
        for n in range(NUM_REQUESTS)
    ]


@pytest.mark.timeout(300)
def test_200_http_streams_at_once_end_once_each_with_the_text_they_have_alone(mesh: Mesh) -> None:
    bodies = http_storm(3)
    rng = random.Random(5)
    hang_ups = {n: rng.choice([1, 3, 9]) for n in rng.sample(range(NUM_REQUESTS), 40)}

    async def scenario() -> tuple[list[Stream], list[Stream]]:
        limits = httpx.Limits(max_connections=NUM_REQUESTS)
        async with httpx.AsyncClient(base_url=mesh.url, timeout=100, limits=limits) as client:
            together = await asyncio.gather(
                *(ask(client, body, hang_ups.get(n)) for n, body in enumerate(bodies))
            )
            step = NUM_REQUESTS // NUM_ALONE
            alone = [await ask(client, {**b, "cache_salt": "x"}, None) for b in bodies[::step]]
        return together, alone

    running = RunningMesh(mesh, mesh.run_dir / "mesh.toml")
    before = running.total("deepmesh_preemptions_total")
    together, alone = asyncio.run(scenario())
    running.wait_idle()
    preemptions = running.total("deepmesh_preemptions_total") - before
    print(f"{preemptions:.0f} preemptions")
    assert preemptions >= MIN_PREEMPTIONS
    assert [s.num_ends for s in together] == [0 if s.hung_up else 1 for s in together]
    assert sum(s.hung_up for s in together) >= 20
    for storm_stream, lone in zip(together[:: NUM_REQUESTS // NUM_ALONE], alone, strict=True):
        n = len(storm_stream.logprobs)
        assert storm_stream.logprobs == lone.logprobs[:n]
        assert lone.text.startswith(storm_stream.text)
        assert storm_stream.hung_up or n == len(lone.logprobs)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [20] * 1500}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 750}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a b " * 750}]}),
    ],
)
def test_a_prompt_that_the_pools_can_never_hold_is_refused_at_once(
    mesh: Mesh, path: str, fields: dict[str, object]
) -> None:
    body = {"model": "tiny", "max_tokens": 4, **fields}
    answer = httpx.post(mesh.url + path, json=body, timeout=20)
    assert answer.status_code == 400, answer.text
    named = "prompt" if "prompt" in fields else "messages"
    assert named in json.dumps(answer.json()["error"])
    RunningMesh(mesh, mesh.run_dir / "mesh.toml").wait_idle()
