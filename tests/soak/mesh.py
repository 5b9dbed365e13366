"""A mesh of all services as `deepmesh up` runs it, with a Redis of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.config import Config, load_config
from deepmesh.gateway_address import gateway_is_ready, with_free_port
from deepmesh.run_dir import dump_toml, read_record, tail
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S, IDLE_S = 180.0, 60.0, 60.0
# Every cache is small, so that all are full before anything is measured.
CONFIG = """
[mesh]
name = "soak"
run_dir = "{folder}/run"
model = "{root}/models/tiny"
[gateway]
port = 0
admin_port = -1
[tokenizer]
count = 2
[router]
count = 1
[scheduler]
count = 2
max_rows = 16
max_waiting = 256
[executor]
kind = "{kind}"
fake_step_ms = 3.0
global_blocks = 768
window_blocks = 768
[kvstore]
count = 1
memory_bytes = 8388608
disk_bytes = 16777216
disk_dir = "{folder}/disk"
record_bytes = 4194304
redis_url = "unix://{folder}/redis.sock"
redis_max_bytes = 8388608
"""


class SoakMesh:
    """`with SoakMesh(folder, kind) as mesh`: starts and waits; stops."""

    def __init__(self, folder: Path, kind: str) -> None:
        """`kind` of the executors: model (models/tiny), or fake."""
        self._folder = folder
        path = folder / "mesh.toml"
        path.write_text(CONFIG.format(folder=folder, root=ROOT, kind=kind))
        self.config: Config = with_free_port(load_config(path))
        path.write_text(dump_toml(self.config))
        self._path = path
        self.url = f"http://127.0.0.1:{self.config.gateway.port}"
        self.run_dir = folder / "run"
        self._redis: RedisServer | None = None
        self._up: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._redis = RedisServer(self._folder)
        argv = [sys.executable, "-m", "deepmesh.cli", "up", "-c", str(self._path)]
        log = self._folder / "up.log"
        try:
            with log.open("wb") as output:
                self._up = subprocess.Popen(
                    argv,
                    cwd=ROOT,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                )
            deadline = time.monotonic() + START_S
            while not gateway_is_ready(self.url):
                assert self._up.poll() is None, "\n".join(tail(log, 12))
                assert time.monotonic() < deadline, "the mesh does not start"
                time.sleep(0.1)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._up is not None:
            self._up.send_signal(signal.SIGTERM)
            try:
                self._up.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._up.kill()
                self._up.wait()
        if self._redis is not None:
            self._redis.kill()

    @property
    def pids(self) -> dict[str, int]:
        """All processes, the supervisor among them."""
        record = read_record(self.run_dir)
        assert record is not None, "mesh.json is gone"
        found = {name: process.pid for name, process in record.processes.items()}
        return found | {"supervisor": record.supervisor_pid}

    @property
    def redis_pid(self) -> int:
        """Of the server of the shared tier."""
        assert self._redis is not None
        return self._redis.pid

    def restarts(self) -> dict[str, int]:
        """Processes that were started again, and how often."""
        record = read_record(self.run_dir)
        assert record is not None, "mesh.json is gone"
        return {name: p.restarts for name, p in record.processes.items() if p.restarts}

    def left(self) -> dict[str, float]:
        """What an idle mesh still holds: requests, tokens, blocks. Waits for what is under way."""
        deadline = time.monotonic() + IDLE_S
        while (held := self._held()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return held

    def _held(self) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics", timeout=10).text
        held: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("deepmesh_")
                if name in ("requests_running", "requests_waiting", "inflight_tokens"):
                    held[name] = held.get(name, 0) + sample.value
                elif name == "blocks":
                    sign = {"total": 1, "free": -1, "cached": -1}.get(sample.labels["state"], 0)
                    pool = f"{sample.labels['pool']} blocks of {sample.labels['replica']}"
                    held[pool] = held.get(pool, 0) + sign * sample.value
        return {name: value for name, value in held.items() if value}
