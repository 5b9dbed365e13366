"""Many requests at once on a KV pool far too small: nothing is lost, no bit differs."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from deepmesh.wire.packed import pack_ids
from tests.e2e.wire_client import Answer, WireClient

NUM_REQUESTS = 200
NUM_ALONE = 25  # of them are run again, one at a time
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
global_blocks = 30
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
        prompt_len = rng.choice([3, 30, 50, 60, 63, 64, 65, 127, 128, 129, 257])
        ids = [0, *(rng.randrange(20, 8000) for _ in range(prompt_len - 1))]
        requests.append(
            m.Generate(
                rid=rng.randbytes(16),
                attempt=1,
                reply_to="tokenizer-test",
                prompt_ids=pack_ids(ids),
                prompt_len=prompt_len,
                sampling=m.SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), top_p=0.95),
                seed=n,
                max_tokens=rng.choice([8, 40, 70, 100]),
                n_logprobs=0,
            )
        )
    return requests


def test_a_storm_with_aborts_and_preemptions_loses_nothing_and_changes_no_bit(
    client: WireClient,
) -> None:
    requests = storm(7)
    rng = random.Random(11)
    aborts = {r.rid: rng.choice([0, 1, 5, 20]) for r in rng.sample(requests, NUM_REQUESTS // 5)}

    got = client.run(requests, abort_after=aborts, timeout_s=110)
    client.settle()

    assert all(len(answer.ends) == 1 for answer in got.values())
    after = client.wait_stats(lambda s: s.running == 0 and s.inflight_tokens == 0)
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
        return
    assert end.final_pos == len(storm.ids)
    assert len(storm.ids) == request.max_tokens  # no stop id was given
    assert storm.ids == alone.ids
    assert storm.logprobs == alone.logprobs
