"""Meshes that a benchmark starts for itself: with a fake executor, or with processes on cores."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.load.offline import Speed
from deepmesh.config import (
    Config,
    ExecutorConfig,
    GatewayConfig,
    LinksConfig,
    MeshConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from deepmesh.processes import Command, mesh_commands
from deepmesh.report import ROOT
from deepmesh.run_dir import dump_toml
from deepmesh.supervisor import Mesh

MODEL = ROOT / "models" / "tiny"
OFFLINE_S = 600.0
_PIN = "import os,sys;os.sched_setaffinity(0,{int(sys.argv[1])});os.execv(sys.argv[2],sys.argv[2:])"


class RigError(RuntimeError):
    """The mesh cannot be set up as asked."""


def fake_config(run_dir: Path, *, rows: int, tracing: bool) -> Config:
    """All processes with an executor that answers at once."""
    return Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(MODEL)),
        links=LinksConfig(timeout_s=20.0),
        gateway=GatewayConfig(port=0, max_requests=max(1024, 2 * rows)),
        scheduler=SchedulerConfig(max_rows=rows, step_tokens=max(1024, 8 * rows)),
        executor=ExecutorConfig(kind="fake"),
        telemetry=TelemetryConfig(enabled=tracing),
    )


def model_config(run_dir: Path, model: Path, *, rows: int, prefill_share: float) -> Config:
    """All processes with the model, on one compute thread."""
    scheduler = SchedulerConfig(max_rows=max(rows, 64), prefill_share=prefill_share)
    return Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(model)),
        links=LinksConfig(timeout_s=20.0),
        gateway=GatewayConfig(port=0),
        scheduler=scheduler,
        executor=ExecutorConfig(threads=1),
    )


def cores() -> tuple[int, int]:
    """One for the executor, and another for everything else.

    Raises:
        RigError: there is only one.
    """
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise RigError("needs two cores: one for the executor, one for everything else")
    return found[-1], found[0]


def pinned(command: Command, core: int) -> Command:
    """The same process, on one core with all its threads."""
    argv = [sys.executable, "-I", "-S", "-c", _PIN, str(core), *command.argv]
    return replace(command, argv=argv)


@contextmanager
def running(config: Config, *, pin: bool = False) -> Iterator[Mesh]:
    """A mesh; with `pin` its executor has a core for itself, and this process joins the others."""
    path = Path(config.mesh.run_dir) / "mesh.toml"
    commands = mesh_commands(config, path)
    before = os.sched_getaffinity(0)
    if pin:
        own, rest = cores()
        commands = [pinned(c, own if c.service == "executor" else rest) for c in commands]
        os.sched_setaffinity(0, {rest})
    try:
        with Mesh(config, commands=commands) as mesh:
            yield mesh
    finally:
        os.sched_setaffinity(0, before)


def offline(config: Config, folder: Path, **options: int) -> Speed:
    """The executor of such a mesh alone, on the same core; options as `offline.py` has them.

    Raises:
        RigError: it failed.
    """
    path = folder / "offline.toml"
    path.write_text(dump_toml(config))
    argv = [sys.executable, "-m", "bench.load.offline", "--config", str(path)]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    command = pinned(Command("offline", "executor", argv), cores()[0])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command.argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=OFFLINE_S
    )
    if done.returncode:
        raise RigError(f"the executor alone: {done.stderr.strip()[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Speed)


def service_pids(mesh: Mesh) -> dict[str, int]:
    """Processes of a mesh by service, and this one as `client`."""
    found = {name.split("-")[0]: pid for name, pid in mesh.pids.items()}
    return found | {"client": os.getpid()}
