"""Replaces the processes of a running mesh one at a time, and its weights replica by replica.

The supervisor starts what ends; this ends it as an operator would, and waits until the next
process can work before it goes on. Requests move to other processes meanwhile.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from deepmesh.config import Config, load_config
from deepmesh.errors import UserError
from deepmesh.gateway_address import gateway_problem
from deepmesh.health import ready_path
from deepmesh.run_dir import MeshRecord, ProcessRecord, dump_toml, read_record, tail
from deepmesh.vocabulary import vocabulary_digest

LOOK_S = 0.05
MAX_ENDS = 4  # of an executor, while weights are loaded: they cannot be
# Whoever keeps something for others goes first, whoever holds connections of clients last.
ORDER = ("kvstore", "executor", "scheduler", "router", "tokenizer", "gateway")

Say = Callable[[str], None]


class RollingError(UserError):
    """The mesh could not be changed, or not wholly; the text says how it is now."""


class Rolling:
    """A running mesh, as its run folder shows it."""

    def __init__(self, run_dir: Path, *, timeout_s: float, say: Say = lambda _: None) -> None:
        """Changes nothing yet.

        Args:
            timeout_s: for one process to drain, end, start and load.
            say: told in words what is done.

        Raises:
            RollingError: no mesh runs there, or its supervisor starts nothing again.
        """
        self._run_dir, self._timeout_s, self._say = run_dir, timeout_s, say
        self._config_path = run_dir / "mesh.toml"
        record = self._record()
        if not load_config(self._config_path).supervisor.restart:
            raise RollingError("supervisor.restart is off: nobody would start what is ended")
        self.names = sorted(record.processes, key=lambda name: _place(record.processes[name]))

    def choose(self, wanted: Iterable[str]) -> list[str]:
        """Names of processes out of names and kinds, in the order to take them; none: all.

        Raises:
            RollingError: there is no such process here.
        """
        wanted = set(wanted)
        for word in wanted:
            if not any(word in (name, name.partition("-")[0]) for name in self.names):
                raise RollingError(f"{word}: runs here: {', '.join(self.names)}")
        return [n for n in self.names if not wanted or wanted & {n, n.partition("-")[0]}]

    def restart(self, name: str, given_up: Callable[[], str] = lambda: "") -> float:
        """End one process with SIGTERM, wait until its successor can work; s that took.

        Args:
            given_up: why it is no use to wait any longer; empty: it is.

        Raises:
            RollingError: it does not come back.
        """
        began_s = time.monotonic()
        old = self._process(name).pid
        if not old:
            raise RollingError(f"{name} does not run at the moment; see `deepmesh status`")
        try:
            os.kill(old, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it ended by itself just now, which is as good
        except PermissionError as error:
            raise RollingError(f"{name}: {error.strerror}: it is another user's") from error
        while not self._is_back(name, old):
            if problem := given_up():
                raise RollingError(problem)
            if time.monotonic() - began_s > self._timeout_s:
                lines = "\n".join(tail(Path(self._process(name).log), 5))
                raise RollingError(f"{name} is not ready after {self._timeout_s:g} s:\n{lines}")
            time.sleep(LOOK_S)
        took_s = time.monotonic() - began_s
        self._say(f"{name}: ready again after {took_s:.1f} s")
        return took_s

    def reload(self, model: Path | None) -> None:
        """Serve the weights of a folder, one replica after the other; None: its files changed.

        A replica drains, ends, and loads; the others serve meanwhile. If the first one cannot, it
        goes back to the weights before.

        Raises:
            RollingError: nothing to serve in that folder, another vocabulary, or no load.
        """
        before = load_config(self._config_path)
        after = _with_model(before, model)
        write_config(self._config_path, after)
        schedulers = self.choose(["scheduler"])
        for number, name in enumerate(schedulers):
            self._say(f"{name}: drains, then loads {after.mesh.model}")
            try:
                self.restart(name, self._endings(name))
            except RollingError as error:
                write_config(self._config_path, before)
                if number or before.mesh.model == after.mesh.model:
                    raise
                self._say(f"{name}: goes back to {before.mesh.model}")
                self.restart(name)
                raise RollingError(f"{error}\n{name} is back at {before.mesh.model}") from error
        for name in self.choose(["tokenizer"]):  # templates and limits come with a checkpoint
            self.restart(name)

    # ------------------------------------------------------------ inside

    def _endings(self, scheduler: str) -> Callable[[], str]:
        """Says that the executors of a group end again and again."""
        group = scheduler.partition("-")[2]
        names = [n for n in self.names if n.startswith(f"executor-{group}-")]
        begun = {name: self._process(name).restarts for name in names}

        def problem() -> str:
            for name in names:
                now = self._process(name)
                if now.restarts - begun[name] >= MAX_ENDS:
                    lines = "\n".join(tail(Path(now.log), 3))
                    return f"{name} cannot load the weights:\n{lines}"
            return ""

        return problem

    def _is_back(self, name: str, old: int) -> bool:
        """Another process runs, has said since then that it can work, and clients are served."""
        now = self._process(name)
        if now.pid in (0, old):
            return False
        try:
            said_s = ready_path(self._run_dir, name).stat().st_mtime
        except OSError:
            return False
        return said_s >= now.since_s and not gateway_problem(self._record().url)

    def _process(self, name: str) -> ProcessRecord:
        return self._record().processes[name]

    def _record(self) -> MeshRecord:
        record = read_record(self._run_dir)
        if record is None:
            raise RollingError(f"no mesh runs in {self._run_dir}")
        return record


def write_config(path: Path, config: Config) -> None:
    """In one go: a process that starts at this moment reads the one or the other."""
    new = path.with_suffix(".toml.new")
    new.write_text(dump_toml(config))
    new.replace(path)


def _with_model(config: Config, model: Path | None) -> Config:
    """The configuration with other weights, under the name that clients use already.

    Raises:
        RollingError: see `Rolling.reload`.
    """
    old = Path(config.mesh.model)
    new = old if model is None else model.resolve()
    if not (new / "config.json").is_file():
        raise RollingError(f"{new}: no config.json in it")
    theirs, ours = vocabulary_digest(new), vocabulary_digest(old)
    if theirs != ours:
        raise RollingError(
            f"{new} has another vocabulary than {old}: running requests could not go on; "
            "start a mesh of its own for it"
        )
    mesh = replace(config.mesh, model=str(new), served_model=config.served_model)
    return replace(config, mesh=mesh)


def _place(process: ProcessRecord) -> int:
    return ORDER.index(process.service) if process.service in ORDER else len(ORDER)
