"""How the ranks of an EP group find each other, once for every engine epoch."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from kernels.comm.comm import ExchangeError

POLL_S = 0.01
CONNECT_S = 10.0
LOOPBACK = "127.0.0.1"


class Rendezvous:
    """A file per engine epoch that all ranks see: they run on one machine.

    The scheduler starts no step before every rank has loaded, and begins a new epoch whenever it
    loses one. So a file only ever sees one process of each rank, and all come within moments.
    """

    def __init__(self, path: Path, *, rank: int, ranks: int) -> None:
        """`path` is that of the files, but for the epoch at its end."""
        self.rank, self.ranks = rank, ranks
        self._path = path

    def connect(
        self, epoch: int, stopped: threading.Event, patience_s: float
    ) -> dist.ProcessGroupGloo:
        """Wait for the other ranks and connect to each.

        Raises:
            ExchangeError: `stopped` was set, or not all came within `patience_s`.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        store = FileStore(f"{self._path}-{epoch}", self.ranks)
        store.set(f"rank{self.rank}", "1")
        everyone = [f"rank{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + patience_s
        while not store.check(everyone):
            if stopped.wait(POLL_S):
                raise ExchangeError("the group has been given up")
            if time.monotonic() > deadline:
                raise ExchangeError(f"not all {self.ranks} ranks were there in {patience_s:g} s")
        return _Attempt(lambda: self._make_group(store)).result(stopped)

    def finish(self, epoch: int) -> None:
        """Every rank is connected: nobody needs this file, or an older one, any more."""
        for file in self._path.parent.glob(f"{self._path.name}-*") if self.rank == 0 else ():
            if int(file.name.rpartition("-")[2]) <= epoch:
                file.unlink(missing_ok=True)

    def _make_group(self, store: Store) -> dist.ProcessGroupGloo:
        # the only way to name the interface
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        if not os.environ.get("GLOO_SOCKET_IFNAME"):
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=CONNECT_S)
        return dist.ProcessGroupGloo(store, self.rank, self.ranks, options)


class _Attempt:
    """Connecting cannot be interrupted: it runs on a thread that can be left behind."""

    def __init__(self, connect: Callable[[], dist.ProcessGroupGloo]) -> None:
        self._connect = connect
        self._group: dist.ProcessGroupGloo | None = None
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, name="group-connect", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._group = self._connect()
        except RuntimeError as error:  # a rank has gone meanwhile
            self._error = error

    def result(self, stopped: threading.Event) -> dist.ProcessGroupGloo:
        """The group; whoever gives up leaves it to this thread."""
        while self._thread.is_alive():
            if stopped.is_set():
                raise ExchangeError("the group has been given up")
            self._thread.join(POLL_S)
        group, self._group = self._group, None
        if group is None:
            raise ExchangeError(f"the ranks could not connect: {self._error}")
        return group
