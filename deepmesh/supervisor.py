"""`deepmesh up`: start, watch, restart and stop the processes of a mesh on one machine."""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deepmesh.config import Config, load_config
from deepmesh.errors import UserError
from deepmesh.gateway_address import (
    PortError,
    check_port,
    gateway_is_ready,
    gateway_problem,
    gateway_url,
    with_free_port,
)
from deepmesh.hangs import HangWatch
from deepmesh.loading import LOG_LINES, Loading, loading_of
from deepmesh.processes import USAGE_STATUS, Child, Command, mesh_addresses, mesh_commands
from deepmesh.run_dir import MeshRecord, RunDir, tail

POLL_S = 0.05
MAX_EARLY_ENDS = 4  # a process that ends this often before the mesh is ready stops the start

_log = logging.getLogger(__name__)


class MeshError(UserError):
    """The mesh did not start; the text names the process and quotes its log."""


class Mesh:
    """All processes of one mesh; `with Mesh(config) as mesh` starts, waits and stops.

    One thread starts and reaps every child: the kernel kills a child when the thread that
    started it ends, so that thread lives exactly as long as the mesh.
    """

    def __init__(
        self,
        config: Config | Path | None = None,
        *,
        commands: Sequence[Command] | None = None,
        is_ready: Callable[[], bool] | None = None,
    ) -> None:
        """Nothing starts yet.

        Args:
            config: a Config, the path of a mesh.toml, or None for the defaults.
            commands: what to run instead of the services of the config (tests).
            is_ready: the question asked until it says yes; default: the gateway's /ready.
        """
        if not isinstance(config, Config):
            config = load_config(config)
        self.config = with_free_port(config)
        self.run_dir = Path(config.mesh.run_dir)
        self.url = gateway_url(self.config)
        self._commands = commands
        self._is_ready = is_ready or (lambda: gateway_is_ready(self.url))
        self._children: dict[str, Child] = {}
        self._hangs = HangWatch(self.run_dir, self.config.supervisor.hang_s)
        self._moved = threading.Condition()  # notified when a process starts or ends
        self._stop = threading.Event()
        self._hurry = threading.Event()  # kill at once
        self._failure: BaseException | None = None
        self._folder: RunDir | None = None
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    # ------------------------------------------------------------ what others ask

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name; 0 for one that is between two lives."""
        return {name: child.pid for name, child in self._children.items()}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {name: child.restarts for name, child in self._children.items()}

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal (default: SIGKILL) to one process; returns its pid, 0 if it has none."""
        return self._children[name].send(number)

    def wait_for(self, what: Callable[[], bool], timeout_s: float) -> bool:
        """Block until `what` holds, asked whenever a process has started or ended."""
        with self._moved:
            return self._moved.wait_for(what, timeout_s)

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = 30.0) -> int:
        """Block until `name` runs under another pid than `old_pid`; returns the new one."""
        child = self._children[name]
        if not self.wait_for(lambda: child.pid not in (0, old_pid), timeout_s):
            raise MeshError(f"{name}: not restarted within {timeout_s:g} s")
        return child.pid

    def log_tail(self, name: str, num_lines: int = 1) -> list[str]:
        """The last lines of a process's log."""
        return tail(self._children[name].log, num_lines)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Take the run folder and start every process; does not wait until they are ready.

        Raises:
            RunDirError: another mesh runs there, or the folder cannot be used.
            PortError: the gateway's port is taken.
        """
        self._folder = RunDir(self.run_dir, _mapped_files(self.config))
        try:
            check_port(self.config)
        except PortError:
            self._folder.discard()
            self._folder = None
            raise
        path = self._folder.write_config(self.config)
        commands = (
            self._commands if self._commands is not None else mesh_commands(self.config, path)
        )
        for command in commands:
            log = self._folder.log_path(command.name)
            if log.exists():
                log.replace(log.with_suffix(".log.1"))
            backoff_s = self.config.supervisor.backoff_s
            self._children[command.name] = Child(command, log, backoff_s)
        self._watcher.start()

    def wait_ready(self, on_poll: Callable[[], None] = lambda: None) -> None:
        """Block until the gateway says that it can serve; `on_poll` draws progress.

        Raises:
            MeshError: a process keeps ending, or `supervisor.start_timeout_s` has passed without
                one that is further with its model: kernels are compiled at the first start.
        """
        timeout_s = self.config.supervisor.start_timeout_s
        deadline = time.monotonic() + timeout_s
        loading = self._loading()
        while not self._is_ready():
            on_poll()
            for child in self._children.values():
                if child.early_ends >= MAX_EARLY_ENDS:
                    raise MeshError(self._explain(f"{child.command.name} keeps ending", [child]))
                if child.last_status == USAGE_STATUS:
                    raise MeshError(self._explain(f"{child.command.name} cannot start", [child]))
            if self._failure is not None:
                raise MeshError(f"the supervisor failed: {self._failure!r}")
            if self._stop.is_set():
                raise MeshError("stopped before it was ready")
            if time.monotonic() > deadline and (now := self._loading()) != loading:
                deadline, loading = time.monotonic() + timeout_s, now
            if time.monotonic() > deadline:
                children = list(self._children.values())
                what = f"not ready within supervisor.start_timeout_s = {timeout_s:g} s"
                if problem := gateway_problem(self.url):
                    what += f": {problem}"
                raise MeshError(self._explain(what, children))
            with self._moved:
                self._moved.wait(POLL_S)

    def _loading(self) -> dict[str, Loading | None]:
        """How far each process is."""
        return {n: loading_of(tail(c.log, LOG_LINES)) for n, c in self._children.items()}

    def request_stop(self) -> None:
        """Begin to stop (from a signal handler, too); a second call kills at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def stop(self) -> None:
        """Stop every process, drained if they can within supervisor.stop_timeout_s."""
        if self._folder is None:
            return
        self._stop.set()
        self._watcher.join()
        self._folder.release()
        self._folder = None

    def wait_stopped(self) -> None:
        """Block until someone asks the mesh to stop, or the supervisor itself fails."""
        while self._watcher.is_alive():  # a signal just before a join without end is heard after it
            self._watcher.join(POLL_S)
        if self._failure is not None:
            raise MeshError(f"the supervisor failed: {self._failure!r}") from self._failure

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _explain(self, what: str, children: Sequence[Child]) -> str:
        lines = [what]
        for child in children:
            lines.append(f"--- {child.log}")
            lines += tail(child.log, 12 if len(children) == 1 else 3)
        return "\n".join(lines)

    # ------------------------------------------------------------ the watcher's thread

    def _watch(self) -> None:
        try:
            for name, child in self._children.items():
                self._hangs.started(name)
                child.start(time.monotonic())
            self._publish()
            while not self._stop.wait(POLL_S):
                self._look_after(time.monotonic())
        except BaseException as error:  # the one of this loop: shown by wait_ready and `up`
            _log.exception("the supervisor failed")
            self._failure = error
        finally:
            self._stop_children()

    def _look_after(self, now: float) -> None:
        for name in self._hangs.hung(self.pids, now):
            hang_s = self.config.supervisor.hang_s
            _log.error("%s: hangs: no sign of it for %.0f s; killed", name, hang_s)
            self._children[name].send(signal.SIGKILL)
        moved = False
        for name, child in self._children.items():
            if (how := child.poll(now)) is not None:
                moved = True
                if self.config.supervisor.restart:
                    _log.warning(
                        "%s: %s; starts again in %.1f s", name, how, child.next_start - now
                    )
                else:
                    _log.warning("%s: %s; supervisor.restart is off", name, how)
            elif child.pid == 0 and self.config.supervisor.restart and now >= child.next_start:
                moved = True
                child.restarts += 1
                self._hangs.started(name)
                child.start(now)
                _log.info("%s: started again, pid %d", name, child.pid)
        if moved:
            self._publish()

    def _stop_children(self) -> None:
        """Against the flow of requests: what feeds the others goes first, and can drain."""
        deadline = time.monotonic() + self.config.supervisor.stop_timeout_s
        children = sorted(self._children.values(), key=_stop_rank)
        for _, group in itertools.groupby(children, key=_stop_rank):
            self._stop_group(list(group), deadline)
        for child in children:
            if child.pid:
                _log.warning("%s: did not stop in time; killed", child.command.name)
            child.kill()
        with self._moved:
            self._moved.notify_all()

    def _stop_group(self, group: list[Child], deadline: float) -> None:
        for child in group:
            child.send(signal.SIGTERM)
        # Half of what is left: a service that hangs must not cost the next one its chance.
        now = time.monotonic()
        until = now + (deadline - now) / 2
        while any(child.pid for child in group) and time.monotonic() < until:
            if self._hurry.wait(POLL_S / 5):
                return
            for child in group:
                child.poll(time.monotonic())

    def _publish(self) -> None:
        """Tell mesh.json and whoever waits that something has moved."""
        assert self._folder is not None
        config = self.config
        processes = {
            name: child.record(restarts=config.supervisor.restart)
            for name, child in self._children.items()
        }
        self._folder.write_record(
            MeshRecord(
                name=config.mesh.name,
                url=self.url,
                supervisor_pid=os.getpid(),
                config=str(self.run_dir / "mesh.toml"),
                processes=processes,
                addresses=mesh_addresses(config, self.url),
            )
        )
        with self._moved:
            self._moved.notify_all()


def _stop_rank(child: Child) -> int:
    order = ("gateway", "tokenizer", "router", "scheduler", "executor", "kvstore")
    return order.index(child.command.service) if child.command.service in order else len(order)


def _mapped_files(config: Config) -> Path | None:
    """The folder that is ours to remove; one that the user named is not."""
    return config.shared_dir if not config.kvstore.shared_dir else None
