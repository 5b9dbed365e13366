"""A service with an address of its own is not started, and the mesh works with what is there."""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from deepmesh.client import Client
from deepmesh.config import load_config
from deepmesh.gateway_address import with_free_port
from deepmesh.supervisor import Mesh
from tests.contract import foreign
from tests.e2e.conftest import RunningMesh
from tests.redis_server import redis_server

ROOT = Path(__file__).resolve().parents[2]
ALL = ["executor-0-0", "gateway-0", "router-0", "scheduler-0", "tokenizer-0"]


def write_config(folder: Path, sections: dict[str, str]) -> Path:
    """A small mesh with a router; `sections` are further lines of some tables."""
    path = folder / "mesh.toml"
    tables = {
        "mesh": f'name = "swap"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"',
        "gateway": "port = 0",
        "router": "count = 1",
        "executor": 'kind = "fake"',
        "tokenizer": "",
        "scheduler": "",
        "kvstore": "",
    }
    lines = [f"[{name}]\n{text}\n{sections.get(name, '')}\n" for name, text in tables.items()]
    path.write_text("".join(lines))
    return path


def chat(url: str, words: str = "Hello") -> tuple[str, str]:
    """A text and why it ended."""
    messages: list[dict[str, object]] = [{"role": "user", "content": words}]
    fields: dict[str, object] = {"model": "tiny", "max_tokens": 9, "ignore_eos": True, "seed": 1}
    with Client(url, timeout_s=30) as client:
        events = list(client.stream_chat(messages, fields))
    assert events[-1].kind == "finish"
    return "".join(event.text for event in events[:-1]), events[-1].text


@pytest.mark.parametrize("service", ["tokenizer", "router", "scheduler", "executor", "kvstore"])
def test_a_service_served_alone_takes_the_place_of_the_mesh_s_own(
    tmp_path: Path, service: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    sections = {"kvstore": "count = 1"}
    sections[service] = f'address = "tcp://127.0.0.1:{port}"'  # one kvstore, without a count, too
    path = write_config(tmp_path, sections)
    (tmp_path / "run").mkdir()
    argv = [sys.executable, "-m", "deepmesh.cli", "serve", service, "--config", str(path)]
    log = (tmp_path / "mine.log").open("wb")
    with log, subprocess.Popen(argv, stdout=log, stderr=log) as mine:
        try:
            with Mesh(path) as mesh:
                left_out = {f"{service}-0", f"{service}-0-0"}
                wanted = [name for name in [*ALL, "kvstore-0"] if name not in left_out]
                assert sorted(mesh.pids) == sorted(wanted)
                assert chat(mesh.url)[1] == "length"
                assert mine.poll() is None
        finally:
            mine.terminate()
    assert mine.returncode == 0, (tmp_path / "mine.log").read_text()


@pytest.mark.parametrize(
    "service", ["tokenizer", "scheduler", "executor", "router", "kvstore", "gateway"]
)
def test_a_foreign_program_takes_the_place_of_any_service(tmp_path: Path, service: str) -> None:
    mine = f"ipc://{tmp_path}/mine.sock"
    (tmp_path / "run").mkdir()
    if service == "gateway":
        port = with_free_port(load_config(write_config(tmp_path, {}))).gateway.port
        mine = f"http://127.0.0.1:{port}"
    sections = {service: f'address = "{mine}"'}
    if service == "scheduler":  # it makes up tokens itself
        sections["executor"] = 'address = "none"'
    path = write_config(tmp_path, sections)
    config = load_config(path)
    dials = {
        "gateway": config.tokenizer_address(0),
        "tokenizer": config.scheduler_address(0),
        "router": config.scheduler_address(0),
        "executor": config.scheduler_address(0),
    }
    with ExitStack() as held:
        url = held.enter_context(redis_server(tmp_path)).url if service == "kvstore" else ""
        listen = "" if service == "executor" else mine
        argv = foreign.command(service, listen, [dials[service]] if service in dials else [], url)
        log = held.enter_context((tmp_path / "mine.log").open("wb"))
        started = subprocess.Popen(argv, stdout=log, stderr=log, env=foreign.environment())
        program = held.enter_context(started)
        try:
            with Mesh(path) as mesh:
                left_out = {f"{service}-0", f"{service}-0-0"}
                left_out |= {"executor-0-0"} if service == "scheduler" else set()
                assert sorted(mesh.pids) == [name for name in ALL if name not in left_out]
                text, reason = chat(mesh.url, "Hello, again and again. " * 40)
                if service == "kvstore":  # blocks of this prompt go there
                    running, deadline = RunningMesh(mesh, path), time.monotonic() + 20
                    while not running.total("deepmesh_stored_blocks_total"):
                        assert time.monotonic() < deadline
            assert program.poll() is None, (tmp_path / "mine.log").read_text()
        finally:
            program.kill()
    assert (len(text) > 0, reason) == (True, "length")
