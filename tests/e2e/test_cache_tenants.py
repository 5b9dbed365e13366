"""`deepmesh cache` on a running mesh, and that nobody is served what another tenant has cached."""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deepmesh.cli.app import app
from deepmesh.store_operator import ask_stats
from deepmesh.supervisor import Mesh
from tests.e2e.conftest import RunningMesh, until
from tests.redis_server import redis_server

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
KEYS = ("first-key", "second-key")
WAIT_S = 60.0
CONFIG = """
[mesh]
name = "tenants"
run_dir = "{run_dir}"
model = "{model}"
[gateway]
port = 0
api_keys = {hashes}
[scheduler]
store_lookup_s = 5.0
store_load_s = 20.0
[executor]
kind = "fake"
[kvstore]
count = 1
memory_bytes = 16777216
disk_bytes = 33554432
redis_url = "{redis_url}"
[links]
heartbeat_s = 0.2
[supervisor]
backoff_s = 0.1
"""
PROMPTS = ["The old mill by the river " * 60, "Seven boats in the paper garden " * 60]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[RunningMesh]:
    path = tmp_path / "mesh.toml"
    hashes = json.dumps([hashlib.sha256(key.encode()).hexdigest() for key in KEYS])
    with redis_server(tmp_path / "redis") as server:
        settings = {"model": MODEL, "hashes": hashes, "redis_url": server.url}
        path.write_text(CONFIG.format(run_dir=tmp_path / "run", **settings))
        with Mesh(path) as running:
            yield RunningMesh(running, path)


def cached_tokens(mesh: RunningMesh, key: str, prompt: str) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    answer.raise_for_status()
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def cache(mesh: RunningMesh, *words: str) -> str:
    found = CliRunner().invoke(app, ["cache", *words, "--config", str(mesh.config_path)])
    assert found.exit_code == 0, found.output
    return found.output


def wait_stored(mesh: RunningMesh, points: int) -> None:
    """Until so many prompts and what is generated behind them are in Redis, too."""
    deadline, last = time.monotonic() + WAIT_S, -1
    while True:
        stats = ask_stats(mesh.mesh.config, 0)
        values = dict(stats.values) if stats is not None else {}
        now = values.get("shared_puts", 0)
        if now == last and now >= points and values["memory_items"] == now:
            return
        last = now
        assert time.monotonic() < deadline, values
        mesh.mesh.wait_for(lambda: False, 0.5)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_tenant_finds_its_own_prefixes_in_every_tier_and_no_other_ones(
    mesh: RunningMesh, tmp_path: Path
) -> None:
    first, second = KEYS
    source = tmp_path / "prompts.jsonl"
    spares = [f"Number {number} of the spare ones. " * 30 for number in range(40)]
    source.write_text("\n".join(map(json.dumps, [*PROMPTS, *spares])))
    warmed = json.loads(cache(mesh, "warm", str(source), "--api-key", first, "--json"))
    assert (warmed["done"], warmed["failed"], warmed["cached_tokens"]) == (42, 0, 0)
    wait_stored(mesh, points=42)
    for tier, loses in (("memory", ()), ("disk", ("kvstore-0",)), ("shared", ())):
        for name in ("executor-0-0", *loses):  # what the device keeps is gone each time
            kill(mesh, name)
        if tier == "shared":
            assert "blocks and points" in cache(mesh, "flush")
        while not cached_tokens(mesh, first, spares.pop()):  # not all links are up yet
            mesh.mesh.wait_for(lambda: False, 0.5)
        for prompt in PROMPTS:
            assert cached_tokens(mesh, first, prompt) > 0, tier
    for prompt in PROMPTS:
        assert cached_tokens(mesh, second, prompt) == 0, "another tenant's"
        assert cached_tokens(mesh, second, prompt) > 0, "its own"
    mesh.wait_total("deepmesh_store_shared_up", 1)
    for tier in ("memory", "disk", "shared"):  # behind the answers, and by heartbeats
        until(lambda tier=tier: mesh.total("deepmesh_store_items", tier=tier) > 0, f"items: {tier}")
    hits, asked, ideal = "store_hit_blocks", "store_lookup_blocks", "store_ideal_blocks"
    until(lambda: mesh.total(f"deepmesh_{hits}_total", tier="shared") > 0, "hits")
    until(
        lambda: mesh.total(f"deepmesh_{asked}_total") > mesh.total(f"deepmesh_{ideal}_total") > 0,
        "look-ups",
    )
    cache(mesh, "flush", "--shared", "--device")
    assert [cached_tokens(mesh, first, prompt) for prompt in PROMPTS] == [0, 0]


def kill(mesh: RunningMesh, name: str) -> None:
    pid = mesh.mesh.kill(name)
    assert mesh.mesh.wait_restarted(name, pid)
