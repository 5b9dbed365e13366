"""A process behind the gateway is killed or hangs in mid-stream: the same text comes out."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from deepmesh.client import Client
from deepmesh.gateway_address import gateway_is_ready
from deepmesh.health import ready_path
from deepmesh.run_dir import tail
from deepmesh.supervisor import Mesh

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 60
DISTURB_AFTER = 20  # pieces of text


@pytest.fixture(scope="module")
def fake_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("r")
    path = folder / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "restarts"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        '[gateway]\nport = 0\n[executor]\nkind = "fake"\nfake_step_ms = 5.0\n'
        "[supervisor]\nbackoff_s = 0.1\n[links]\nheartbeat_s = 0.2\ntimeout_s = 1.5\n"
    )
    with Mesh(path) as mesh:
        yield mesh


def stream(mesh: Mesh, disturb: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """The text of an answer and why it ended; `disturb` is called on the way."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "Tell me about the river."}]
    fields: dict[str, object] = {
        "model": mesh.config.served_model,
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }
    pieces: list[str] = []
    with Client(mesh.url, timeout_s=60) as client:
        for event in client.stream_chat(messages, fields):
            if event.kind == "finish":
                return "".join(pieces), event.text
            pieces.append(event.text)
            if len(pieces) == DISTURB_AFTER:
                disturb()
    raise AssertionError("the stream ended without a reason")


def serves(mesh: Mesh) -> bool:
    """A tokenizer with a ready replica is linked."""
    return httpx.get(mesh.url + "/ready", timeout=10).status_code == 200


def wait_until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline


@pytest.mark.parametrize("name", ["tokenizer-0", "scheduler-0", "executor-0-0"])
def test_a_killed_process_changes_no_text(fake_mesh: Mesh, name: str) -> None:
    undisturbed = stream(fake_mesh)
    assert undisturbed[1] == "length"
    others = {n: pid for n, pid in fake_mesh.pids.items() if n != name}
    old_pids: list[int] = []
    assert stream(fake_mesh, lambda: old_pids.append(fake_mesh.kill(name))) == undisturbed
    assert old_pids[0]
    fake_mesh.wait_restarted(name, old_pids[0])
    assert {n: pid for n, pid in fake_mesh.pids.items() if n != name} == others, tail(
        fake_mesh.run_dir / "logs" / f"{name}.log", 20
    )


@pytest.mark.parametrize("name", ["tokenizer-0", "scheduler-0", "executor-0-0"])
def test_a_process_that_hangs_and_comes_back_changes_no_text(fake_mesh: Mesh, name: str) -> None:
    undisturbed = stream(fake_mesh)

    def hang() -> None:
        fake_mesh.kill(name, signal.SIGSTOP)
        wait_until(lambda: not serves(fake_mesh))  # its peers have given it up
        fake_mesh.kill(name, signal.SIGCONT)

    assert stream(fake_mesh, hang) == undisturbed
    wait_until(lambda: serves(fake_mesh))


HANG_S = 2.0


@pytest.fixture(scope="module")
def watched_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("h")
    path = folder / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "hangs"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        '[gateway]\nport = 0\n[executor]\nkind = "fake"\nfake_step_ms = 5.0\n[router]\ncount = 1\n'
        f"[supervisor]\nbackoff_s = 0.1\nhang_s = {HANG_S}\n"
    )
    with Mesh(path) as mesh:
        yield mesh


@pytest.mark.parametrize("name", ["tokenizer-0", "router-0", "scheduler-0", "executor-0-0"])
def test_a_process_that_hangs_for_good_is_replaced(watched_mesh: Mesh, name: str) -> None:
    mesh = watched_mesh
    undisturbed = stream(mesh)
    ready = ready_path(mesh.run_dir, name)
    wait_until(ready.exists)
    hung: list[int] = []
    assert stream(mesh, lambda: hung.append(mesh.kill(name, signal.SIGSTOP))) == undisturbed
    mesh.wait_restarted(name, hung[0])
    wait_until(ready.exists)


def test_a_gateway_that_hangs_is_replaced_at_the_same_address(watched_mesh: Mesh) -> None:
    mesh = watched_mesh
    wait_until(ready_path(mesh.run_dir, "gateway-0").exists)
    pid = mesh.kill("gateway-0", signal.SIGSTOP)
    mesh.wait_restarted("gateway-0", pid)
    wait_until(lambda: gateway_is_ready(mesh.url))
    assert stream(mesh)[1] == "length"
