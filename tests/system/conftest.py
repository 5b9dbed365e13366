"""Times that are worth a line, printed at the end; engine and mesh of all tests of containers."""

import hashlib
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepmesh.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR
from tests.system.containers import PROJECT, ComposeMesh
from tests.system.engine import TARGETS, Engine, build, build_next, make_base

NEXT_WIRE = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR + 1}"
KEY = "sk-of-the-containers"
TIMES = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIMES] = {}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Also when all is well."""
    for what, took in config.stash[TIMES].items():
        terminalreporter.write_line(f"{what:<32} {took}")


@pytest.fixture(scope="package")
def times(pytestconfig: pytest.Config) -> dict[str, str]:
    return pytestconfig.stash[TIMES]


@contextmanager
def timed(times: dict[str, str], what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    times[what] = f"{time.monotonic() - began:.1f} s"


@pytest.fixture(scope="package")
def engine(times: dict[str, str]) -> Iterator[Engine]:
    # Not a folder of pytest's: other runs on this machine remove those of earlier ones.
    folder = Path(tempfile.mkdtemp(prefix="deepmesh-system-"))
    with timed(times, "engine started"):
        engine = Engine(folder)
    try:
        with timed(times, "base image"):
            make_base(engine)
        with timed(times, "images of seven services"):
            for target in TARGETS:
                build(engine, target, TORCH="", KERNEL_LEVELS=_kernel_level())
        with timed(times, "images of the next version"):
            for target in TARGETS:
                build_next(engine, target, wire=NEXT_WIRE)
        yield engine
    finally:
        with timed(times, "engine stopped, all removed"):
            engine.close()
    assert not folder.exists()


def _kernel_level() -> str:
    """Of this machine: the shipped image has all."""
    from kernels import native

    return native.supported_levels()[0]


@pytest.fixture(scope="package")
def mesh(engine: Engine, times: dict[str, str]) -> Iterator[ComposeMesh]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    digests = engine.folder / "api_keys"
    digests.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()}  # of the tests\n")
    mesh = ComposeMesh(engine, port=port, api_keys=digests)
    try:
        with timed(times, "12 containers up and healthy"):
            mesh.up()
        yield mesh
    finally:
        with timed(times, "down"):
            mesh.down()
    for kind, columns in (
        ("ps -a", "{{.Names}}"),
        ("network ls", "{{.Name}}"),
        ("volume ls", "{{.Name}}"),
    ):
        left = engine.docker(*kind.split(), "--format", columns).split()
        assert [name for name in left if PROJECT in name] == []
