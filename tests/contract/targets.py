"""Processes under test: ours, a foreign stub, or whatever runs at an address that was given.

`DEEPMESH_CONTRACT_SCHEDULER=tcp://127.0.0.1:7100 pytest tests/contract/test_scheduler_contract.py`
runs the suite of a service against another program. What that program dials is in
`DEEPMESH_CONTRACT_DIALS` (comma-separated): the suite listens there.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.contract import foreign
from tests.redis_server import redis_server

ROOT = Path(__file__).parents[2]


@dataclass
class Target:
    """Where the program under test listens, and where it expects the others."""

    address: str  # of the program; empty: it only dials
    dials: list[str] = field(default_factory=list[str])
    process: "subprocess.Popen[bytes] | None" = None


def kinds(service: str) -> list[str]:
    """What the suite of a service runs against."""
    return (
        ["external"] if f"DEEPMESH_CONTRACT_{service.upper()}" in os.environ else ["ours", "stub"]
    )


def external(service: str) -> Target:
    """The one that the environment names."""
    dials = [d for d in os.environ.get("DEEPMESH_CONTRACT_DIALS", "").split(",") if d]
    return Target(os.environ[f"DEEPMESH_CONTRACT_{service.upper()}"], dials)


@contextmanager
def running(
    target: Target, argv: list[str], folder: Path, environment: dict[str, str]
) -> Iterator[Target]:
    """Start a process and end it again; its log is shown when it ended by itself."""
    log = folder / "log"
    with log.open("wb") as output:
        target.process = subprocess.Popen(
            argv, stdout=output, stderr=output, cwd=ROOT, env=environment
        )
    try:
        yield target
        assert target.process.poll() is None, log.read_text()
    finally:
        target.process.kill()
        target.process.wait()


@contextmanager
def target(service: str, kind: str, folder: Path, extra: str = "") -> Iterator[Target]:
    """The program under test; `extra` is more of mesh.toml for ours."""
    if kind == "external":
        yield external(service)
        return
    at = {name: f"ipc://{folder}/{name}.sock" for name in (*_NAMES, "scheduler-1")}
    schedulers = [at["scheduler-0"], *([at["scheduler-1"]] if service == "router" else [])]
    made = {
        "scheduler": Target(at["scheduler-0"]),
        "executor": Target("", schedulers),
        "router": Target(at["router-0"], schedulers),
        "tokenizer": Target(at["tokenizer-0"], schedulers),
        "kvstore": Target(at["kvstore-0"]),
        "gateway": Target(f"http://127.0.0.1:{_free_port()}", [at["tokenizer-0"]]),
    }[service]
    with ExitStack() as held:
        if kind == "stub":
            needs_redis = service == "kvstore"
            url = held.enter_context(redis_server(folder)).url if needs_redis else ""
            argv, environment = (
                foreign.command(service, made.address, made.dials, url),
                foreign.environment(),
            )
        else:
            argv = _argv(service, folder, made, extra)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        yield held.enter_context(running(made, argv, folder, environment))


_NAMES = ("tokenizer-0", "router-0", "scheduler-0", "kvstore-0")


def _argv(service: str, folder: Path, made: Target, extra: str) -> list[str]:
    config = folder / "mesh.toml"
    port = made.address.rsplit(":", 1)[-1] if service == "gateway" else "0"
    # These processes are killed: what a kvstore maps must go with the folder.
    shared = "" if "[kvstore]" in extra else f'[kvstore]\nshared_dir = "{folder}/shared"'
    config.write_text(
        f'[mesh]\nrun_dir = "{folder}"\nmodel = "{ROOT}/models/tiny"\n'
        f'[gateway]\nport = {port}\n[executor]\nkind = "fake"\nfake_step_ms = 2.0\n'
        f"[router]\ncount = {int(service == 'router')}\n[telemetry]\nenabled = false\n"
        f"[links]\nheartbeat_s = 0.3\n{extra}\n{shared}\n"
    )
    return [sys.executable, "-m", f"services.{service}", "--config", str(config)]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
