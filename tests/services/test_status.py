"""`deepmesh status`: what the supervisor says of its processes, as a person reads it."""

import os
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepmesh.cli.app import app
from deepmesh.cli.status import state_of
from deepmesh.config import Config, GatewayConfig, MeshConfig, SupervisorConfig
from deepmesh.health import ready_path
from deepmesh.processes import Command
from deepmesh.run_dir import ProcessRecord, read_record
from deepmesh.supervisor import Mesh

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


def settings(folder: Path, supervisor: SupervisorConfig) -> Config:
    return Config(
        mesh=MeshConfig(name="s", run_dir=str(folder / "run")),
        gateway=GatewayConfig(port=0),
        supervisor=supervisor,
    )


def of_mesh(mesh: Mesh) -> str:
    """The command's output for a running mesh."""
    path = str(mesh.run_dir / "mesh.toml")
    result = CliRunner().invoke(app, ["status", "--config", path], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


def record(mesh: Mesh, name: str) -> ProcessRecord:
    found = read_record(mesh.run_dir)
    assert found is not None
    return found.processes[name]


@pytest.mark.parametrize("restart", [True, False])
def test_a_killed_process_is_shown_with_how_it_ended(tmp_path: Path, restart: bool) -> None:
    commands = [Command(f"tokenizer-{n}", "tokenizer", SLEEPER) for n in range(2)]
    supervisor = SupervisorConfig(restart=restart, backoff_s=30)
    config = settings(tmp_path, supervisor)
    with Mesh(config, commands=commands, is_ready=lambda: True) as mesh:
        assert mesh.wait_for(lambda: all(mesh.pids.values()), 10)
        pid = mesh.pids["tokenizer-1"]
        mesh.kill("tokenizer-0", signal.SIGKILL)
        assert mesh.wait_for(lambda: record(mesh, "tokenizer-0").pid == 0, 10)
        assert record(mesh, "tokenizer-0").last_end == "killed by SIGKILL"
        lines = {line.split()[0]: line for line in of_mesh(mesh).splitlines() if line.strip()}
        assert f"{pid}   running for " in lines["tokenizer-1"]
        assert "killed by SIGKILL" in lines["tokenizer-0"]
        assert ("starts again in" in lines["tokenizer-0"]) == restart
        assert ("ended" in lines["tokenizer-0"]) == (not restart)


def test_a_process_that_cannot_work_yet_says_how_far_it_is(tmp_path: Path) -> None:
    names = ("executor-0-0", "tokenizer-0", "gateway-0")
    commands = [Command(name, name.partition("-")[0], SLEEPER) for name in names]
    config = settings(tmp_path, SupervisorConfig())
    with Mesh(config, commands=commands, is_ready=lambda: True) as mesh:
        assert mesh.wait_for(lambda: all(mesh.pids.values()), 10)
        log = Path(record(mesh, "executor-0-0").log)
        log.write_text("T INFO executor-0-0 loading: layers 3 of 8\nT INFO executor-0-0 hm\n")
        ready_path(mesh.run_dir, "gateway-0").touch()
        lines = {line.split()[0]: line for line in of_mesh(mesh).splitlines() if line.strip()}
        assert "loading layers 37 %" in lines["executor-0-0"]
        assert "not ready" in lines["tokenizer-0"]
        assert "s, " not in lines["gateway-0"]
        log.write_text(log.read_text() + "T INFO executor-0-0 loaded in 3.0 s: Capacity()\n")
        assert "not ready" in of_mesh(mesh).split("executor-0-0", 1)[1].split("\n", 1)[0]


def test_without_a_mesh_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[mesh]\nrun_dir = "{tmp_path}/run"\n')
    result = CliRunner().invoke(app, ["status", "--config", str(path)])
    assert result.exit_code == 1
    assert f"no mesh runs in {tmp_path}/run" in result.output


@pytest.mark.parametrize(
    ("state", "since_s", "words"),
    [
        ("running", 990.0, "running for 10 s"),
        ("running", 1000.0 - 3600, "running for 60 min"),
        ("running", 1000.0 - 86_400, "running for 24 h"),
        ("running", 1001.0, "running for 0 s"),  # clocks
        ("waiting", 1000.4, "starts again in 0.4 s"),
        ("waiting", 999.0, "starts again in 0.0 s"),
        ("ended", 0.0, "ended"),
    ],
)
def test_the_state_in_words(state: str, since_s: float, words: str) -> None:
    process = ProcessRecord("tokenizer", os.getpid(), state, 0, "", since_s)
    assert state_of(process, 1000.0) == words
