"""The processes of a mesh on one machine: their command lines, and one child at a time."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from deepmesh.config import Config
from deepmesh.run_dir import ProcessRecord

MAX_BACKOFF_S = 5.0
USAGE_STATUS = 2  # how a service ends that cannot use its configuration: no restart helps
STEADY_S = 10.0  # a process that lived this long starts with the first back-off again

# Runs before the service in the same process: the kernel kills the child when the thread that
# started it ends, whatever way; exec keeps that. (preexec_fn is not safe beside other threads.)
_DIE_WITH_PARENT = (
    "import ctypes,os,signal,sys;"
    "ctypes.CDLL(None).prctl(1,signal.SIGKILL);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execv(sys.argv[2],sys.argv[2:])"
)


@dataclass(frozen=True)
class Command:
    """How to start one process."""

    name: str  # "tokenizer-0"
    service: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict[str, str])


def mesh_commands(config: Config, path: Path) -> list[Command]:
    """Every process of the mesh that runs here, in starting order; `path` is its mesh.toml.

    A service whose `address` is set runs elsewhere and is left out.
    """
    commands: list[Command] = []
    if not config.kvstore.address:
        for index in range(config.kvstore.count):
            commands.append(_command(path, "kvstore", f"kvstore-{index}", index=index))
    if not config.scheduler.address:
        for index in range(config.scheduler.count):
            commands.append(_command(path, "scheduler", f"scheduler-{index}", index=index))
    if not config.executor.address:
        threads = str(config.executor.threads)
        for index in range(config.scheduler.count):
            for rank in range(config.executor.ranks):
                name = f"executor-{index}-{rank}"
                commands.append(
                    _command(path, "executor", name, threads, index=index, rank=rank),
                )
    if config.router.count and not config.router.address:
        commands.append(_command(path, "router", "router-0"))
    if not config.tokenizer.address:
        for index in range(config.tokenizer.count):
            commands.append(_command(path, "tokenizer", f"tokenizer-{index}", index=index))
    if not config.gateway.address:
        for index in range(config.gateway.count):
            commands.append(_command(path, "gateway", f"gateway-{index}", index=index))
    return commands


def _command(path: Path, service: str, name: str, threads: str = "1", **options: int) -> Command:
    argv = [sys.executable, "-m", f"services.{service}", "--config", str(path)]
    for option, value in options.items():
        argv += [f"--{option}", str(value)]
    # Spinning OpenMP threads quarter the speed once the cores are contended.
    env = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return Command(name, service, argv, env)


def mesh_addresses(config: Config, url: str) -> dict[str, str]:
    """Where each service listens; `url` is the gateway's."""
    base, _, port = url.rpartition(":")
    addresses = {"gateway-0": url}
    for index in range(1, 1 if config.gateway.address else config.gateway.count):
        addresses[f"gateway-{index}"] = f"{base}:{int(port) + index}"
    for index in range(config.tokenizer.count):
        addresses[f"tokenizer-{index}"] = config.tokenizer_address(index)
    if config.router_address:
        addresses["router-0"] = config.router_address
    for index in range(config.scheduler.count):
        addresses[f"scheduler-{index}"] = config.scheduler_address(index)
    for index in range(config.kvstore.count):
        addresses[f"kvstore-{index}"] = config.kvstore_address(index)
    return addresses


class Child:
    """One process and its back-off. Start it from a thread that outlives it."""

    def __init__(self, command: Command, log: Path, backoff_s: float) -> None:
        self.command = command
        self.log = log
        self.restarts = 0
        self.early_ends = 0  # in a row, each soon after its start
        self.last_status: int | None = None  # negative: the signal that ended it
        self.last_end = ""  # the same in words
        self.next_start = 0.0  # monotonic
        self._started_s = 0.0  # wall clock
        self._first_backoff_s = backoff_s
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._lock = threading.Lock()  # a signal must not race the reaping: pids are reused

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    def record(self, *, restarts: bool) -> ProcessRecord:
        """For mesh.json; `restarts`: it is started again when it ends."""
        waits_s = self.next_start - time.monotonic()
        return ProcessRecord(
            service=self.command.service,
            pid=self.pid,
            state="running" if self.pid else "waiting" if restarts else "ended",
            restarts=self.restarts,
            log=str(self.log),
            since_s=self._started_s if self.pid else time.time() + waits_s,
            last_end=self.last_end,
        )

    def start(self, now: float) -> None:
        """Start the process; its output is appended to the log."""
        argv = self.command.argv
        if sys.platform == "linux":
            wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            argv = [*wrapper, *argv]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # `-m` puts the working folder first on the import path: not the user's, where a
                # folder called "services" may lie.
                cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, **self.command.env},
                start_new_session=True,  # Ctrl-C reaches the supervisor only, which drains
            )
        self._started = now
        self._started_s = time.time()

    def poll(self, now: float) -> str | None:
        """Take note of the end of the process: says how it ended, once; None otherwise."""
        with self._lock:
            if self._process is None or not self._ended():
                return None
            self._kill_group()  # before it is reaped: until then no one else can have the number
            self.last_status = code = self._process.wait()
            self._process = None
        self.early_ends = self.early_ends + 1 if now - self._started < STEADY_S else 1
        backoff_s = self._first_backoff_s * 2 ** min(self.early_ends - 1, 16)
        self.next_start = now + min(backoff_s, MAX_BACKOFF_S)
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        self.last_end = killed or f"exit status {code}"
        return self.last_end

    def _ended(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def send(self, number: int) -> int:
        """Signal the process; returns its pid, 0 when there is none."""
        with self._lock:
            if self._process is None:
                return 0
            os.kill(self._process.pid, number)
            return self._process.pid

    def kill(self) -> None:
        """End the process and all that it started, and reap it."""
        with self._lock:
            if self._process is not None:
                self._kill_group()
                self._process.wait()
                self._process = None

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: group id = pid
