"""Every service is replaced by the next minor version, one at a time, under load: nothing is lost.

The next version is a copy of our own library whose wire is one minor version further, with a field
behind those of some messages that the old one has never heard of.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepmesh.config import load_config
from deepmesh.gateway_address import gateway_is_ready, with_free_port
from deepmesh.health import ready_path
from deepmesh.run_dir import read_record
from tests.e2e.steady_load import SteadyLoad, reference

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
GROWN = ("Submit", "Generate", "TokenBatch", "DeltaBatch", "SubmitStep", "StepResult", "Lookup")
CONFIG = """
[mesh]
name = "upgrade"
run_dir = "{folder}/run"
model = "{root}/models/tiny"
[gateway]
port = {port}
[tokenizer]
count = 2
[router]
count = 1
[scheduler]
count = 2
[executor]
kind = "fake"
fake_step_ms = 4.0
[kvstore]
count = 1
[supervisor]
backoff_s = 0.1
[links]
heartbeat_s = 0.2
timeout_s = 2.0
"""


def make_tree(folder: Path) -> Path:
    """The source as it is, so that a part of it can be replaced: a copy of what is to change."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("deepmesh", "services"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("kernels", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    return tree


def upgrade(tree: Path) -> None:
    """What processes that start from now on speak."""
    path = tree / "deepmesh" / "wire" / "messages.py"
    text = path.read_text()
    text, count = re.subn(
        r"^PROTOCOL_MINOR = (\d+)$", lambda m: f"PROTOCOL_MINOR = {int(m[1]) + 1}", text, flags=re.M
    )
    assert count == 1
    for name in GROWN:
        body = re.compile(rf"^(class {name}\(.*?)(?=^(?:class|[A-Za-z_]))", re.M | re.S)
        text, count = body.subn(r'\1    tomorrow: str = "not known yet"\n\n\n', text, count=1)
        assert count == 1, name
    new = path.with_suffix(".new")
    new.write_text(re.sub(r"\n{3,}    tomorrow", "\n    tomorrow", text))
    new.replace(path)


@contextmanager
def running(tree: Path, path: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    argv = [sys.executable, "-m", "deepmesh.cli", "up", "-c", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with (
        log.open("wb") as output,
        subprocess.Popen(argv, cwd=tree, env=environment, stdout=output, stderr=output) as mesh,
    ):
        try:
            yield mesh
        finally:
            mesh.send_signal(signal.SIGTERM)
            mesh.wait(60)


class Upgrading:
    """A mesh that runs from a tree of its own, as its run folder shows it."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, run_dir: Path) -> None:
        self._process, self._run_dir = process, run_dir
        self.wait(lambda: gateway_is_ready(url), "its start")

    def wait(self, holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"the mesh ended with {self._process.wait(0.02)}")

    def pids(self) -> dict[str, int]:
        record = read_record(self._run_dir)
        assert record is not None
        return {name: process.pid for name, process in record.processes.items()}

    def replace(self, name: str) -> None:
        """End it as an operator does; its supervisor starts what is on disk by then."""
        old = self.pids()[name]
        os.kill(old, signal.SIGTERM)
        self.wait(lambda: self.pids()[name] not in (0, old), f"a new {name}")
        self.wait(ready_path(self._run_dir, name).exists, f"{name} to be ready")


def test_services_of_two_minor_versions_work_together_while_one_after_the_other_is_replaced(
    tmp_path: Path,
) -> None:
    tree, path, log = make_tree(tmp_path), tmp_path / "mesh.toml", tmp_path / "up.log"
    path.write_text(CONFIG.format(folder=tmp_path, root=ROOT, port=0))
    port = with_free_port(load_config(path)).gateway.port
    path.write_text(CONFIG.format(folder=tmp_path, root=ROOT, port=port))
    url, run_dir = f"http://127.0.0.1:{port}", tmp_path / "run"

    with running(tree, path, log) as process:
        mesh = Upgrading(process, url, run_dir)
        expected = reference(url)
        names = sorted(mesh.pids(), key=lambda name: name.startswith("gateway"))
        assert len(names) == 9
        upgrade(tree)
        with SteadyLoad(url, expected) as load:
            load.wait_whole(16)
            for name in names:
                mesh.replace(name)
                load.wait_whole(16)
        load.check(least=16 * len(names))
        for name in names:
            text = (run_dir / "logs" / f"{name}.log").read_text()
            assert "this side speaks" not in text
            assert "Traceback" not in text
