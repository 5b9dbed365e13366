"""Waiting for mail: `Inbox` for plain poll loops, `AsyncInbox` for asyncio loops."""

import asyncio
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from deepmesh.wire.link import LinkEvent
from deepmesh.wire.sockets import Dialer, Listener

Endpoint = Listener | Dialer
SLICE_S = 0.01  # of an asyncio loop that one endpoint's mail takes, before others have their turn


class Inbox:
    """One place where everything that a service waits for arrives."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.endpoints: list[Endpoint] = []
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._seen: dict[int, int] = {}
        self._life = threading.RLock()  # a signal handler may come while this thread holds it
        self._closed = False
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> None:
        """Wait for this endpoint, too."""
        self.endpoints.append(endpoint)
        self._seen.clear()

    def wait(self, timeout_s: float) -> list[LinkEvent]:
        """Events of all endpoints: at once if any are there, else after at most `timeout_s`.

        Returns early, also with nothing, on `wake` and when a link's clock needs attention.
        """
        events = self._receive()
        if events or timeout_s <= 0:
            return events
        self._register()
        patience_s = min((e.patience_s for e in self.endpoints), default=1.0)
        self._poller.poll(math.ceil(1000 * min(timeout_s, patience_s)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return self._receive()

    def wake(self) -> None:
        """End a `wait` in progress or the next one. Safe from any thread and signal handler.

        Does nothing after `close`: the descriptor may be another's by then.
        """
        with self._life:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the endpoints, too."""
        with self._life:
            if self._closed:
                return
            self._closed = True
        for endpoint in self.endpoints:
            endpoint.close()
        os.close(self._wake_fd)

    def _receive(self) -> list[LinkEvent]:
        return [event for endpoint in self.endpoints for event in endpoint.receive()]

    def _register(self) -> None:
        """Dialers replace their socket when they dial again: register what is there now."""
        now = {id(endpoint): endpoint.generation for endpoint in self.endpoints}
        if now == self._seen:
            return
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        for endpoint in self.endpoints:
            for socket in endpoint.sockets:
                self._poller.register(socket, zmq.POLLIN)
        self._seen = now


class AsyncInbox:
    """Feeds link events of endpoints to a callback on an asyncio loop.

    What the callback raises reaches the loop's exception handler; the events behind it are
    delivered all the same. However much mail one endpoint has, the loop goes on in between.
    """

    def __init__(
        self,
        on_event: Callable[[Endpoint, LinkEvent], None],
        on_pause: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_pause`: behind the last event that an endpoint has for now, or may deliver in one
        go; what came together can be acted upon together there."""
        self._on_event = on_event
        self._on_pause = on_pause
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endpoints: list[Endpoint] = []
        self._readers: dict[int, list[int]] = {}  # endpoint -> file descriptors
        self._scheduled: set[int] = set()
        self._backlog: dict[int, deque[LinkEvent]] = {}  # endpoint -> received, not delivered
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to read; callbacks run on this loop."""
        self._loop = loop
        for endpoint in self._endpoints:
            self._attach(endpoint)
        self._tick()

    def add(self, endpoint: Endpoint) -> None:
        """Read this endpoint, too."""
        self._endpoints.append(endpoint)
        if self._loop is not None:
            self._attach(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """Stop reading this endpoint and close it."""
        self._endpoints.remove(endpoint)
        self._backlog.pop(id(endpoint), None)
        endpoint.after_send = None
        endpoint.close()

    def close(self) -> None:
        """Stop reading and close the endpoints."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for endpoint in self._endpoints:
            endpoint.after_send = None
            endpoint.close()
        self._endpoints.clear()

    def _attach(self, endpoint: Endpoint) -> None:
        assert self._loop is not None
        fds = [int(socket.getsockopt(zmq.FD)) for socket in endpoint.sockets]  # pyright: ignore[reportArgumentType]
        for fd in fds:
            self._loop.add_reader(fd, self._drain, endpoint)
        self._readers[id(endpoint)] = fds
        endpoint.after_send = lambda: self._soon(endpoint)
        endpoint.before_close = lambda: self._detach(endpoint)
        self._soon(endpoint)

    def _detach(self, endpoint: Endpoint) -> None:
        if self._loop is not None:
            for fd in self._readers.pop(id(endpoint), []):
                self._loop.remove_reader(fd)

    def _soon(self, endpoint: Endpoint) -> None:
        """Look again: the fd is edge-triggered, and a send may have swallowed its edge."""
        if self._loop is not None and id(endpoint) not in self._scheduled:
            self._scheduled.add(id(endpoint))
            self._loop.call_soon(self._drain, endpoint)

    def _drain(self, endpoint: Endpoint) -> None:
        self._scheduled.discard(id(endpoint))
        if endpoint not in self._endpoints:
            return
        backlog = self._backlog.setdefault(id(endpoint), deque())
        backlog.extend(endpoint.receive())
        if id(endpoint) not in self._readers:  # it closed its sockets and dialled again
            self._attach(endpoint)
        if not backlog:
            return
        until_s = time.monotonic() + SLICE_S
        try:
            while backlog:
                self._on_event(endpoint, backlog.popleft())
                if time.monotonic() >= until_s:
                    break
        finally:
            if backlog:  # its time is over, or the callback raised
                self._soon(endpoint)
        self._on_pause()

    def _tick(self) -> None:
        assert self._loop is not None
        try:
            for endpoint in list(self._endpoints):
                self._drain(endpoint)
        finally:
            if not self._closed:
                patience_s = min((e.patience_s for e in self._endpoints), default=1.0)
                self._timer = self._loop.call_later(patience_s, self._tick)
