"""Restarts keep the cache: whoever dies, the prompt is found again, and the answer has its bits."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.run_dir import tail
from deepmesh.supervisor import Mesh
from tests.e2e.conftest import store_links, until, wait_store_links
from tests.e2e.test_kvstore_mesh import CHUNK_ALIGN, CONFIG, MODEL, essay, metric

TIERS = ("device", "memory", "disk", "shared")


@contextmanager
def start(folder: Path, prefill_tail: str = "exact") -> Iterator[Mesh]:
    """A mesh whose kvstore has a memory and a disk tier."""
    folder.mkdir(exist_ok=True)
    text = CONFIG.format(
        run_dir=folder / "run", model=MODEL, ranks=1, replicas=1, router=0, stores=1
    )
    path = folder / "mesh.toml"
    text = text.replace("[kvstore]\n", "[kvstore]\ndisk_bytes = 268435456\n")
    path.write_text(text.replace("[executor]\n", f'[executor]\nprefill_tail = "{prefill_tail}"\n'))
    with Mesh(path) as mesh:
        try:
            yield mesh
        except BaseException as error:
            for log in sorted((folder / "run" / "logs").glob("*-0*.log")):
                error.add_note(f"{log.name}:\n  " + "\n  ".join(tail(log, 12)))
            raise


class Reply(NamedTuple):
    """An answer, its log-probabilities as they were written, and what of its prompt was cached."""

    text: str
    logprobs: str
    prompt_tokens: int
    cached_tokens: int


def ask(mesh: Mesh, content: str) -> Reply:
    fields = {
        "model": mesh.config.served_model,
        "messages": [
            {"role": "system", "content": essay(99, 200)},
            {"role": "user", "content": content},
        ],
        "max_tokens": 12,
        "seed": 5,
        "ignore_eos": True,
        "logprobs": True,
        "thinking": {"type": "disabled"},
    }
    got = httpx.post(mesh.url + "/v1/chat/completions", json=fields, timeout=120)
    assert got.status_code == 200, got.text
    body = got.json()
    (choice,), usage = body["choices"], body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(
        choice["message"]["content"],
        json.dumps(choice["logprobs"]),
        usage["prompt_tokens"],
        cached,
    )


def hits(mesh: Mesh) -> dict[str, float]:
    """Prompt tokens that were not computed, by tier, since the scheduler's start."""
    found: dict[str, float] = {tier: 0.0 for tier in TIERS}
    for family in text_string_to_metric_families(httpx.get(mesh.url + "/metrics").text):
        for sample in family.samples:
            if sample.name == "deepmesh_prefix_hit_tokens_total":
                found[sample.labels["tier"]] += sample.value
    return found


def num_loads(mesh: Mesh) -> int:
    """How often the scheduler has heard that its executor is loaded."""
    log = Path(mesh.config.mesh.run_dir) / "logs" / "scheduler-0.log"
    return log.read_text().count("executor loaded")


def kill(mesh: Mesh, *names: str) -> None:
    """All at once; back when they are back, and the scheduler has a new engine: who asks before it
    has noticed is served by the old one's cache."""
    before, links = num_loads(mesh), store_links(mesh)
    killed = {name: mesh.kill(name) for name in names}
    for name, pid in killed.items():
        mesh.wait_restarted(name, pid)
    if any(not name.startswith("kvstore") for name in names):
        until(lambda: num_loads(mesh) > before, "a new engine", 60)
    wait_store_links(mesh, links, names)


def wait_stored(mesh: Mesh) -> None:
    stored = 0.0
    while stored == 0 or stored != metric(mesh, "deepmesh_stored_blocks_total"):
        stored = metric(mesh, "deepmesh_stored_blocks_total")
        mesh.wait_for(lambda: False, 1.0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_restart_keeps_the_cache_and_the_bits(tmp_path: Path) -> None:
    content = essay(1, 700)
    with start(tmp_path) as mesh:
        cold = ask(mesh, content)
        assert cold.cached_tokens == 0
        least = cold.prompt_tokens - CHUNK_ALIGN
        wait_stored(mesh)

        def again(tier: str, tokens: int) -> None:
            reply = ask(mesh, content)
            assert reply[:3] == cold[:3]
            assert reply.cached_tokens >= least
            until(lambda: hits(mesh)[tier] >= tokens, f"{tokens} tokens out of {tier}")
            print(f"{tier}: {reply.cached_tokens} of {reply.prompt_tokens}, {hits(mesh)}")

        again("device", least)
        kill(mesh, "executor-0-0")
        again("memory", least)
        kill(mesh, "scheduler-0")
        again("memory", least)
        kill(mesh, "kvstore-0")
        again("device", least)  # nobody lost what is there
        kill(mesh, "executor-0-0")
        again("disk", least)
        kill(mesh, "kvstore-0", "scheduler-0", "executor-0-0")
        again("disk", least)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_prompts_that_leave_out_layers_have_the_bits_of_whole_ones(tmp_path: Path) -> None:
    found: dict[str, list[Reply]] = {}
    for kind in ("full", "exact"):
        with start(tmp_path / kind, kind) as mesh:
            found[kind] = [ask(mesh, essay(seed, 300 * seed)) for seed in (1, 2, 3, 2)]
            name = "deepmesh_output_tokens_total"
            until(lambda mesh=mesh, name=name: metric(mesh, name) >= 48, "all output tokens")
            skipped = metric(mesh, "deepmesh_prefill_skipped_tokens_total")
        assert (skipped > 0) == (kind == "exact")
    assert found["full"] == found["exact"]
