"""A process behind the gateway is killed in the middle of a stream: the same text comes out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepmesh.client import Client
from deepmesh.run_dir import tail
from deepmesh.supervisor import Mesh

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 60
KILL_AFTER = 20  # pieces of text


@pytest.fixture(scope="module")
def fake_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("r")
    path = folder / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "restarts"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        '[gateway]\nport = 0\n[executor]\nkind = "fake"\nfake_step_ms = 5.0\n'
        "[supervisor]\nbackoff_s = 0.1\n"
    )
    with Mesh(path) as mesh:
        yield mesh


def stream(mesh: Mesh, *, kill: str = "") -> tuple[str, str]:
    """The text of an answer and why it ended; `kill` dies on the way and is back at the end."""
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
    old_pid = 0
    with Client(mesh.url, timeout_s=60) as client:
        for event in client.stream_chat(messages, fields):
            if event.kind == "finish":
                break
            pieces.append(event.text)
            if kill and len(pieces) == KILL_AFTER:
                old_pid = mesh.kill(kill)
        else:
            raise AssertionError("the stream ended without a reason")
    if kill:
        assert old_pid
        mesh.wait_restarted(kill, old_pid)
    return "".join(pieces), event.text


@pytest.mark.parametrize("name", ["tokenizer-0", "scheduler-0", "executor-0-0"])
def test_a_killed_process_changes_no_text(fake_mesh: Mesh, name: str) -> None:
    undisturbed = stream(fake_mesh)
    assert undisturbed[1] == "length"
    others = {n: pid for n, pid in fake_mesh.pids.items() if n != name}
    assert stream(fake_mesh, kill=name) == undisturbed
    assert {n: pid for n, pid in fake_mesh.pids.items() if n != name} == others, tail(
        fake_mesh.run_dir / "logs" / f"{name}.log", 20
    )
