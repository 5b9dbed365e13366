"""Processes that are ranks, one GPU each: how benchmarks of a group run.

Each has a time limit, ends in `os._exit`, and leaves what it found in a file, so that a rank that
hangs or dies takes nobody with it.
"""

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from deepmesh.report import Json
from kernels.comm.windows import HostWindow, IpcWindow, OwnWindow

WAIT_S = 120.0  # for another rank


class Rank:
    """One process of a group."""

    def __init__(self, folder: Path, rank: int, ranks: int, device: str) -> None:
        """`device`: "cuda" (one each, as far as there are so many) or "host"."""
        self.rank, self.ranks, self._folder, self._meetings = rank, ranks, folder, 0
        self.device = torch.device("cpu")
        if device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self._kept: list[OwnWindow] = []
        self._store = FileStore(str(folder / "store"), ranks)
        self._store.set_timeout(timedelta(seconds=WAIT_S))

    def store(self, name: str) -> Store:
        """For a process group."""
        return PrefixStore(name, self._store)

    def swap(self, own: bytes) -> list[bytes]:
        """Ours to every rank; all by rank. Also a barrier."""
        self._meetings += 1
        key = f"swap{self._meetings}-"
        self._store.set(f"{key}{self.rank}", own.hex() or "-")
        found = [self._store.get(f"{key}{other}").decode() for other in range(self.ranks)]
        return [bytes.fromhex(text.strip("-")) for text in found]

    def meet(self) -> None:
        """All ranks have come here, and their devices are idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.swap(b"")

    def window(self, num_bytes: int) -> tuple[OwnWindow, list[int]]:
        """Memory that other ranks write to, and where all ranks' are."""
        own = IpcWindow(num_bytes) if self.device.type == "cuda" else HostWindow(num_bytes)
        self._kept.append(own)  # others reach it
        return own, own.meet(self.rank, self.swap)

    def say(self, found: Json) -> None:
        """One more result: it is there whatever comes afterwards."""
        with (self._folder / f"found{self.rank}").open("a") as file:
            file.write(json.dumps(found) + "\n")


Work = Callable[[Rank, "dict[str, Json]"], None]


def _run(work: Work, asked: dict[str, Json], where: tuple[str, int, int, str]) -> None:
    folder, rank, ranks, device = where
    code = 1
    try:
        torch.set_num_threads(1)
        me = Rank(Path(folder), rank, ranks, device)
        work(me, asked)
        me.meet()  # nobody reaches into memory of a process that is gone
        code = 0
    except BaseException:
        (Path(folder) / f"failed{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)  # no tear-down of a device that may wait for another one


class Group:
    """What ranks found, and what went wrong."""

    def __init__(self) -> None:
        self.found: list[list[dict[str, Json]]] = []  # by rank
        self.problem = ""


def on_ranks(
    work: Work, asked: dict[str, Json], *, ranks: int, device: str, limit_s: float
) -> Group:
    """Run `work` (a function of a module) in processes; whoever is not done in time ends."""
    context, done = multiprocessing.get_context("spawn"), Group()
    with tempfile.TemporaryDirectory(prefix="dm-ranks-") as folder:
        processes = [
            context.Process(target=_run, args=(work, asked, (folder, rank, ranks, device)))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        for rank, process in enumerate(processes):
            file, failed = Path(folder, f"found{rank}"), Path(folder, f"failed{rank}")
            lines = file.read_text().splitlines() if file.exists() else []
            done.found.append([json.loads(line) for line in lines])
            if failed.exists():
                done.problem += f"rank {rank}: {failed.read_text()}\n"
            elif rank in late:
                done.problem += f"rank {rank}: not done within {limit_s:g} s\n"
            elif process.exitcode:
                done.problem += f"rank {rank}: exit status {process.exitcode}\n"
    return done
