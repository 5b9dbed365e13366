"""Machines for a test: network namespaces on one switch, each with a /dev/shm of its own.

What a process of one sees of another's is the network: no loopback, no mapped file. Namespaces of
runs that were killed are removed by the next one; all in one goes when its namespace goes.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "dmh"
STOP_S = 15.0


def run(*words: str) -> str:
    """A command that must work; its output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


def address_of(number: int) -> str:
    """Of a host on the switch."""
    return f"10.77.0.{number + 1}"


class Host:
    """One machine: a namespace, its address, and the processes that run there."""

    def __init__(self, namespace: str, address: str, folder: Path, names: str) -> None:
        """`names`: the text of its /etc/hosts."""
        self.namespace, self.address, self.folder = namespace, address, folder
        folder.mkdir()
        (folder / "hosts").write_text(names)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        # Holds the mount namespace: all that runs here shares its /dev/shm.
        mounts = (
            "mount -t tmpfs -o size=256m tmpfs /dev/shm && mount --bind hosts /etc/hosts "
            "&& echo up && exec sleep infinity"
        )
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "unshare", "--mount", "sh", "-c", mounts],
            stdout=subprocess.PIPE,
            cwd=folder,
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"up\n", "no /dev/shm of its own"

    def inside(self, *words: str) -> list[str]:
        """The same command, run on this host."""
        return ["nsenter", f"--target={self._init.pid}", "--mount", "--net", *words]

    def python(self, script: str, given: str = "") -> str:
        """Run a script here; its output."""
        done = subprocess.run(
            self.inside(sys.executable, "-c", script),
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(self, service: str, index: int = 0) -> None:
        """`deepmesh serve`, as the manual says; its output goes to FOLDER/SERVICE-INDEX.log."""
        words = [sys.executable, "-m", "deepmesh.cli", "serve", service]
        words += ["-c", str(self.folder / "mesh.toml")]
        if service != "router":
            words += ["--index", str(index)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        name = f"{service}-{index}"
        with self.log(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(
                self.inside(*words), cwd=ROOT, stdout=output, stderr=output, env=environment
            )

    def log(self, name: str) -> Path:
        """Of one process."""
        return self.folder / f"{name}.log"

    def close(self) -> None:
        """End all that runs here: drained if they can, killed if they cannot."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._init.kill()
        self._init.wait()
        _close(self._init.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    assert pipe is not None
    pipe.close()


class Network:
    """A switch and hosts on it; the first one also has a line to where the test runs.

    `with Network(folder, 3) as network`.
    """

    def __init__(self, folder: Path, num_hosts: int, names: dict[str, int]) -> None:
        """`names`: host names, and which host each is."""
        sweep()
        lines = [f"{address_of(number)} {name}" for name, number in names.items()]
        self._names = "\n".join(["127.0.0.1 localhost", *lines, ""])
        own = f"{PREFIX}{os.getpid()}"
        self._switch = f"{own}s"
        self._namespaces = [self._switch] + [f"{own}h{number}" for number in range(num_hosts)]
        self._folder = folder
        self._line = f"{own}t"  # of the test; at most 15 letters
        self.hosts: list[Host] = []
        second = 64 + os.getpid() % 64  # other runs on this machine have other networks
        self.outside = f"100.{second}.1.2"  # where the first host is reached from the test

    def __enter__(self) -> Self:
        try:
            for namespace in self._namespaces:
                run("ip", "netns", "add", namespace)
                run("ip", "-n", namespace, "link", "set", "lo", "up")
            run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for number, namespace in enumerate(self._namespaces[1:]):
                self._plug(number, namespace)
                folder = self._folder / f"host-{number}"
                self.hosts.append(Host(namespace, address_of(number), folder, self._names))
            self._lead_out(self._namespaces[1])
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
        for host in self.hosts:
            host.close()
        for words in (
            ["link", "del", self._line],
            *(["netns", "del", n] for n in self._namespaces),
        ):
            subprocess.run(["ip", *words], capture_output=True, check=False)

    def set_link(self, number: int, state: str) -> None:
        """The switch's port of a host: "down", "up"."""
        run("ip", "-n", self._switch, "link", "set", f"port{number}", state)

    def _plug(self, number: int, namespace: str) -> None:
        port = f"port{number}"
        run("ip", "-n", self._switch, "link", "add", port, "type", "veth",
            "peer", "name", "eth0", "netns", namespace)  # fmt: skip
        run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
        run("ip", "-n", namespace, "addr", "add", f"{address_of(number)}/24", "dev", "eth0")
        run("ip", "-n", namespace, "link", "set", "eth0", "up")

    def _lead_out(self, namespace: str) -> None:
        here = self.outside.rpartition(".")[0] + ".1"
        run("ip", "link", "add", self._line, "type", "veth",
            "peer", "name", "out0", "netns", namespace)  # fmt: skip
        run("ip", "addr", "add", f"{here}/30", "dev", self._line)
        run("ip", "link", "set", self._line, "up")
        run("ip", "-n", namespace, "addr", "add", f"{self.outside}/30", "dev", "out0")
        run("ip", "-n", namespace, "link", "set", "out0", "up")


def sweep() -> None:
    """Remove the namespaces of runs whose process is gone, and what still runs in them."""
    for line in run("ip", "netns", "list").splitlines():
        match = re.match(rf"({PREFIX}(\d+)[sh]\d*)\b", line)
        if match is None or Path(f"/proc/{match[2]}").exists():
            continue
        for pid in run("ip", "netns", "pids", match[1]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "del", match[1])


def left() -> list[str]:
    """Namespaces and links of this process that are still there."""
    own = f"{PREFIX}{os.getpid()}"
    names = run("ip", "netns", "list").split() + run("ip", "-o", "link").split()
    return [name for name in names if name.startswith(own)]
