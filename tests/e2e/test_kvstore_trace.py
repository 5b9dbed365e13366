"""The trace of a request that is served from the kvstore: one tree over all processes."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deepmesh.supervisor import Mesh
from deepmesh.telemetry import SPAN_PREFILL, new_traceparent, trace_id_of
from deepmesh.waterfall import Waterfall, build, depths, find_trace, read_spans
from tests.e2e.conftest import RunningMesh, store_links, wait_store_links
from tests.e2e.probe import Probe
from tests.tiny import VOCAB_SIZE

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
GRID, BLOCK = 128, 64
NUM_TOKENS = 700
CONFIG = """
[mesh]
name = "kvstore"
run_dir = "{run_dir}"
model = "{model}"
[gateway]
port = 0
[scheduler]
audit = true
store_lookup_s = 10.0
store_load_s = 20.0
[executor]
ranks = 2
[kvstore]
count = 1
memory_bytes = 67108864
[supervisor]
backoff_s = 0.1
"""


class Turn:
    """One streamed answer, and its trace."""

    def __init__(self, url: str, prompt: list[int]) -> None:
        self.traceparent = new_traceparent()
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 16,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.cached_tokens = -1
        headers = {"traceparent": self.traceparent}
        with httpx.stream(
            "POST", url + "/v1/completions", json=body, headers=headers, timeout=100
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("usage"):
                        details = event["usage"]["prompt_tokens_details"]
                        self.cached_tokens = details["cached_tokens"]

    def waterfall(self, mesh: Mesh) -> Waterfall:
        """Its trace, once the last process has written its part."""
        trace_id, deadline = trace_id_of(self.traceparent), time.monotonic() + 60
        while True:
            spans = [s for s in read_spans(mesh.run_dir / "traces") if s.trace_id == trace_id]
            names = {span.name for span in spans}
            if names >= {"request", SPAN_PREFILL, "device decode", "kv load", "kv get"}:
                return build(find_trace(spans, trace_id))
            assert time.monotonic() < deadline, names
            mesh.wait_for(lambda: False, 0.1)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    path = tmp_path / "mesh.toml"
    path.write_text(CONFIG.format(run_dir=tmp_path / "run", model=MODEL))
    with Mesh(path) as mesh:
        yield mesh


def restart_engine(mesh: Mesh) -> None:
    """Scheduler and executors lose all they know."""
    config = mesh.config
    names = [name for name in mesh.pids if name.startswith(("scheduler", "executor"))]
    links = store_links(mesh)
    pids = {name: mesh.kill(name) for name in names}
    for name, pid in pids.items():
        mesh.wait_restarted(name, pid)
    with Probe(config.scheduler_address(0), "tokenizer", config.links) as probe:
        probe.wait(lambda peer: peer.stats.ready, 90)
    wait_store_links(mesh, links, names)


@pytest.mark.timeout(240)
def test_a_turn_out_of_the_kvstore_is_one_tree_with_its_spans(mesh: Mesh) -> None:
    running = RunningMesh(mesh, mesh.run_dir / "mesh.toml")
    rng = random.Random(3)
    prompt = [0, *(rng.randrange(20, VOCAB_SIZE) for _ in range(NUM_TOKENS - 1))]
    Turn(mesh.url, prompt)
    running.wait_idle()
    stored = NUM_TOKENS // BLOCK + 1  # all full blocks, and a point to resume at
    deadline = time.monotonic() + 60
    while running.total("deepmesh_stored_blocks_total") < stored:
        assert time.monotonic() < deadline, "not written through"
    restart_engine(mesh)

    second = Turn(mesh.url, prompt)
    assert second.cached_tokens >= NUM_TOKENS - GRID
    running.wait_total("deepmesh_store_hit_tokens_total", second.cached_tokens)

    waterfall = second.waterfall(mesh)
    by_depth = depths(waterfall.spans)
    assert [s.name for s in waterfall.spans if not by_depth[s.span_id]] == ["request"]
    services = {span.service for span in waterfall.spans}
    assert services == {"gateway", "tokenizer", "scheduler", "executor", "kvstore"}
    assert waterfall.explained >= 0.95, waterfall.gaps
    running.wait_idle()
