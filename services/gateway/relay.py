"""The client's side of one forwarded request: writes headers, events, pings and the end."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Message, Receive, Send

from deepmesh.wire.messages import ResponseFailed, ResponseFinished
from services.gateway import errors
from services.gateway.arrival import Arrival
from services.gateway.errors import Problem
from services.gateway.stream import WRITE_BYTES, Stream
from services.gateway.streams import Streams

CLIENT_GONE = 499  # nginx's status for it; only in metrics and traces

_JSON_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PING = b": ping\n\n"
_MESSAGES_PING = b'event: ping\ndata: {"type": "ping"}\n\n'

OnWrite = Callable[[float, int], None]  # clock, events written: for TTFT and ITL


async def send_plain(
    send: Send,
    status: int,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = _JSON_HEADERS,
    *,
    closes: bool = False,
) -> None:
    """A whole answer. `closes`: the connection ends with it, and one last empty write is due."""
    all_headers = [*headers, (b"content-length", str(len(body)).encode())]
    if closes:
        all_headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body, "more_body": closes})


async def send_problem(
    send: Send, problem: Problem, arrival: Arrival, *, closes: bool = False
) -> None:
    """A whole answer that says what is wrong, in the caller's protocol shape."""
    headers = list(_JSON_HEADERS)
    if seconds := errors.retry_after(problem):
        headers.append((b"retry-after", seconds.encode()))
    body = errors.body(problem, arrival.shape, arrival.request_id)
    await send_plain(send, problem.status, body, headers, closes=closes)


class Relay:
    """Carries one answer from its `Stream` to the client's socket."""

    def __init__(
        self,
        streams: Streams,
        stream: Stream,
        arrival: Arrival,
        send: Send,
        *,
        on_write: OnWrite,
        abort: Callable[[], None],
        piece: Callable[[bytes], bool],
    ) -> None:
        """`abort`, `piece`: see `protocol.py`."""
        self._streams = streams
        self._stream = stream
        self._arrival = arrival
        self._send = send
        self._on_write = on_write
        self._abort = abort
        self._piece = piece
        self._is_messages = stream.protocol == "messages"

    async def run(self, receive: Receive) -> None:
        """Until the answer is complete or the client is gone; either way the stream is closed."""
        stream = self._stream
        stream.writer = asyncio.current_task()
        watcher = asyncio.create_task(self._watch(receive))
        try:
            while not stream.has_started:
                await stream.changed()
            if stream.is_streaming:
                await self._stream_out()
            elif not stream.is_gone:
                await self._plain_out()
        except asyncio.CancelledError:
            if not stream.is_abandoned:
                raise  # the server shuts down
            self._abort()  # a mere close would wait for the full socket
            await watcher
        finally:
            watcher.cancel()
            self._streams.close(stream)

    async def _watch(self, receive: Receive) -> None:
        """A client that hangs up is noticed here, whatever the writer waits for."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._streams.close(self._stream)

    async def _plain_out(self) -> None:
        match self._stream.end:
            case ResponseFinished(status=status, body=body):
                await send_plain(self._put, status, body)
            case ResponseFailed() as failed:
                await send_problem(self._put, errors.problem_of(failed), self._arrival)
            case None:
                raise AssertionError("a stream has started without an answer")

    async def _stream_out(self) -> None:
        stream = self._stream
        await self._put({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        is_last = False
        while not (stream.is_gone or is_last):
            if stream.events:
                data, num_events = stream.take()
                is_last = stream.end is not None and not stream.events
                await self._write(data + self._last_words() if is_last else data, is_last=is_last)
                self._streams.taken(stream, num_events)
                self._on_write(stream.wrote_at, num_events)
            elif stream.end is not None:
                is_last = True
                await self._write(self._last_words(), is_last=True)
            elif stream.is_ping_due:
                await self._write(_MESSAGES_PING if self._is_messages else _PING, is_last=False)
            else:
                stream.pipe = self._pipe
                try:
                    await stream.changed()
                finally:
                    stream.pipe = None

    def _pipe(self, events: list[bytes]) -> bool:
        """Write events as they come in, without waking this task: see `Stream.pipe`."""
        data = events[0] if len(events) == 1 else b"".join(events)
        if len(data) > WRITE_BYTES or not self._piece(data):
            return False
        self._streams.end_write(self._stream)
        self._streams.taken(self._stream, len(events))
        self._on_write(self._stream.wrote_at, len(events))
        return True

    async def _write(self, data: bytes, *, is_last: bool) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _put(self, message: Message) -> None:
        """`send` waits while the socket's buffer is full; `Streams.sweep` bounds how long."""
        self._streams.begin_write(self._stream)
        await self._send(message)
        self._streams.end_write(self._stream)

    def _last_words(self) -> bytes:
        """Nothing after a good end; the failure, in the protocol's form, after a bad one."""
        end = self._stream.end
        if not isinstance(end, ResponseFailed):
            return b""
        return errors.event(
            errors.problem_of(end),
            self._stream.protocol,
            self._arrival.request_id,
            self._arrival.first_number + self._stream.num_received,
        )
