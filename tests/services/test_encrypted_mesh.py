"""A whole mesh whose processes talk tcp with keys, as on several hosts; one of them is killed."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deepmesh.client import Client
from deepmesh.key_folder import make_keys
from deepmesh.processes import USAGE_STATUS, Command
from deepmesh.run_dir import tail
from deepmesh.supervisor import Mesh

ROOT = Path(__file__).parents[2]
PROCESSES = {
    "kvstore-0": ["--index", "0"],
    "scheduler-0": ["--index", "0"],
    "executor-0-0": ["--index", "0", "--rank", "0"],
    "router-0": [],
    "tokenizer-0": ["--index", "0"],
    "gateway-0": [],
}


def free_ports(count: int) -> list[int]:
    """All different: they are held together."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("k")
    make_keys(folder / "keys")
    for service in ("gateway", "tokenizer", "router", "scheduler", "executor", "kvstore"):
        (folder / "hosts" / service).mkdir(parents=True)  # each host gets one service's keys
        (folder / "keys" / service).rename(folder / "hosts" / service / service)
    services = ("tokenizer", "router", "scheduler", "kvstore")
    gateway, *ports = free_ports(5)
    text = (
        f'[mesh]\nname = "keys"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        f"[gateway]\nport = {gateway}\n[links]\nkeys = 'KEYS'\n"
        "heartbeat_s = 0.2\ntimeout_s = 2.0\n"
    )
    extra = {
        "router": "count = 1\n",
        "kvstore": "count = 1\nmemory_bytes = 1048576\n",
    }
    for service, port in zip(services, ports, strict=True):
        text += f'[{service}]\naddress = "tcp://127.0.0.1:{port}"\n{extra.get(service, "")}'
    text += '[executor]\nkind = "fake"\nfake_step_ms = 5.0\n'
    commands: list[Command] = []
    for name, options in PROCESSES.items():
        service = name.partition("-")[0]
        path = folder / "hosts" / service / "mesh.toml"
        path.write_text(text.replace("KEYS", "."))
        argv = [sys.executable, "-m", f"services.{service}", "--config", str(path), *options]
        commands.append(Command(name, service, argv))
    with Mesh(folder / "hosts" / "gateway" / "mesh.toml", commands=commands) as mesh:
        yield mesh


def stream(mesh: Mesh, kill: str = "") -> str:
    fields: dict[str, object] = {
        "model": mesh.config.served_model,
        "seed": 7,
        "max_tokens": 60,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }
    pieces: list[str] = []
    with Client(mesh.url, timeout_s=60) as client:
        messages: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
        for event in client.stream_chat(messages, fields):
            if event.kind == "finish":
                assert event.text == "length"
                break
            pieces.append(event.text)
            if len(pieces) == 20 and kill:
                assert mesh.kill(kill)
    return "".join(pieces)


def test_no_process_may_be_kept_out(mesh: Mesh) -> None:
    assert stream(mesh)
    for name in PROCESSES:
        log = "\n".join(tail(mesh.run_dir / "logs" / f"{name}.log", 100))
        assert "allow-list" not in log
        assert "no link with" not in log


@pytest.mark.parametrize("name", ["tokenizer-0", "scheduler-0", "executor-0-0"])
def test_a_restarted_process_gets_in_again(mesh: Mesh, name: str) -> None:
    undisturbed, old_pid = stream(mesh), mesh.pids[name]
    assert stream(mesh, kill=name) == undisturbed
    mesh.wait_restarted(name, old_pid)


def test_a_process_without_its_keys_ends_with_a_status_that_stops_restarts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(
        f'[mesh]\nrun_dir = "{tmp_path}/run"\nmodel = "{ROOT}/models/tiny"\n'
        '[gateway]\nport = 0\n[executor]\nkind = "fake"\n[router]\ncount = 1\n'
        '[kvstore]\ncount = 1\n[links]\nkeys = "none"\n'
    )
    for service in ("gateway", "tokenizer", "router", "scheduler", "executor", "kvstore"):
        argv = [sys.executable, "-m", f"services.{service}", "--config", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == USAGE_STATUS, service
        assert f"none/{service}/keys.toml: No such file" in done.stderr, done.stderr
