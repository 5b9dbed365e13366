"""Scheduler and executor as processes of their own; the executor is killed in the middle."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.determinism.groups import Outputs, Setting, scheduler_config
from bench.determinism.outputs import Output
from deepmesh.config import Config, LinksConfig, MeshConfig, TelemetryConfig
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import Ack, AckRow, Failed, Finished, TokenBatch
from deepmesh.wire.sockets import Dialer, Identity, Mail

ROOT = Path(__file__).parents[2]
TOKENIZER = "tokenizer-0"
KILL_AT = 0.4  # of all tokens


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
    file.write_text(_toml(config))
    with _process("scheduler", file), _Executors(file) as executors:
        client = _Client(config, setting)
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
        self._running = _start("executor", self._file)
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._running)

    def replace(self) -> None:
        """SIGKILL, and a new one."""
        self._running.kill()
        self._running.wait()
        self._running = _start("executor", self._file)


class _Client:
    """A tokenizer without text."""

    def __init__(self, config: Config, setting: Setting) -> None:
        me = Identity.new("tokenizer", TOKENIZER, config)
        self._link = Dialer(config.scheduler_address(0), me, config.links)
        self.inbox = Inbox(self._link)
        self.outputs: Outputs = {}
        self._index: dict[bytes, int] = {}
        for index, job in enumerate(setting.jobs):
            message = job.message(index + 1)
            self.outputs[index], self._index[message.rid] = Output(), index
            while not self._link.send(message):
                self._take()

    @property
    def num_tokens(self) -> int:
        """Of all requests together."""
        return sum(output.num_tokens for output in self.outputs.values())

    @property
    def is_done(self) -> bool:
        """All requests have ended."""
        return all(output.end is not None for output in self.outputs.values())

    def run(self, until: Callable[[], bool]) -> None:
        """Take mail until something holds."""
        while not until():
            self._take()

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
def _process(service: str, file: Path) -> Iterator[None]:
    process = _start(service, file)
    try:
        yield
    finally:
        _end(process)


def _start(service: str, file: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", f"services.{service}", "--config", str(file)]
    with (file.parent / f"{service}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ})


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(15.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _toml(config: Config) -> str:
    """What differs from the defaults."""
    lines: list[str] = []
    for section in ("mesh", "scheduler", "executor", "telemetry"):
        values = msgspec.to_builtins(getattr(config, section))
        plain = msgspec.to_builtins(type(getattr(config, section))())
        lines.append(f"[{section}]")
        for key, value in values.items():
            if value != plain[key]:
                lines.append(f"{key} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"
