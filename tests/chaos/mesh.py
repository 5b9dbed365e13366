"""A whole mesh, all links of it behind a proxy; a Redis, a disk and a clock of its own."""

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.config import Config, load_config
from deepmesh.gateway_address import gateway_is_ready, with_free_port
from deepmesh.health import ready_path
from deepmesh.processes import Command, mesh_commands
from deepmesh.run_dir import dump_toml
from deepmesh.supervisor import Mesh
from tests.chaos.clock import WallClock
from tests.chaos.mischief import Order, State
from tests.chaos.small_disk import SmallDisk
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
LISTENERS = ("tokenizer", "router", "scheduler", "kvstore")  # services that others dial
DISK_BYTES = 32 << 20
HEARTBEAT_S, SILENCE_S = 0.5, 3.0
SLOW_S = 3.0  # a client that takes nothing for so long is cut off
_DEAD = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_FRESH_S = 1.5  # a process that is well touches its file twice a second
CONFIG = f"""
[mesh]
name = "chaos"
run_dir = "{{folder}}/run"
model = "{ROOT}/models/tiny"
[gateway]
port = 0
max_requests = 96
keepalive_s = 5.0
[tokenizer]
count = 2
slow_consumer_s = {SLOW_S}
[router]
count = 1
[scheduler]
count = 2
max_rows = 16
max_waiting = 64
[executor]
global_blocks = 200
window_blocks = 160
[kvstore]
count = 1
memory_bytes = 16777216
disk_bytes = {DISK_BYTES}
disk_dir = "{{folder}}/disk"
redis_url = "unix://{{folder}}/redis.sock"
redis_max_bytes = 16777216
[supervisor]
backoff_s = 0.1
hang_s = 5.0
[links]
heartbeat_s = {HEARTBEAT_S}
timeout_s = {SILENCE_S}
"""


class ChaosMesh:
    """`with ChaosMesh(folder) as mesh`: starts and waits; stops, and leaves nothing."""

    def __init__(self, folder: Path, *, has_namespace: bool) -> None:
        """`has_namespace`: file systems can be mounted (`small_disk.enter_namespace`)."""
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._has_namespace = has_namespace
        self.disk: SmallDisk | None = None  # None: it cannot be had here
        path = folder / "mesh.toml"
        path.write_text(CONFIG.format(folder=folder))
        base = with_free_port(load_config(path))
        self.lines = [  # in the order of the proxy's
            (service, index)
            for service in LISTENERS
            for index in range(getattr(base, service).count)
        ]
        self.clock = WallClock(folder)
        commands = [
            _with(c, self.clock.environment)
            for service in (*LISTENERS, "executor", "gateway")
            for c in self._commands(base, service)
        ]
        commands.sort(key=lambda command: command.service == "gateway")
        self.mesh = Mesh(self._seen_by(base, ""), commands=commands)
        self._base = base

    def _seen_by(self, base: Config, service: str) -> Config:
        """The configuration of a service: it listens behind the proxy and dials its front."""
        sections = {
            name: msgspec.structs.replace(
                getattr(base, name),
                address="ipc://" + self._front(name),
            )
            for name in LISTENERS
            if name != service
        }
        return msgspec.structs.replace(base, **sections)

    def _front(self, name: str, index: int | None = None) -> str:
        """Path that the proxy listens at; of all of a service, as configurations spell it."""
        number = index if index is not None else 0 if name == "router" else "{index}"
        return f"{self._folder}/front-{name}-{number}.sock"

    def _commands(self, base: Config, service: str) -> list[Command]:
        config = self._seen_by(base, service)
        path = self._folder / f"{service}.toml"
        path.write_text(dump_toml(config))
        return [command for command in mesh_commands(config, path) if command.service == service]

    def _proxy_argv(self) -> list[str]:
        run_dir = self.mesh.run_dir
        pairs = [
            f"{self._front(name, index)}={run_dir}/{name}-{index}.sock"
            for name, index in self.lines
        ]
        return [sys.executable, "-m", "tests.chaos.proxy", f"{self._folder}/control.sock", *pairs]

    # ------------------------------------------------------------ life

    def __enter__(self) -> Self:
        with self._stack as stack:
            self.redis = RedisServer(self._folder)
            stack.callback(self.redis.kill)
            if self._has_namespace:
                self.disk = SmallDisk(self._folder / "disk", 2 * DISK_BYTES)
                stack.callback(self.disk.close)
            self.proxy = subprocess.Popen(self._proxy_argv(), cwd=ROOT)
            stack.callback(self._end_proxy)
            stack.enter_context(self.mesh)
            self.wait(self.is_whole, "the start", 120.0)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, at)

    def _end_proxy(self) -> None:
        self.proxy.kill()
        self.proxy.wait()

    # ------------------------------------------------------------ what faults use

    @property
    def url(self) -> str:
        """The gateway's."""
        return self.mesh.url

    def mistreat(self, order: Order) -> State:
        """Tell the proxy; what it says."""
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(20.0)
            control.connect(f"{self._folder}/control.sock")
            control.sendall(msgspec.json.encode(order) + b"\n")
            return msgspec.json.decode(control.makefile("rb").readline(), type=State)

    def name(self, service: str, draw: random.Random) -> str:
        """One of the processes of a service."""
        owner = "executor" if service == "masks" else service
        return draw.choice([n for n in self.mesh.pids if n.rpartition("-")[0].startswith(owner)])

    def process(self, name: str, service: str) -> psutil.Process:
        """The present life of a process; of its mask worker, if `service` says so."""
        self.wait(lambda: bool(self.mesh.pids[name]), f"{name} to run")
        process = psutil.Process(self.mesh.pids[name])
        return self.masks_of(process)[0] if service == "masks" else process

    def masks_of(self, executor: psutil.Process) -> list[psutil.Process]:
        """Its mask worker, if it has one that works."""
        return [
            child
            for child in executor.children()
            if child.status() not in _DEAD and "services.executor.masks" in child.cmdline()
        ]

    # ------------------------------------------------------------ how it is

    def is_whole(self) -> bool:
        """All run, are well and linked, and the gateway and every replica serve."""
        links = self.mistreat(Order("ask")).num_links
        return (
            links >= self._num_links()
            and all(map(self._is_well, self.mesh.pids))
            and self._serves()
        )

    def _num_links(self) -> int:
        """Between all that talk to each other; executors included."""
        num = {name: getattr(self._base, name).count for name in (*LISTENERS, "gateway")}
        to_router = num["tokenizer"]
        to_schedulers = num["scheduler"] * (num["tokenizer"] + num["router"] + 1)
        to_kvstores = num["kvstore"] * (num["tokenizer"] + num["router"] + 2 * num["scheduler"])
        return num["tokenizer"] * num["gateway"] + to_router + to_schedulers + to_kvstores

    def _is_well(self, name: str) -> bool:
        try:
            age_s = time.time() - ready_path(self.mesh.run_dir, name).stat().st_mtime
            process = psutil.Process(self.mesh.pids[name])
            if process.status() in _DEAD:
                return False
            if name.startswith("executor") and not self.masks_of(process):
                return False
        except (OSError, psutil.Error, ValueError):
            return False
        return age_s < _FRESH_S

    def _serves(self) -> bool:
        if not gateway_is_ready(self.url):
            return False
        try:
            found = self.metrics()
        except (OSError, http.client.HTTPException):
            return False
        ready = sum(value for name, _, value in found if name == "deepmesh_replica_ready")
        up = sum(value for name, _, value in found if name == "deepmesh_tokenizers_up")
        return (ready, up) == (self._base.scheduler.count, self._base.tokenizer.count)

    def num_open(self) -> int:
        """Streams that the gateway has open."""
        return int(sum(v for name, _, v in self.metrics() if name == "deepmesh_streams_running"))

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        """All samples of /metrics: name, labels, value. OSError, HTTPException: no answer."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def wait(self, holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> float:
        """Until it holds, asked every 50 ms; how long that took, s."""
        began_s, pause = time.monotonic(), threading.Event()
        while not holds():
            assert time.monotonic() - began_s < timeout_s, f"waited {timeout_s:g} s for {what}"
            pause.wait(0.05)
        return time.monotonic() - began_s

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """All that run, mask workers included."""
        for name, pid in self.mesh.pids.items():
            with contextlib.suppress(psutil.Error, ValueError):
                process = psutil.Process(pid)
                yield name, process
                for child in self.masks_of(process) if name.startswith("executor") else []:
                    yield f"{name}-masks", child


def _with(command: Command, environment: dict[str, str]) -> Command:
    return Command(command.name, command.service, command.argv, {**command.env, **environment})


def signal_to(process: psutil.Process, number: int) -> None:
    """A signal, unless it has ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
