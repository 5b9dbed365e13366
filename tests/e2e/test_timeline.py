"""The timeline and the live map of a whole mesh: every process, every kind of work, one clock."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepmesh.client import Client
from deepmesh.live_client import LiveClient, Seen
from deepmesh.supervisor import Mesh

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[mesh]
name = "timeline"
run_dir = "{folder}/run"
model = "{model}"
[gateway]
port = 0
[links]
heartbeat_s = 0.2
[executor]
ranks = 2
"""
KINDS = {"plan", "submit", "apply", "queued", "device", "collective", "readback", "detokenise"}


def last_request(mesh: Mesh) -> Seen:
    """The only one, once the map shows that it is over."""
    give_up = time.monotonic() + 60
    with LiveClient(mesh.url) as live:
        for state in live.states(0.25):
            (seen,) = state.requests
            if seen.state != "running":
                return seen
            assert time.monotonic() < give_up, seen
    raise AssertionError("the feed has ended")


def wait_for(mesh: Mesh, wanted: Callable[[dict[str, str]], bool]) -> None:
    """Until the map shows it; heartbeats take a moment."""
    give_up = time.monotonic() + 60
    with LiveClient(mesh.url) as live:
        for seen in live.states(0.25):
            found = {process.name: process.state for process in seen.processes}
            if wanted(found):
                return
            assert time.monotonic() < give_up, found


@pytest.mark.timeout(180)
@pytest.mark.alone
def test_plan_n_plus_1_lies_under_device_step_n_and_a_killed_rank_shows(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(CONFIG.format(folder=tmp_path, model=ROOT / "models" / "tiny"))
    with Mesh(path) as mesh:
        with Client(mesh.url, timeout_s=60) as client:
            fields: dict[str, object] = {"model": "tiny", "max_tokens": 40, "ignore_eos": True}
            list(client.stream_chat([{"role": "user", "content": "Hello"}], fields))
        with LiveClient(mesh.url) as live:
            trace = json.loads(live.trace(60))
        seen = last_request(mesh)
        assert (seen.state, seen.output_tokens) == ("done", 40)
        up = dict.fromkeys(mesh.pids, "up")
        wait_for(mesh, lambda found: found == up)
        mesh.kill("executor-0-1")
        wait_for(mesh, lambda found: found["executor-0-1"] != "up")

    pieces = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {piece["cat"] for piece in pieces} == KINDS
    of_ours = [p for p in pieces if p["cat"] == "device" and p["args"].get("requests")]
    assert {p["args"]["requests"] for p in of_ours} == {seen.id[:12]}
    assert len({p["pid"] for p in of_ours}) == 2, "both ranks"
    plans = {p["args"]["step"]: p["ts"] for p in pieces if p["cat"] == "plan"}
    ends = {p["args"]["step"]: p["ts"] + p["dur"] for p in of_ours}
    pairs = [(plans[step + 1], end) for step, end in ends.items() if step + 1 in plans]
    assert len(pairs) > 20
    ahead = sum(plan < end for plan, end in pairs)
    assert ahead > 0.8 * len(pairs), f"{ahead} of {len(pairs)} plans"
