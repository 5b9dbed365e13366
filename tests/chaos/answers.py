"""One streamed answer as a client sees it: asked, read at the client's pace, compared."""

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools
import msgspec

from tests.chaos.requests import Request

VARIABLE = ("id", "created", "usage")  # what two runs of one request may differ in
PATIENCE_S = 60.0  # without a byte; a stream that is alive has comments every ten
_RECEIVE_BYTES = 1 << 16
_RESETS = (ConnectionError, asyncio.IncompleteReadError, OSError)


class Cut(Exception):
    """The connection ended before the answer did."""


class Refused(Exception):
    """An error status, or an error in place of the rest of the stream."""

    def __init__(self, status: int, text: str, *, retry_after_s: float, has_begun: bool) -> None:
        super().__init__(f"{status} {text}")
        self.status, self.retry_after_s = status, retry_after_s
        # A busy mesh says so before the first token, and when to come back.
        self.may_be_asked_again = status in (429, 503) and retry_after_s > 0 and not has_begun


class Answer:
    """What came of one request."""

    def __init__(self, index: int) -> None:
        self.index = index  # of the request
        self.events: list[bytes] = []  # as they came
        self.times: list[float] = []  # monotonic
        self.num_ends = 0
        self.is_over = False
        self.error = ""  # what the mesh said in place of the rest

    @property
    def longest_gap_s(self) -> float:
        """Between two events."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def take(self, event: bytes) -> None:
        """One server-sent event."""
        if not event.startswith(b"data: "):
            return  # a comment that keeps the connection open
        if event == b"data: [DONE]":
            self.num_ends += 1
            return
        if event.startswith(b'data: {"error"'):
            self.error = event.decode()[6:]
            return
        self.events.append(event)
        self.times.append(time.monotonic())

    def difference(self, right: "Answer", *, whole: bool) -> str:
        """The first event that differs from the right answer, in words; empty: none."""
        if whole and (self.num_ends, len(self.events)) != (1, len(right.events)):
            counts = f"{len(self.events)} events, {self.num_ends} ends"
            return f"{counts} instead of {len(right.events)}, 1; last {self.events[-1:]!r}"
        stamps: set[object] = set()
        for number, (mine, theirs) in enumerate(zip(self.events, right.events, strict=False)):
            ours = _decoded(mine)
            stamps.add((ours.pop("id"), ours.pop("created")))
            expected = {k: v for k, v in _decoded(theirs).items() if k not in VARIABLE}
            if {k: v for k, v in ours.items() if k not in VARIABLE} != expected:
                return f"event {number} is {mine.decode()}, not {theirs.decode()}"
        if len(stamps) > 1:
            return f"ids or times of creation within one stream: {stamps}"
        return ""

    @property
    def created_s(self) -> int:
        """When the mesh thinks that it was asked, s since the epoch."""
        found = _decoded(self.events[0])["created"]
        assert isinstance(found, int)
        return found


def _decoded(event: bytes) -> dict[str, object]:
    return msgspec.json.decode(event[6:], type=dict[str, object])


class _Response:
    """Callbacks of httptools."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self.headers: dict[bytes, bytes] = {}
        self.status = 0
        self.is_complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if self.status == 200:
            for event in events:
                self._answer.take(event)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def check(self) -> None:
        """Refused: it was."""
        if self.status != 200:
            after_s = float(self.headers.get(b"retry-after", b"0"))
            text = self._rest.decode(errors="replace")[:300]
            raise Refused(self.status, text, retry_after_s=after_s, has_begun=False)
        if self._answer.error:
            raise Refused(0, self._answer.error, retry_after_s=0.0, has_begun=True)
        if not self._answer.num_ends:
            raise Cut("the stream ended without [DONE]")


async def ask(
    url: str, request: Request, answer: Answer, *, pace: Callable[[int], float] | None = None
) -> None:
    """Send it and read the answer to its end.

    Args:
        pace: bytes of one read -> how long to wait before reading on, s. None: not at all.

    Raises:
        Cut: the connection was closed, or nothing came for PATIENCE_S.
        Refused: the mesh said no.
    """
    where = urlsplit(url)
    body = msgspec.json.encode({**request.body, "stream": True})
    head = f"POST {request.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
    except OSError as error:
        raise Cut(f"cannot connect: {error}") from error
    response = _Response(answer)
    try:
        writer.write(head.encode() + body)
        while not response.is_complete:
            data = await asyncio.wait_for(reader.read(_RECEIVE_BYTES), PATIENCE_S)
            if not data:
                raise Cut("closed")
            response.parser.feed_data(data)
            if pace is not None:
                await asyncio.sleep(pace(len(data)))
    except TimeoutError as error:
        raise Cut(f"nothing came for {PATIENCE_S:g} s") from error
    except _RESETS as error:
        raise Cut(repr(error)) from error
    finally:
        answer.is_over = True
        writer.close()
    response.check()
