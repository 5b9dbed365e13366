"""One lean HTTP/1.1 connection that reads server-sent events and stamps those that bring tokens.

A general client costs several times what the server spends on a token, and measured on the same
cores it would be what is measured. So bytes are read here, and JSON only where a glance at them
does not tell.
"""

import asyncio
import re
import time
from typing import Any

import msgspec

MAX_BODY_BYTES = 1 << 20  # of an answer that is no event stream
_LONGEST_EVENT = 16 << 20

# What brings text, in the compact JSON of most servers, and where that says nothing.
_CHAT = b'"content":"'
_EMPTY = b'"content":""'
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)":\s*"(?!")')


class PromptDetails(msgspec.Struct):
    """Where a prompt's tokens came from."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """The part of `usage` that is looked at."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class _Chunk(msgspec.Struct):
    """An event that is not plainly text."""

    usage: Usage | None = None
    error: Any = None  # text or an object, by server
    type: str = ""


class Answer:
    """What came back for one request; times are those of `time.perf_counter`."""

    __slots__ = ("due_s", "end_s", "error", "is_over", "sent_s", "times", "usage")

    def __init__(self, due_s: float) -> None:
        """`due_s`: when it should be sent; its latency counts from there."""
        self.due_s = due_s
        self.sent_s = due_s
        self.end_s = 0.0
        self.times: list[float] = []  # of events that bring text
        self.usage: Usage | None = None
        self.error = ""
        self.is_over = False  # the stream said that it is complete

    @property
    def num_tokens(self) -> int:
        """As the server counts them, else events."""
        if self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        return len(self.times)


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self.is_reusable = False  # open, and nothing is under way
        self.was_silent = True  # not a byte has come for the request that runs
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._begin()

    # ------------------------------------------------------------ the caller's side

    async def ask(self, request: bytes, answer: Answer, timeout_s: float) -> None:
        """Send a request and fill `answer`; whatever goes wrong is its `error`."""
        loop = asyncio.get_running_loop()
        transport = self._transport
        assert transport is not None
        self._begin()
        done = loop.create_future()  # a name of its own: a failure at once takes `_done` away
        self._answer, self._done = answer, done
        self.is_reusable, self.was_silent = False, True
        timer = loop.call_later(timeout_s, self._fail, "timeout")
        answer.sent_s = time.perf_counter()
        if transport.is_closing():
            self._fail("connection closed")
        else:
            transport.write(request)
        try:
            await done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """Hang up; a request that runs ends with an error."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Open. (uvloop's transports are no subclasses of asyncio's.)"""
        self._transport, self.is_reusable = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of a body without a length, or of a request that it cuts."""
        self.is_reusable = False
        if self._answer is None:
            return
        if self._in_body and self._length is None and not self._is_chunked and exc is None:
            self._end()
        else:
            self._fail(f"connection closed ({exc or 'by the server'})")

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        if self._answer is None:
            self.close()  # an answer to nothing
            return
        now, self.was_silent = time.perf_counter(), False
        try:
            if not self._in_body:
                data = self._read_head(data)
                if not self._in_body:
                    return
            if self._is_chunked:
                self._read_chunks(data, now)
            else:
                self._read_plain(data, now)
        except ValueError as error:
            self._fail(f"not HTTP: {error}")

    # ------------------------------------------------------------ HTTP

    def _begin(self) -> None:
        self._in_body = self._is_chunked = self._is_stream = self._keeps = False
        self._status = 0
        self._length: int | None = None  # bytes of the body still due, if the head says so
        self._held = b""  # bytes of an incomplete head or chunk line
        self._left = 0  # bytes of the present chunk still due
        self._rest = b""  # bytes of an incomplete event
        self._body = bytearray()  # of an answer that is no event stream

    def _read_head(self, data: bytes) -> bytes:
        """Look at status line and headers; what follows them."""
        data = self._held + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_BODY_BYTES:
                raise ValueError("headers do not end")
            self._held = data
            return b""
        status_line, *lines = data[:end].split(b"\r\n")
        version, _, status = status_line.partition(b" ")
        if not (version.startswith(b"HTTP/1.") and status[:3].isdigit()):
            raise ValueError(repr(status_line[:40]))
        self._held, self._status = b"", int(status[:3])
        if 100 <= self._status < 200:
            return self._read_head(data[end + 4 :])
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in lines)
        }
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        if b"content-length" in headers:
            self._length = int(headers[b"content-length"])
        is_event_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._is_stream = self._status == 200 and is_event_stream
        has_end = self._is_chunked or self._length is not None
        wish = headers.get(b"connection", b"").lower()
        self._keeps = has_end and wish != b"close" and version == b"HTTP/1.1"
        self._in_body = True
        return data[end + 4 :]

    def _read_plain(self, data: bytes, now: float) -> None:
        if self._length is not None:
            data = data[: self._length]
            self._length -= len(data)
        self._feed(data, now)
        if self._length == 0:
            self._end()

    def _read_chunks(self, data: bytes, now: float) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        at, end = 0, len(data)
        while at < end:
            if self._left > 2:  # a chunk's own bytes; the last two are its line end
                stop = min(at + self._left - 2, end)
                self._feed(data[at:stop], now)
                self._left -= stop - at
                at = stop
                continue
            if self._left:
                stop = min(at + self._left, end)
                self._left -= stop - at
                at = stop
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                self._held = data[at:]
                return
            size = int(data[at:line].partition(b";")[0], 16)
            if not size:
                if data.find(b"\r\n\r\n", line) < 0:  # trailers, or the last line end
                    self._held = data[at:]
                    return
                self._end()
                return
            at, self._left = line + 2, size + 2

    # ------------------------------------------------------------ events

    def _feed(self, data: bytes, now: float) -> None:
        """Bytes of the body."""
        if not self._is_stream:
            self._body += data[: MAX_BODY_BYTES - len(self._body)]
            return
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _LONGEST_EVENT:
            raise ValueError("an event does not end")
        for event in events:
            self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        answer = self._answer
        assert answer is not None
        if (_CHAT in event and _EMPTY not in event) or _TEXT.search(event):
            answer.times.append(now)
        else:
            self._look_at(event, answer)

    def _look_at(self, event: bytes, answer: Answer) -> None:
        """An event without text: the end, an error, the usage."""
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                answer.is_over = True
                continue
            try:
                chunk = msgspec.json.decode(data, type=_Chunk)
            except msgspec.DecodeError:
                continue  # not of a kind that says anything here
            if chunk.error is not None or chunk.type == "error":
                text = data[:200].decode(errors="replace")
                answer.error = answer.error or f"in the stream: {text}"
            if chunk.usage is not None:
                answer.usage = chunk.usage

    # ------------------------------------------------------------ ends

    def _end(self) -> None:
        """The answer is complete."""
        answer = self._answer
        assert answer is not None
        if self._rest.strip() and self._is_stream:
            self._take(self._rest, time.perf_counter())
        if self._status != 200:
            answer.error = f"HTTP {self._status}"
        elif not self._is_stream:
            answer.error = "the answer is no event stream"
        self._finish(answer)
        assert self._transport is not None
        if self._keeps and not self._transport.is_closing():
            self.is_reusable = True
        else:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        if self._answer is None:
            return
        self._answer.error = self._answer.error or reason
        self._finish(self._answer)
        self.close()

    def _finish(self, answer: Answer) -> None:
        answer.end_s = time.perf_counter()
        done, self._answer, self._done = self._done, None, None
        if done is not None and not done.done():
            done.set_result(None)
