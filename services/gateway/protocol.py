"""uvicorn's HTTP protocol with what it lacks: bounded headers, and a way to cut a connection."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 << 10
MAX_PIPELINED = 8  # requests behind the one that runs; beyond it the connection is not read
ABORT = "deepmesh.abort"  # key in the scope: cuts the connection, unsent bytes are lost
PIECE = "deepmesh.piece"  # key in the scope: see `piece_writer`
_NO_LINGER = struct.pack("ii", 1, 0)
_VANISHED_S = 60  # a host that acknowledges nothing for so long is gone


def piece_writer(cycle: RequestResponseCycle) -> Callable[[bytes], bool]:
    """Writes pieces of an answer past the layers of the application, which cost as much as the
    write itself. It says False, and writes nothing, where `send` would wait or do more: before
    the headers, behind the end, to a full socket or to a client that is gone."""

    def write(data: bytes) -> bool:
        if (
            not cycle.chunked_encoding
            or cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or cycle.transport.is_closing()
        ):
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


class EdgeProtocol(HttpToolsProtocol):
    """One client connection."""

    _in_headers = True
    _running: RequestResponseCycle | None = None
    _num_complete = 0
    _num_header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let the kernel notice a client that vanished without a word."""
        super().connection_made(transport)
        self._arm()
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is None:
            return
        with contextlib.suppress(OSError, AttributeError):  # options that only Linux has
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_S // 2)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED_S // 6)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_S * 1000)

    def data_received(self, data: bytes) -> None:
        """Refuse headers that do not end, in size or in time."""
        were_open, num_complete = self._in_headers, self._num_complete
        super().data_received(data)
        if not were_open or self._num_complete > num_complete or self.transport.is_closing():
            return
        self._num_header_bytes += len(data)  # headers all through
        self._arm()
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.send_400_response(f"Headers are larger than {MAX_HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A new request on this connection."""
        super().on_message_begin()
        self.scope[ABORT] = self._cut  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """The body may be larger; `BodyReader` bounds it."""
        self._in_headers = False
        self._disarm()
        self._num_complete += 1
        self._num_header_bytes = 0
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # who does not read does not see the client go

    def on_message_complete(self) -> None:
        """Whatever comes next is another request."""
        self._in_headers = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The timer would keep the connection's memory; the request that runs must hear of it."""
        self._disarm()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells the last request that came only
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.scope[PIECE] = piece_writer(cycle)  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app)

    def _arm(self) -> None:
        """Headers that have begun, or the first ones, must be complete in time."""
        if self._header_timer is None:
            seconds = self.timeout_keep_alive
            self._header_timer = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cut(self) -> None:
        """Close without lingering: what the kernel still holds for this client is dropped, too."""
        raw: socket.socket | None = self.transport.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()
