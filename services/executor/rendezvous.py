"""How the ranks of an EP group find each other, once for every engine epoch."""

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from kernels.comm.comm import ExchangeError

POLL_S = 0.01
CONNECT_S = 10.0
DIAL_S = 2.0


class Rendezvous(ABC):
    """Where the ranks meet. `ExpertGroup` asks once an epoch.

    The scheduler starts no step before every rank has loaded, and begins a new epoch whenever it
    loses one. So an epoch only ever sees one process of each rank, and all come within moments.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    @abstractmethod
    def _store(self, epoch: int) -> Store:
        """What all ranks of this epoch read and write.

        Raises:
            RuntimeError: not there yet.
        """

    @abstractmethod
    def _hostname(self) -> str:
        """The address at which the others reach this rank; empty: that of the host's name."""

    @abstractmethod
    def finish(self, epoch: int) -> None:
        """Every rank is connected: nobody needs the epoch's store, or an older one, any more."""

    def connect(
        self, epoch: int, stopped: threading.Event, patience_s: float
    ) -> dist.ProcessGroupGloo:
        """Wait for the other ranks and connect to each.

        Raises:
            ExchangeError: `stopped` was set, or not all came within `patience_s`.
        """
        deadline = time.monotonic() + patience_s
        everyone = [f"rank{rank}" for rank in range(self.ranks)]
        store: Store | None = None
        problem = ""
        while True:
            try:
                if store is None:
                    store = self._store(epoch)
                    store.set(everyone[self.rank], "1")
                    problem = "not all came"
                if store.check(everyone):
                    break
            except RuntimeError as error:  # not there yet, or gone with a process that died
                store, problem = None, str(error).splitlines()[0]
            if stopped.wait(POLL_S):
                raise ExchangeError("the group has been given up")
            if time.monotonic() > deadline:
                raise ExchangeError(f"{self.ranks} ranks, {patience_s:g} s: {problem}")
        return _Attempt(partial(self._make_group, store)).result(stopped)

    def _make_group(self, store: Store) -> dist.ProcessGroupGloo:
        # the only way to name the interface
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [self._device()]
        options._timeout = timedelta(seconds=CONNECT_S)
        return dist.ProcessGroupGloo(store, self.rank, self.ranks, options)

    def _device(self) -> object:
        interface, hostname = os.environ.get("GLOO_SOCKET_IFNAME", ""), self._hostname()
        if interface:
            return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        if hostname:
            return dist.ProcessGroupGloo.create_device(hostname=hostname)
        return dist.ProcessGroupGloo.create_default_device()


class FileRendezvous(Rendezvous):
    """The ranks run on one machine: a file for each epoch, and the loopback interface."""

    def __init__(self, path: Path, *, rank: int, ranks: int) -> None:
        """`path` is that of the files, but for the epoch at its end."""
        super().__init__(rank, ranks)
        self._path = path

    def _store(self, epoch: int) -> Store:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return FileStore(f"{self._path}-{epoch}", self.ranks)

    def _hostname(self) -> str:
        return "127.0.0.1"

    def finish(self, epoch: int) -> None:
        """Remove the files."""
        for file in self._path.parent.glob(f"{self._path.name}-*") if self.rank == 0 else ():
            if int(file.name.rpartition("-")[2]) <= epoch:
                file.unlink(missing_ok=True)


class TcpRendezvous(Rendezvous):
    """Rank 0 listens at an address that all ranks know. Nobody is asked who he is: the network
    between the ranks must be a private one.
    """

    def __init__(self, host: str, port: int, *, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._host, self._port = host, port
        self._server: TCPStore | None = None  # rank 0: from the first epoch to its own end

    def _store(self, epoch: int) -> Store:
        store = self._server or self._open()
        if self.rank == 0:
            self._server = store
        return PrefixStore(str(epoch), store)

    def _open(self) -> TCPStore:
        return TCPStore(
            self._host,
            self._port,
            self.ranks,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=DIAL_S),
            wait_for_workers=False,
        )

    def finish(self, epoch: int) -> None:
        """What is left are a few keys of each epoch, which goes with the server."""

    def _hostname(self) -> str:
        """Our address in the network that leads to rank 0: a host may be in several."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)
            family, kind, _, _, address = found[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise RuntimeError(f"{self._host}: {error.strerror}") from error


def make_rendezvous(address: str, *, rank: int, ranks: int) -> Rendezvous:
    """`address` is "tcp://HOST:PORT" or the beginning of a path (see Config.group_address)."""
    scheme, _, rest = address.rpartition("://")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        return TcpRendezvous(host, int(port), rank=rank, ranks=ranks)
    return FileRendezvous(Path(address), rank=rank, ranks=ranks)


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
