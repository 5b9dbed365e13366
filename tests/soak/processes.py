"""What processes hold, from /proc: memory of their own, descriptors, sockets, threads, maps."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

COUNTS = ("fds", "sockets", "threads", "maps")
_PRIVATE = (b"Private_Clean:", b"Private_Dirty:", b"Private_Hugetlb:", b"Swap:")


@dataclass
class Series:
    """The samples of one process; each list has one entry a time."""

    pid: int
    times_s: list[float] = field(default_factory=list[float])
    uss_bytes: list[float] = field(default_factory=list[float])
    pss_bytes: list[float] = field(default_factory=list[float])
    counts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COUNTS})

    def take(self, now_s: float) -> None:
        """One more sample.

        Raises:
            OSError: it has ended.
        """
        folder = Path(f"/proc/{self.pid}")
        uss, pss = memory(folder)
        links = [_target(entry) for entry in (folder / "fd").iterdir()]
        maps = (folder / "maps").read_bytes()
        self.times_s.append(now_s)
        self.uss_bytes.append(uss)
        self.pss_bytes.append(pss)
        self.counts["fds"].append(len(links))
        self.counts["sockets"].append(sum(link.startswith("socket:") for link in links))
        self.counts["threads"].append(len(list((folder / "task").iterdir())))
        self.counts["maps"].append(maps.count(b"/dev/shm/"))


def memory(folder: Path) -> tuple[int, int]:
    """(USS, PSS) in bytes: what would be free without it, and with its share of what it shares."""
    uss = pss = 0
    for line in (folder / "smaps_rollup").read_bytes().splitlines():
        if line.startswith(_PRIVATE):
            uss += int(line.split()[1]) * 1024
        elif line.startswith(b"Pss:"):
            pss = int(line.split()[1]) * 1024
    return uss, pss


def _target(entry: Path) -> str:
    with contextlib.suppress(OSError):  # closed meanwhile
        return os.readlink(entry)
    return ""


def with_children(pids: Mapping[str, int]) -> dict[str, int]:
    """Those and what they started, which has a name of its own: `executor-0-0/masks`."""
    found = dict(pids)
    known = set(pids.values())
    for name, pid in pids.items():  # the supervisor comes last: all are its children
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in known:
                        known.add(child.pid)
                        found[f"{name}/{_module(child)}"] = child.pid
    return found


def _module(child: psutil.Process) -> str:
    """`-m services.executor.masks …` is called masks."""
    words = child.cmdline()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    return child.name()


class Watch:
    """All processes of a run, sampled together."""

    def __init__(self, pids: Mapping[str, int], shared: Path) -> None:
        """`shared`: the folder of mapped files."""
        self.series = {name: Series(pid) for name, pid in pids.items()}
        self.ended: list[str] = []
        self.shared_times_s: list[float] = []
        self.shared_files: list[float] = []
        self._shared = shared

    def take(self, now_s: float) -> None:
        """One sample of each that still runs."""
        for name, series in self.series.items():
            if name in self.ended:
                continue
            try:
                series.take(now_s)
            except OSError:
                self.ended.append(name)
        self.shared_times_s.append(now_s)
        self.shared_files.append(float(sum(1 for _ in self._shared.glob("**/*"))))
