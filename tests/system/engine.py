"""A Docker engine of the tests' own, with its data in one folder, and the images built on it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 30.0, 60.0
BASE = "deepmesh-base:ci"
BASE_PACKAGES = "python3,python3-venv,ca-certificates,g++,redis-server"
TAG, NEXT_TAG = "ci", "next"
TARGETS = ("gateway", "tokenizer", "router", "scheduler", "kvstore", "operator", "executor")
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
# The daemon is told to stop when the tests die, whatever way.
_STOP_WITH_PARENT = (
    "import ctypes,os,signal,sys;"
    "ctypes.CDLL(None).prctl(1,signal.SIGTERM);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


class EngineError(AssertionError):
    """A tool is missing or failed: a failure of the test, with the tool's own words."""


class Engine:
    """dockerd by hand; `close` leaves neither process, mount, file nor rule behind."""

    def __init__(self, folder: Path) -> None:
        if os.getuid() != 0:
            raise EngineError("the system tests start a container engine: run them as root")
        for tool in ("dockerd", "docker", "iptables", "mmdebstrap"):
            if shutil.which(tool) is None:
                raise EngineError(f"{tool} is missing: `make system` installs it")
        self.folder = folder
        self._forwarding = FORWARDING.read_text()
        self._rules = self._read_rules()
        self.env = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_BUILDKIT": "0",  # the other builder is a plugin that Debian does not have
        }
        self._log = (folder / "dockerd.log").open("wb")
        argv = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        argv += ["--pidfile", f"{folder}/docker.pid", "-H", self.env["DOCKER_HOST"]]
        argv += ["--bridge", "none"]
        wrapper = [sys.executable, "-I", "-S", "-c", _STOP_WITH_PARENT, str(os.getpid())]
        self._daemon = subprocess.Popen([*wrapper, *argv], stdout=self._log, stderr=self._log)
        self._wait_started()

    def docker(self, *argv: str, timeout_s: float = 120) -> str:
        """Run `docker ARGV`; its standard output.

        Raises:
            EngineError: it failed.
        """
        return run(["docker", *argv], env=self.env, timeout_s=timeout_s)

    def close(self) -> None:
        """Stop the daemon by its pid file and remove all that it made."""
        pid = int((self.folder / "docker.pid").read_text())
        assert pid == self._daemon.pid
        os.kill(pid, signal.SIGTERM)
        self._daemon.wait(STOP_S)
        self._log.close()
        for mount in reversed(self.mounts()):
            run(["umount", mount])
        shutil.rmtree(self.folder)
        self._restore_network()
        assert self.processes() == []

    def mounts(self) -> list[str]:
        """Mount points below the folder."""
        points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        return [point for point in points if point.startswith(f"{self.folder}/")]

    def processes(self) -> list[str]:
        """Command lines that name the folder: daemon, containerd, shims."""
        found: list[str] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(self.folder) in line and int(path.parent.name) != os.getpid():
                    found.append(line)
        return found

    def _wait_started(self) -> None:
        deadline = time.monotonic() + START_S
        while subprocess.run(
            ["docker", "info"], env=self.env, capture_output=True, check=False
        ).returncode:
            log = (self.folder / "dockerd.log").read_text()[-2000:]
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"dockerd does not start:\n{log}")

    @staticmethod
    def _read_rules() -> str:
        return run(["iptables-save"])

    def _restore_network(self) -> None:
        """Another engine's rules, if there is one, change by themselves and are left alone."""
        if "DOCKER" not in self._rules:
            run(["iptables", "-P", "FORWARD", "ACCEPT"])
            for table in ("filter", "nat"):
                run(["iptables", "-t", table, "-F"])
                run(["iptables", "-t", table, "-X"])
            run(["iptables-restore"], stdin=self._rules)
            FORWARDING.write_text(self._forwarding)


def run(
    argv: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
    stdin: str | None = None,
    cwd: Path = ROOT,
) -> str:
    """Standard output of a command.

    Raises:
        EngineError: it failed; the text holds its last words.
    """
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=timeout_s, input=stdin, cwd=cwd
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{' '.join(argv[:4])} … took longer than {timeout_s:g} s") from error
    if done.returncode:
        words = (done.stdout + done.stderr)[-3000:]
        raise EngineError(f"{' '.join(argv)} ended with {done.returncode}:\n{words}")
    return done.stdout


def make_base(engine: Engine) -> None:
    """A base image out of Debian packages, as no registry of images is asked.

    It trusts whom this machine trusts, and its pip asks where ours does.
    """
    pip_conf = engine.folder / "pip.conf"
    pip_conf.write_text(_pip_conf())
    tree = engine.folder / "base.tar"
    argv = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={BASE_PACKAGES}"]
    argv += [f"--customize-hook=copy-in {pip_conf} /etc"]
    argv += [f"--customize-hook=copy-in {CA_BUNDLE} {CA_BUNDLE.parent}"]
    run([*argv, "bookworm", str(tree)], timeout_s=600)
    engine.docker("import", str(tree), BASE, timeout_s=300)
    tree.unlink()


def _pip_conf() -> str:
    lines = ["[global]", f"cert = {CA_BUNDLE}"]
    for line in run([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].replace("_", "-")
        if name == "index-url" and "://" in value:
            lines.append(f"index-url = {value.strip(chr(39))}")
    return "\n".join([*lines, ""])


def build(engine: Engine, target: str, **arguments: str) -> None:
    """The image of a service out of compose/Dockerfile."""
    argv = ["build", "--quiet", "--network", "host", "-f", "compose/Dockerfile"]
    for name, value in {"BASE": BASE, **arguments}.items():
        argv += ["--build-arg", f"{name}={value}"]
    tag = f"deepmesh/{target}:{TAG}"
    engine.docker(*argv, "--target", target, "-t", tag, ".", timeout_s=900)


def build_next(engine: Engine, target: str, wire: str) -> None:
    """The image of the version behind ours, a wire minor version on."""
    folder = Path(__file__).parent
    context = engine.folder / "next"
    context.mkdir(exist_ok=True)
    shutil.copy(folder / "next_version.py", context)
    argv = ["build", "--quiet", "-f", str(folder / "Dockerfile.next")]
    argv += ["--build-arg", f"FROM=deepmesh/{target}:{TAG}", "--build-arg", f"WIRE={wire}"]
    tag = f"deepmesh/{target}:{NEXT_TAG}"
    engine.docker(*argv, "-t", tag, str(context), timeout_s=300)
