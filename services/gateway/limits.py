"""Bounds at the edge: requests open at once, size of a body, bytes of all bodies."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

from starlette.types import Message, Receive

from deepmesh.wire.messages import ErrorCode
from services.gateway.errors import Problem, ProblemError, problem

CLIENT_IDLE_S = 75.0  # longer than the pools of the SDKs keep idle connections
SMALL_BYTES = 64 << 10
LINGER_BYTES = 64 << 20
LINGER_S = 5.0  # how long the rest of a refused body is read and thrown away


class ClientGoneError(Exception):
    """The client closed its connection."""


class Gate:
    """Counts the requests that are open and turns away those beyond `max_requests`."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_open = 0
        self.is_draining = False  # by an operator's order: nothing new
        self.is_ending = False  # the process has been told to end: nothing new, for good

    @property
    def closed_because(self) -> str:
        """Why nothing new is taken; empty: it is."""
        if self.is_ending:
            return "this gateway ends"
        return "drained by an operator" if self.is_draining else ""

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place.

        Raises:
            ProblemError: 429, all places are taken; 503 while it drains.
        """
        if reason := self.closed_because:
            message = f"{reason}; send the request to another one, or again in a moment"
            raise ProblemError(Problem(503, "draining", message))
        if self.num_open >= self._max_requests:
            raise ProblemError(
                problem(
                    ErrorCode.OVERLOADED,
                    f"{self._max_requests} requests are open already; try again in a moment",
                )
            )
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class BodyReader:
    """Reads bodies; holds at most `max_total_bytes` of unfinished ones."""

    def __init__(self, max_body_bytes: int, max_total_bytes: int, idle_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_total_bytes = max(max_total_bytes, max_body_bytes)
        self._idle_s = idle_s
        self._held_bytes = 0

    def check_headers(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse what the headers alone show to be too much.

        Raises:
            ProblemError: 413 by Content-Length, 415 for a compressed body.
        """
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b""):
            message = f"content-encoding {encoding.decode('latin-1')!r} is not supported"
            raise ProblemError(Problem(415, "unsupported_encoding", message, "content-encoding"))
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large()

    def is_small(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the rest of a refused body is not worth closing the connection for."""
        if b"transfer-encoding" in headers:
            return False
        length = headers.get(b"content-length", b"0")
        return length.isdigit() and int(length) <= SMALL_BYTES

    async def read(self, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            ProblemError: 413 as soon as it is too large, 408 when it stalls, 429 when too many
                bodies are being read.
            ClientGoneError: the connection closed before the end.
        """
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            while True:
                message = await self._next(receive)
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk: bytes = message.get("body", b"")
                num_bytes += len(chunk)
                self._held_bytes += len(chunk)
                if num_bytes > self._max_body_bytes:
                    raise self._too_large()
                if self._held_bytes > self._max_total_bytes:
                    raise ProblemError(
                        problem(ErrorCode.OVERLOADED, "too many large bodies are being read")
                    )
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        finally:
            self._held_bytes -= num_bytes

    async def linger(self, receive: Receive) -> None:
        """Throw away the rest of a refused body, within bounds.

        Closing at once would reset the connection, and the client would never see the answer.
        """
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while num_bytes < LINGER_BYTES:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return

    async def _next(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._idle_s):
                return await receive()
        except TimeoutError:
            message = f"nothing more of the body came for {self._idle_s:g} s"
            raise ProblemError(Problem(408, "body_timeout", message)) from None

    def _too_large(self) -> ProblemError:
        message = f"the body is larger than {self._max_body_bytes} bytes"
        return ProblemError(Problem(413, "request_too_large", message))
