"""The allow-list: CURVE alone accepts any client key, so libzmq asks here about each connection.

It asks over ZAP (rfc.zeromq.org/spec/27), at one inproc address of the process. A thread of its
own answers: a loop that computes for a while keeps nobody waiting in a handshake.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import cast

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
QUIET_S = 60.0  # the same refusal is logged once in so long
_MAX_REMEMBERED = 1000

_log = logging.getLogger(__name__)


class Repeats:
    """Says of a line whether it is worth another one: who is refused tries again and again."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def is_news(self, line: str) -> bool:
        """True once every QUIET_S for the same line."""
        now = time.monotonic()
        if now - self._said.get(line, -QUIET_S) < QUIET_S:
            return False
        if len(self._said) >= _MAX_REMEMBERED:
            self._said.clear()
        self._said[line] = now
        return True


class _Door:
    """The thread that answers for all listeners of this process, while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lists: dict[str, Mapping[bytes, str]] = {}  # ZAP domain -> public key -> service
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._num_opened = 0
        self._repeats = Repeats()

    def open(self, name: str, clients: Mapping[bytes, str]) -> str:
        """Let these keys in, each with the service that it belongs to, and nobody else.

        Returns:
            The ZAP domain that the listener has to set before it binds.
        """
        with self._lock:
            self._num_opened += 1
            domain = f"{name}/{self._num_opened}"
            if self._thread is None:
                context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
                socket = context.socket(zmq.REP)  # bound before any listener is
                socket.bind(ENDPOINT)
                self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
                self._thread = threading.Thread(
                    target=self._answer, args=(socket, self._wake_fd), name="zap", daemon=True
                )
                self._thread.start()
            self._lists[domain] = clients
            return domain

    def shut(self, domain: str) -> None:
        """The listener of this domain is closed; with the last one the thread ends."""
        with self._lock:
            self._lists.pop(domain, None)
            if self._lists or self._thread is None:
                return
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            os.close(self._wake_fd)
            self._thread = None

    def _answer(self, socket: "zmq.Socket[bytes]", wake_fd: int) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake_fd, zmq.POLLIN)
        try:
            while wake_fd not in dict(poller.poll()):
                status, text, user = self._judge(request := socket.recv_multipart())
                socket.send_multipart([VERSION, request[1], status, text, user, b""])
        finally:
            socket.unbind(ENDPOINT)  # close alone frees the address later, in another thread
            socket.close(linger=0)

    def _judge(self, request: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Status, text and user id for [version, id, domain, address, identity, mechanism, key]."""
        domain, host = request[2].decode(), request[3].decode()
        key = request[6] if len(request) > 6 and request[5] == b"CURVE" else b""
        clients = self._lists.get(domain, {})
        service = clients.get(key)
        if service is not None:
            return b"200", b"OK", service.encode()
        name = domain.rpartition("/")[0]
        line = f"{name}: refused a link from {host}: its key is not on the allow-list"
        if self._repeats.is_news(line):
            wanted = ", ".join(sorted(set(clients.values()))) or "nobody"
            _log.warning("%s (key %s; expected: %s)", line, z85.encode(key).decode(), wanted)
        return b"400", b"key is not on the allow-list", b""


door = _Door()  # libzmq knows one such address in a process
