"""A kvstore in the real mesh: the same bits without it, into it and out of it."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.run_dir import tail
from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from deepmesh.wire.packed import pack_ids
from tests.e2e.conftest import store_links, until, wait_store_links
from tests.e2e.wire_client import Answer, WireClient

MODEL = Path(__file__).parents[2] / "models" / "tiny"
VOCAB = json.loads((MODEL / "config.json").read_text())["text_config"]["vocab_size"]
NUM_REQUESTS = 64
CHUNK_ALIGN = 128
Bits = list[tuple[list[int], bytes, str]]  # ids, logprobs and end of each request
CONFIG = """
[mesh]
name = "stored"
run_dir = "{run_dir}"
model = "{model}"
[links]
heartbeat_s = 0.3
[gateway]
port = 0
[router]
count = {router}
[scheduler]
count = {replicas}
max_rows = 10
step_tokens = 512
audit = true
store_lookup_s = 10.0
store_load_s = 20.0
[executor]
ranks = {ranks}
[kvstore]
count = {stores}
memory_bytes = 268435456
[supervisor]
backoff_s = 0.1
"""


@contextmanager
def start(folder: Path, *, ranks: int = 1, replicas: int = 1, stores: int = 1) -> Iterator[Mesh]:
    """A mesh; the ends of its logs are shown with a failure."""
    path = folder / "mesh.toml"
    text = CONFIG.format(
        run_dir=folder / "run",
        model=MODEL,
        ranks=ranks,
        replicas=replicas,
        router=int(replicas > 1),
        stores=stores,
    )
    path.write_text(text)
    with Mesh(path) as mesh:
        try:
            yield mesh
        except BaseException as error:
            for log in sorted((folder / "run" / "logs").glob("*-0*.log")):
                error.add_note(f"{log.name}:\n  " + "\n  ".join(tail(log, 12)))
            raise


def mixed(marker: int) -> list[m.Generate]:
    """The same requests for every marker, under other ids."""
    rng = random.Random(7)
    shared = [[0, *(rng.randrange(20, VOCAB) for _ in range(299))] for _ in range(4)]
    requests: list[m.Generate] = []
    for n in range(NUM_REQUESTS):
        length = rng.choice([3, 64, 127, 128, 129, 200, 257, 400, 600])
        ids = [0, *(rng.randrange(20, VOCAB) for _ in range(length - 1))]
        if n % 2:
            ids = shared[n // 2 % 4] + ids[1:20]
        requests.append(
            m.Generate(
                rid=bytes([marker]) + rng.randbytes(15),
                attempt=1,
                reply_to="tokenizer-test",
                prompt_ids=pack_ids(ids),
                prompt_len=len(ids),
                sampling=m.SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), top_p=0.95),
                seed=n,
                max_tokens=rng.choice([1, 2, 6, 12]),
                stop_ids=pack_ids(rng.sample(range(VOCAB), 20)),
                n_logprobs=rng.choice([-1, 0, 3]),
            )
        )
    return requests


class Run(NamedTuple):
    """What all replicas gave, and their figures afterwards."""

    bits: Bits
    stored: int
    hit_tokens: int


def run(mesh: Mesh, requests: list[m.Generate], *, shift: int = 0) -> Run:
    """The requests by turns to the schedulers; with `shift`, others get them."""
    found: dict[bytes, Answer] = {}
    stored = hit_tokens = 0
    for index in range(mesh.config.scheduler.count):
        mine = requests[
            (index + shift) % mesh.config.scheduler.count :: mesh.config.scheduler.count
        ]
        client = WireClient(mesh.config.scheduler_address(index))
        client.wait_stats(lambda s: s.ready, 60)
        found |= client.run(mine)
        stats = settled(client)
        unused = [f + c for f, c in zip(stats.free_blocks, stats.cached_blocks, strict=True)]
        assert unused == list(stats.total_blocks), "blocks leaked"
        assert stats.failed_audits == 0
        stored += stats.stored_blocks
        hit_tokens += stats.store_hit_tokens
        client.close()
    return Run([outcome(found[request.rid]) for request in requests], stored, hit_tokens)


def settled(client: WireClient) -> m.ReplicaStats:
    """The figures once nothing runs and nothing is stored any more."""
    last = -1
    while last != (now := client.stats.stored_blocks):
        last = now
        client.settle(0.8)  # more than two heartbeats without news
        client.wait_stats(lambda s: s.ready and s.running == 0 and s.inflight_tokens == 0)
    return client.stats


def outcome(answer: Answer) -> tuple[list[int], bytes, str]:
    assert len(answer.ends) == 1
    end = answer.ends[0]
    assert isinstance(end, m.Finished), end
    return answer.ids, answer.logprobs, end.reason.name


def restart(mesh: Mesh) -> None:
    """Schedulers and executors lose all they have."""
    names = [n for n in mesh.pids if n.startswith(("scheduler", "executor"))]
    links = store_links(mesh)
    killed = {name: mesh.kill(name) for name in names}
    for name, pid in killed.items():
        mesh.wait_restarted(name, pid)
    wait_store_links(mesh, links, names)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """Without a kvstore."""
    with start(tmp_path_factory.mktemp("k"), stores=0) as mesh:
        return run(mesh, mixed(0)).bits


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2)])
def test_ids_and_logprobs_are_those_without_a_store(
    tmp_path: Path, expected: Bits, ranks: int, count: int
) -> None:
    with start(tmp_path, ranks=ranks, replicas=count) as mesh:
        cold = run(mesh, mixed(1))
        assert cold.bits == expected
        assert cold.stored > 0
        restart(mesh)
        warm = run(mesh, mixed(2), shift=1)
        print(f"{ranks} ranks, {count} replicas: {warm.hit_tokens} tokens from the store")
        assert warm.bits == expected
        assert warm.hit_tokens > 0
        shared = mesh.config.shared_dir
        assert shared is not None
        assert shared.exists()
    assert not shared.exists(), "a mapped file was left behind"


# ---------------------------------------------------------------- a conversation goes on


class Turn(NamedTuple):
    """One streamed answer."""

    text: str
    first_s: float  # to the first piece of text
    prompt_tokens: int
    cached_tokens: int


def ask(mesh: Mesh, messages: list[dict[str, str]]) -> Turn:
    fields = {
        "model": mesh.config.served_model,
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first_s, text, usage = time.perf_counter(), 0.0, "", {}
    with httpx.stream("POST", mesh.url + "/v1/chat/completions", json=fields, timeout=120) as got:
        assert got.status_code == 200, got.read()
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not first_s:
                    first_s = time.perf_counter() - began
                text += piece
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(text, first_s, usage["prompt_tokens"], cached)


def metric(mesh: Mesh, name: str) -> float:
    """A counter of all replicas."""
    text = httpx.get(mesh.url + "/metrics", timeout=10).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def essay(seed: int, num_words: int) -> str:
    """Words by lot: no two essays share more than the template."""
    rng = random.Random(seed)
    words = ["river", "stone", "cloud", "lamp", "bridge", "window", "garden", "letter", "north"]
    return " ".join(rng.choice(words) for _ in range(num_words))


@pytest.mark.timeout(300)
@pytest.mark.alone
def test_the_next_turn_after_a_restart_is_served_from_the_store(tmp_path: Path) -> None:
    with start(tmp_path) as mesh:
        ask(mesh, [{"role": "user", "content": "warm up"}])
        cold = ask(mesh, [{"role": "user", "content": essay(1, 2400)}])
        talk = [{"role": "user", "content": essay(2, 2400)}]
        first = ask(mesh, talk)
        assert first.prompt_tokens >= 2400
        stored = 0.0
        while stored == 0 or stored != metric(mesh, "deepmesh_stored_blocks_total"):
            stored = metric(mesh, "deepmesh_stored_blocks_total")
            mesh.wait_for(lambda: False, 1.0)
        restart(mesh)
        ask(mesh, [{"role": "user", "content": "warm up again"}])
        talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
        again = ask(mesh, talk)
        new_tokens = again.prompt_tokens - first.prompt_tokens
        computed = again.prompt_tokens - again.cached_tokens
        print(
            f"first token of {first.prompt_tokens} tokens: cold {1e3 * cold.first_s:.0f} ms, "
            f"from the store {1e3 * again.first_s:.0f} ms; "
            f"{computed} tokens computed, {new_tokens} of them new"
        )
        assert computed <= CHUNK_ALIGN + new_tokens
        least, name = first.prompt_tokens - CHUNK_ALIGN, "deepmesh_store_hit_tokens_total"
        until(lambda: metric(mesh, name) >= least, f"{least} tokens out of the store")
        assert 3 * again.first_s <= cold.first_s
