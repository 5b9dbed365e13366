"""Runs `Executor.load` beside the service's loop, so that heartbeats go on meanwhile."""

import threading
from collections.abc import Callable

from deepmesh.wire.messages import Capacity, Load


class Loader:
    """One load at a time; an order that comes meanwhile waits, a later one replaces it."""

    def __init__(self, load: Callable[[Load], Capacity], wake: Callable[[], None]) -> None:
        self._load = load
        self._wake = wake
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next: Load | None = None
        self._result: Capacity | None = None
        self._error: Exception | None = None

    def order(self, order: Load) -> None:
        """Carry out this order; the result of an earlier one is dropped."""
        with self._lock:
            self._result, self._next = None, order
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
                self._thread.start()

    def take(self) -> Capacity | None:
        """The result of the latest order, once.

        Raises:
            Exception: what loading raised.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            result, self._result = self._result, None
            return result

    def _run(self) -> None:
        while True:
            with self._lock:
                order, self._next = self._next, None
                if order is None:
                    self._thread = None
                    break
            try:
                result = self._load(order)
            except Exception as error:  # handed to the service's loop, which ends with it
                with self._lock:
                    self._error, self._thread = error, None
                break
            with self._lock:
                if self._next is None:
                    self._result = result
        self._wake()
