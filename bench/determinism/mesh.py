"""Scheduler and executor as processes of their own; the executor is killed in the middle."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.determinism.groups import Outputs, Setting, scheduler_config
from bench.determinism.jobs import Job
from bench.determinism.outputs import Output
from deepmesh.config import Config, LinksConfig, MeshConfig, TelemetryConfig
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import Ack, AckRow, Failed, Finished, ReplicaStats, TokenBatch
from deepmesh.wire.sockets import Dialer, Identity, Mail

ROOT = Path(__file__).parents[2]
TOKENIZER = "tokenizer-0"
KILL_AT = 0.4  # of all tokens
QUIET_S = 2.5  # more than two heartbeats


def killed_executor(setting: Setting) -> Outputs:
    """All jobs over real links; kill -9 when part of the tokens are there, and a new process."""
    config = Config(
        mesh=MeshConfig(run_dir=str(setting.run_dir), model=str(setting.model)),
        links=LinksConfig(),
        scheduler=scheduler_config(prefix_cache=True),
        telemetry=TelemetryConfig(enabled=False),
        executor=setting.config().executor,
    )
    file = setting.run_dir / "mesh.toml"
    file.write_text(to_toml(config))
    with process("scheduler", file), _Executors(file) as executors:
        client = Client(config, setting)
        try:
            wanted = KILL_AT * sum(job.generate.max_tokens for job in setting.jobs)
            client.run(lambda: client.num_tokens >= wanted)
            executors.replace()
            client.run(lambda: client.is_done)
        finally:
            client.inbox.close()
    return client.outputs


class _Executors:
    """One executor process after the other."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> "_Executors":
        self._running = start("executor", self._file)
        return self

    def __exit__(self, *_: object) -> None:
        end(self._running)

    def replace(self) -> None:
        """SIGKILL, and a new one."""
        self._running.kill()
        self._running.wait()
        self._running = start("executor", self._file)


class Client:
    """A tokenizer without text."""

    def __init__(
        self,
        config: Config,
        setting: Setting,
        jobs: Sequence[Job] | None = None,
        *,
        first_id: int = 1,
    ) -> None:
        """Sends all jobs, or these; no id may have been used before."""
        me = Identity.new("tokenizer", TOKENIZER, config)
        self._link = Dialer(config.scheduler_address(0), me, config.links)
        self.inbox = Inbox(self._link)
        self.outputs: Outputs = {}
        self._index: dict[bytes, int] = {}
        for index, job in enumerate(setting.jobs if jobs is None else jobs):
            message = job.message(first_id + index)
            self.outputs[index], self._index[message.rid] = Output(), index
            while not self._link.send(message):
                self._take()

    @property
    def num_tokens(self) -> int:
        """Of all requests together."""
        return sum(output.num_tokens for output in self.outputs.values())

    @property
    def stats(self) -> ReplicaStats | None:
        """As last heard of the scheduler."""
        replicas = self._link.peer.stats.replicas if self._link.peer is not None else []
        return replicas[0] if replicas else None

    @property
    def is_done(self) -> bool:
        """All requests have ended."""
        return all(output.end is not None for output in self.outputs.values())

    def run(self, until: Callable[[], bool]) -> None:
        """Take mail until something holds."""
        while not until():
            self._take()

    def settle(self) -> None:
        """Until nothing more is stored, and its stores have ended."""
        stored, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET_S:
            self._take()
            now = self.stats.stored_blocks if self.stats is not None else -1
            if now != stored:
                stored, since = now, time.monotonic()

    def _take(self) -> None:
        for event in self.inbox.wait(1.0):
            if not isinstance(event, Mail):
                continue
            match event.message:
                case TokenBatch(rows=rows):
                    for row in rows:
                        self.outputs[self._index[row.rid]].take(row)
                case Finished(rid=rid) | Failed(rid=rid) as end:
                    output = self.outputs[self._index[rid]]
                    output.end = end
                    self._link.send(Ack([AckRow(rid, output.num_tokens, done=True)]))
                case _:
                    pass


@contextmanager
def process(service: str, file: Path, index: int = 0) -> Iterator[None]:
    """One for as long as the body runs."""
    process = start(service, file, index)
    try:
        yield
    finally:
        end(process)


def start(service: str, file: Path, index: int = 0) -> "subprocess.Popen[bytes]":
    """A process whose log lies beside its configuration."""
    command = [sys.executable, "-m", f"services.{service}", "--config", str(file)]
    if index:
        command += ["--index", str(index)]
    with (file.parent / f"{service}-{index}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ})


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to, and wait."""
    process.terminate()
    try:
        process.wait(15.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def to_toml(config: Config) -> str:
    """What differs from the defaults."""
    lines: list[str] = []
    for section in ("mesh", "links", "router", "scheduler", "executor", "kvstore", "telemetry"):
        values = msgspec.to_builtins(getattr(config, section))
        plain = msgspec.to_builtins(type(getattr(config, section))())
        lines.append(f"[{section}]")
        for key, value in values.items():
            if value != plain[key]:
                lines.append(f"{key} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"
