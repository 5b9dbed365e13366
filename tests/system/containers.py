"""The mesh of compose/compose.yaml on a test's engine."""

import json
import os
import selectors
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

from tests.system.engine import ROOT, Engine, EngineError, run

PROJECT = "deepmesh-test"
FILES = (ROOT / "compose/compose.yaml", Path(__file__).with_name("compose.ci.yaml"))
SERVICES = (
    *("gateway-0", "tokenizer-0", "tokenizer-1", "router-0", "scheduler-0", "scheduler-1"),
    *("executor-0-0", "executor-0-1", "executor-1-0", "executor-1-1", "kvstore-0"),
)
COMPOSE = Path(sysconfig.get_path("scripts")) / "docker-compose"
UP_S = 300.0


class ComposeMesh:
    """Started by `up`; `down` removes containers, networks and volumes."""

    def __init__(self, engine: Engine, port: int) -> None:
        self._engine = engine
        self.url = f"http://127.0.0.1:{port}"
        self._env = {
            **engine.env,
            "DEEPMESH_PORT": str(port),
            "HOST_PACKAGES": sysconfig.get_path("purelib"),
        }

    def up(self) -> None:
        """Start everything and wait until every container says that it is ready."""
        began = time.time()
        self._compose("up", "--detach", "--no-build", timeout_s=UP_S)
        if self._engine.docker("wait", self.container("keys")).strip() != "0":
            raise EngineError(f"no keys were made:\n{self.logs('keys')}")
        self.wait_healthy(SERVICES, since=began, timeout_s=UP_S)

    def down(self) -> None:
        """Remove all that `up` made."""
        self._compose("down", "--volumes", "--timeout", "10", timeout_s=120)

    def container(self, service: str) -> str:
        """Name of its container."""
        return f"{PROJECT}-{service}-1"

    def inspect(self, service: str) -> dict[str, object]:
        """What `docker inspect` says."""
        found = self._engine.docker("inspect", self.container(service))
        return json.loads(found)[0]

    def kill(self, service: str) -> float:
        """SIGKILL to the process from outside: `docker kill` would keep it from being restarted.

        Returns:
            The time, for `wait_healthy`.
        """
        pid = self._engine.docker("inspect", "-f", "{{.State.Pid}}", self.container(service))
        now = time.time()
        os.kill(int(pid), signal.SIGKILL)
        return now

    def python(self, service: str, script: str, stdin: str = "") -> str:
        """What a script prints that runs in the service's container."""
        argv = ["docker", "exec", "-i", self.container(service), "python", "-c", script]
        return run(argv, env=self._env, stdin=stdin)

    def order(self, command: str) -> str:
        """What the operator's `deepmesh COMMAND` prints."""
        return self._compose("run", "--rm", "--no-deps", "operator", command)

    def shell(self, service: str, script: str) -> str:
        """What a shell in the service's container prints."""
        return self._engine.docker("exec", self.container(service), "sh", "-c", script)

    def wait_healthy(
        self, services: Iterable[str], *, since: float, timeout_s: float
    ) -> dict[str, float]:
        """Wait until each container has become healthy after `since`; how long that took, s.

        Raises:
            EngineError: not in time; the text quotes their logs.
        """
        waiting, took = set(services), dict[str, float]()
        argv = ["docker", "events", "--since", f"{since:.3f}", "--filter", "event=health_status"]
        argv += ["--format", "{{.TimeNano}} {{.Actor.Attributes.name}} {{.Status}}"]
        deadline = time.monotonic() + timeout_s
        with subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE) as events:
            assert events.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(events.stdout, selectors.EVENT_READ)
                while waiting and selector.select(max(0.0, deadline - time.monotonic())):
                    line = events.stdout.readline().decode()
                    stamp, _, status = line.partition(" ")
                    for service in [*waiting]:
                        if status.strip() == f"{self.container(service)} health_status: healthy":
                            took[service] = int(stamp) / 1e9 - since
                            waiting.discard(service)
            events.kill()
        if waiting:
            logs = "\n".join(self.logs(service) for service in sorted(waiting))
            raise EngineError(f"not healthy within {timeout_s:g} s: {sorted(waiting)}\n{logs}")
        return took

    def logs(self, service: str, num_lines: int = 15) -> str:
        """The last lines of its output."""
        return self._compose("logs", "--no-color", "--tail", str(num_lines), service)

    def _compose(self, *argv: str, timeout_s: float = 120) -> str:
        files = [part for file in FILES for part in ("-f", str(file))]
        if not COMPOSE.exists():
            raise EngineError(f"{COMPOSE} is missing: `make system` installs it")
        command = [str(COMPOSE), "--project-name", PROJECT, *files, *argv]
        return run(command, env=self._env, timeout_s=timeout_s)
