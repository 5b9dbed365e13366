"""Names of hosts, looked up beside the loops: a resolver may take ten seconds to say no.

libzmq would look names up on its one I/O thread, and hold up every other link of the process.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable

from deepmesh.addresses import is_name, split_tcp

ASK_S = 1.0  # a name that is not there is asked for again so often
_MAX_OPEN = 10  # questions without an answer yet

_log = logging.getLogger(__name__)


def resolve(host: str) -> list[str]:
    """The IPv4 addresses of a host; may take long.

    Raises:
        OSError: it is not known.
    """
    answers = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


class Lookup:
    """What tcp://NAME:PORT means in numbers, as far as known."""

    def __init__(self, address: str, resolve: Callable[[str], list[str]] = resolve) -> None:
        self._host, self._port = split_tcp(address)
        self._resolve = resolve
        self._lock = threading.Lock()
        self._found: list[str] = []  # numbers of the latest answer
        self._num_open = 0
        self._next_ask = 0.0
        self._is_unknown = False

    @classmethod
    def of(cls, address: str) -> "Lookup | None":
        """None for an address that is no name of another host."""
        return cls(address) if is_name(address) else None

    def ask(self) -> None:
        """Begin to look the name up, unless that has just been done."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_ask or self._num_open >= _MAX_OPEN:
                return
            self._next_ask = now + ASK_S
            self._num_open += 1
        # Beside questions that are still open: a host that is back is found at once that way.
        threading.Thread(target=self._look_up, name=f"look up {self._host}", daemon=True).start()

    def all(self) -> list[str]:
        """The addresses of the latest answer in numbers, none before the first."""
        with self._lock:
            return [f"tcp://{number}:{self._port}" for number in self._found]

    def numeric(self, current: str) -> str:
        """An address in numbers, `current` if that is still one of the host's; "" before any."""
        addresses = self.all()
        return current if current in addresses or not addresses else addresses[0]

    def _look_up(self) -> None:
        try:
            numbers, problem = self._resolve(self._host), ""
        except OSError as error:
            numbers, problem = [], str(error.strerror)
        with self._lock:
            self._num_open -= 1
            is_news = bool(problem) and not self._is_unknown
            self._is_unknown = bool(problem)
            self._found = numbers or self._found  # the last that is known may well come back
        if is_news:
            _log.warning("%s: %s", self._host, problem)
