"""Two replicas behind a router: whichever process dies, the same text comes out."""

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

import pytest

from deepmesh.client import Client
from deepmesh.supervisor import Mesh
from tests.e2e.conftest import RunningMesh, until

ROOT = Path(__file__).resolve().parents[2]
NUM_STREAMS = 8
MAX_TOKENS = 60
KILL_AFTER = 15  # pieces of text, of every stream


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("r")
    path = folder / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "replicas"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        '[gateway]\nport = 0\n[executor]\nkind = "fake"\nfake_step_ms = 5.0\n'
        "[router]\ncount = 1\n[scheduler]\ncount = 2\naudit = true\n"
        "[supervisor]\nbackoff_s = 0.1\n"
    )
    with Mesh(path) as mesh:
        running = RunningMesh(mesh, path)
        until(lambda: running.total("deepmesh_replica_ready") == 2, "both replicas")
        yield mesh


def stream(mesh: Mesh, number: int, on_piece: Semaphore) -> tuple[str, str]:
    """The text of an answer and why it ended."""
    messages: list[dict[str, object]] = [{"role": "user", "content": f"Tell me of river {number}."}]
    fields: dict[str, object] = {
        "model": mesh.config.served_model,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }
    text, pieces = "", 0
    with Client(mesh.url, timeout_s=60) as client:
        for event in client.stream_chat(messages, fields):
            if event.kind == "finish":
                return text, event.text
            text += event.text
            pieces += 1
            if pieces == KILL_AFTER:
                on_piece.release()
    raise AssertionError("the stream ended without a reason")


def storm(
    mesh: Mesh, *kill: str, how: int = signal.SIGKILL, late: bool = False
) -> list[tuple[str, str]]:
    """All streams at once; the named processes get a signal while each of them runs.

    With `late` the same requests come once more, right behind the signal.
    """
    running = Semaphore(0)
    with ThreadPoolExecutor(2 * NUM_STREAMS) as pool:
        streams: list[Future[tuple[str, str]]] = [
            pool.submit(stream, mesh, number, running) for number in range(NUM_STREAMS)
        ]
        for _ in range(NUM_STREAMS):
            assert running.acquire(timeout=60)
        pids = {name: mesh.kill(name, how) for name in kill}
        if late:
            streams += [pool.submit(stream, mesh, n, running) for n in range(NUM_STREAMS)]
        answers = [each.result(timeout=60) for each in streams]
    for name, pid in pids.items():
        assert pid
        mesh.wait_restarted(name, pid)
    return answers


def routes(mesh: Mesh, wanted: int) -> Counter[str]:
    """How many requests the router has sent to each replica, as of its spans."""
    path = mesh.run_dir / "traces" / "router-0.jsonl"
    found: Counter[str] = Counter()

    def all_there() -> bool:
        found.clear()
        for line in path.read_bytes().splitlines() if path.exists() else []:
            span = json.loads(line)
            if span["name"] == "route":
                found[span["attributes"]["replica"]] += 1
        return found.total() >= wanted

    deadline = time.monotonic() + 60
    while not all_there():
        assert time.monotonic() < deadline, found
        mesh.wait_for(lambda: False, 0.05)
    return found


def test_the_router_spreads_and_a_death_changes_no_text(mesh: Mesh) -> None:
    router_log = mesh.run_dir / "logs" / "router-0.log"
    until(lambda: "tokenizer-0 is up" in router_log.read_text(), "the tokenizer's link")
    undisturbed = storm(mesh)
    assert {reason for _, reason in undisturbed} == {"length"}
    half = NUM_STREAMS // 2
    assert routes(mesh, NUM_STREAMS) == {"scheduler-0": half, "scheduler-1": half}

    assert storm(mesh, "router-0") == undisturbed
    assert storm(mesh, "scheduler-1") == undisturbed
    assert storm(mesh, "router-0", "scheduler-0") == undisturbed


def test_requests_that_meet_a_draining_replica_go_on_at_the_other(mesh: Mesh) -> None:
    undisturbed = storm(mesh)
    assert storm(mesh, "scheduler-1", how=signal.SIGTERM, late=True) == 2 * undisturbed
