"""What must not be left: while the mesh idles after all faults, and once it has stopped."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.chaos.mesh import ChaosMesh
from tests.e2e.conftest import RunningMesh

GROWTH_BYTES = 256 << 20  # of a process over the largest of its service before the first fault
MORE_FILES = 16  # descriptors of a process over the same
KEPT = {"epochs", "logs", "traces"}  # of the run folder
SERVES = ("mesh.json", "mesh.toml", "lock")


class Footprint:
    """The largest process of each service at one time: memory and descriptors."""

    def __init__(self, mesh: ChaosMesh) -> None:
        self.rss_bytes: Counter[str] = Counter()
        self.num_files: Counter[str] = Counter()
        for name, process in mesh.processes():
            with contextlib.suppress(psutil.Error):
                service = service_of(name)
                rss, files = process.memory_info().rss, process.num_fds()
                self.rss_bytes[service] = max(self.rss_bytes[service], rss)
                self.num_files[service] = max(self.num_files[service], files)


def service_of(name: str) -> str:
    """executor-0-0-masks -> masks."""
    return "masks" if name.endswith("masks") else name.partition("-")[0]


def while_idle(mesh: ChaosMesh, folder: Path, before: Footprint, sockets: set[str]) -> list[str]:
    """Waits until it idles. What is left, in words."""
    found: list[str] = []
    running = RunningMesh(mesh.mesh, folder)
    try:
        running.wait_idle()
    except AssertionError as error:
        found.append(f"accounts: {error}")
    for name in ("quarantined_blocks", "failed_audits_total", "streams_running"):
        if (count := running.total(f"deepmesh_{name}")) != 0:
            found.append(f"{name}: {count:g}")
    now = Footprint(mesh)
    for service, count in now.num_files.items():
        if count > before.num_files[service] + MORE_FILES:
            found.append(f"{service}: {count} descriptors, {before.num_files[service]} before")
    found += fat(before, now)
    found += [f"{name} maps {path}" for name, path in _unlinked(mesh)]
    if more := socket_files(mesh.mesh.run_dir) - sockets:
        found.append(f"socket files: {sorted(more)}")
    return found


def fat(before: Footprint, now: Footprint) -> list[str]:
    """Processes whose memory has grown too much, in words."""
    return [
        f"{service}: {rss >> 20} MiB, {before.rss_bytes[service] >> 20} before"
        for service, rss in now.rss_bytes.items()
        if rss > before.rss_bytes[service] + GROWTH_BYTES
    ]


def socket_files(run_dir: Path) -> set[str]:
    """Of all that listen there now."""
    return {entry.name for entry in run_dir.iterdir() if entry.is_socket()}


def after_stop(mesh: ChaosMesh, folder: Path) -> list[str]:
    """What a stopped mesh has left, in words."""
    run_dir, shared = mesh.mesh.run_dir, mesh.mesh.config.shared_dir
    found = [f"process: {line}" for line in _alive(str(folder))]
    found += [f"file: {e.name}" for e in run_dir.iterdir() if e.name not in KEPT]
    if shared is not None and shared.exists():
        found.append(f"mapped files: {shared}")
    return found


def told(logs: Path) -> Counter[str]:
    """How the tracebacks in the logs end, and failed audits: a process may end by one, not hang."""
    found: Counter[str] = Counter()
    for path in logs.glob("*.log*"):
        text = path.read_text(errors="replace")
        for part in text.split("Traceback (most recent call last):\n")[1:]:
            end = re.search(r"^(?![ \t\n]).*$", part, re.MULTILINE)
            found[f"{service_of(path.stem)}: {end.group()[:200] if end else part[-200:]}"] += 1
        found["audit failed"] += text.count("audit failed")
    return +found


def _unlinked(mesh: ChaosMesh) -> Iterator[tuple[str, str]]:
    """Files of a kvstore that is no more, kept alive by who maps them."""
    shared = str(mesh.mesh.config.shared_dir)
    for name, process in mesh.processes():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if shared in line and line.endswith("(deleted)"):
                    yield name, line.split(maxsplit=5)[-1]


def _alive(folder: str) -> list[str]:
    """Command lines that name the folder."""
    others = (p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    lines = (" ".join(process.info["cmdline"] or []) for process in others)
    return [line for line in lines if f"{folder}/" in line]
