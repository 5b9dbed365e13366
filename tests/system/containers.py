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

from tests.system.engine import BASE, ROOT, TAG, Engine, EngineError, run

PROJECT = "deepmesh-test"
FILES = (ROOT / "compose/compose.yaml", Path(__file__).with_name("compose.ci.yaml"))
EXECUTORS = ("executor-0-0", "executor-0-1", "executor-1-0", "executor-1-1")
SERVICES = (
    *("gateway-0", "tokenizer-1", "tokenizer-2", "router-0", "scheduler-0", "scheduler-1"),
    *(*EXECUTORS, "kvstore-0"),
)
# The binary itself: the script that the package installs beside it loses the exit status.
COMPOSE = Path(sysconfig.get_path("purelib")) / "compose/docker-compose"
UP_S, PAUSE_S = 300.0, 60.0


class ComposeMesh:
    """Started by `up`; `down` removes containers, networks and volumes.

    A service is called as its process; those of one scaled service by the numbers of its
    containers: tokenizer-1, tokenizer-2.
    """

    def __init__(self, engine: Engine, *, port: int, api_keys: Path) -> None:
        """`api_keys`: the file of digests that becomes a secret."""
        self._engine = engine
        self.url = f"http://127.0.0.1:{port}"
        self._env = {
            **engine.env,
            "DEEPMESH_PORT": str(port),
            "DEEPMESH_TAG": TAG,
            "DEEPMESH_API_KEYS": str(api_keys),
            "REDIS_IMAGE": BASE,
            "HOST_PACKAGES": sysconfig.get_path("purelib"),
        }

    def up(self) -> None:
        """Start everything; compose waits for the health of what others need, we for all."""
        began = time.time()
        try:
            self._compose("up", "--detach", "--no-build", timeout_s=UP_S)
        except EngineError as error:
            logs = self._compose("logs", "--no-color", "--tail", "20")
            raise EngineError(f"{error}\n{logs}") from error
        self.wait_healthy((*SERVICES, "redis"), since=began, timeout_s=UP_S)

    def scale(self, service: str, number: int) -> float:
        """So many containers of a service; what runs is left as it is.

        Returns:
            The time, for `wait_healthy`.
        """
        began = time.time()
        how = ["--detach", "--no-build", "--no-deps", "--no-recreate"]
        self._compose("up", *how, "--scale", f"{service}={number}", service, timeout_s=UP_S)
        return began

    def roll(self, service: str, tag: str) -> float:
        """Replace a service by its image of another version, as an operator does it.

        Returns:
            The time, for `wait_healthy`.
        """
        self._env["DEEPMESH_TAG"] = tag
        began = time.time()
        how = ["--detach", "--no-build", "--no-deps"]
        if service == "tokenizer":
            self._roll_tokenizers(began)
        else:
            self._compose("up", *how, service, timeout_s=UP_S)
        return began

    def _roll_tokenizers(self, began: float) -> None:
        """As many new ones beside the old ones; then compose removes those of the other image."""
        old = self.numbers("tokenizer")
        for number, more in ((2 * len(old), ["--no-recreate"]), (len(old), [])):
            how = ["--detach", "--no-build", "--no-deps", *more, "--scale", f"tokenizer={number}"]
            self._compose("up", *how, "tokenizer", timeout_s=UP_S)
            new = set(self.numbers("tokenizer")) - set(old)
            self.wait_healthy(new, since=began, timeout_s=UP_S)

    def numbers(self, service: str) -> list[str]:
        """Containers of a scaled service, as they are called here."""
        listed = ["ps", "--filter", f"name={PROJECT}-{service}-", "--format", "{{.Names}}"]
        names = self._engine.docker(*listed).split()
        return sorted(name.removeprefix(f"{PROJECT}-") for name in names)

    def down(self) -> None:
        """Remove all that `up` made."""
        self._compose("down", "--volumes", "--timeout", "10", timeout_s=120)

    def container(self, service: str) -> str:
        """Name of its container."""
        return f"{PROJECT}-{service}" + ("" if service.startswith("tokenizer-") else "-1")

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

    def cut(self, service: str) -> None:
        """Take it out of the network that the mesh talks in."""
        self._engine.docker("network", "disconnect", f"{PROJECT}_mesh", self.container(service))

    def join(self, service: str) -> None:
        """Put it back, perhaps with another address, under the names that it had."""
        alias = "tokenizer" if service.startswith("tokenizer-") else service
        network = f"{PROJECT}_mesh"
        self._engine.docker(
            "network", "connect", "--alias", alias, network, self.container(service)
        )

    def pause(self, service: str) -> None:
        """Stop all of its processes where they stand.

        runc asks a busy container 1,000 times within some milliseconds to freeze, then thaws it and
        gives up; that, and nothing else, is asked for again.
        """
        deadline = time.monotonic() + PAUSE_S
        while True:
            try:
                self._engine.docker("pause", self.container(service))
                return
            except EngineError as error:
                if "unable to freeze" not in str(error) or time.monotonic() > deadline:
                    raise

    def go_on(self, service: str) -> None:
        """End the pause."""
        self._engine.docker("unpause", self.container(service))

    def python(self, service: str, script: str, stdin: str = "") -> str:
        """What a script prints that runs in the service's container."""
        argv = ["docker", "exec", "-i", self.container(service), "python3", "-c", script]
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
        # Unbuffered: lines that a buffer held would not wake the selector.
        with subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE, bufsize=0) as events:
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
        argv = ["docker", "logs", "--tail", str(num_lines), self.container(service)]
        done = subprocess.run(argv, env=self._env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def _compose(self, *argv: str, timeout_s: float = 120) -> str:
        files = [part for file in FILES for part in ("-f", str(file))]
        if not COMPOSE.exists():
            raise EngineError(f"{COMPOSE} is missing: `make system` installs it")
        command = [str(COMPOSE), "--project-name", PROJECT, *files, *argv]
        return run(command, env=self._env, timeout_s=timeout_s)
