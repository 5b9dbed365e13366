"""Stands between services on unix sockets and mistreats the messages of their links on request.

`python -m tests.chaos.proxy CONTROL FRONT=BACK…`: paths; orders (`mischief.Order`, JSON lines) at
CONTROL, each answered with a `mischief.State`. Everything is forwarded byte for byte, the end of a
connection, too: what is not asked for does not happen.
"""

import asyncio
import sys
import time
from functools import partial
from typing import cast

import msgspec
import uvloop

from tests.chaos.mischief import CARRIED_OUT, Direction, Mischief, Order, State
from tests.chaos.zmtp import Splitter

FRESH_S = 1.5  # of a link that is up: there are two heartbeats a second


class Side(asyncio.Protocol):
    """One of the two sockets of a connection; what it reads goes to `other`."""

    def __init__(self, line: "Line") -> None:
        self._line, self.other = line, None
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()  # to be written once it is connected
        self._splitter, self._way = Splitter(), Direction()
        self._is_full = False  # the other side's socket
        self._is_paused = False
        self.is_closed = False
        self.spoke_s = 0.0  # monotonic: its last message

    other: "Side | None"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but are no subclasses
        self._transport = made = cast("asyncio.Transport", transport)
        self._line.sides.add(self)
        if self._early:
            made.write(bytes(self._early))
            self._early.clear()
        if self.other is None:
            self._line.dialled(self)
        self.flow()

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        for unit in self._splitter.feed(data):
            self.spoke_s = now_s if unit.is_message else self.spoke_s
            for sending in self._line.mischief.treat(unit, self._way, now_s):
                if sending.late_s > 0:
                    loop = asyncio.get_running_loop()
                    loop.call_later(sending.late_s, self._send, sending.data)
                else:
                    self._send(sending.data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._line.sides.discard(self)
        if self.other is not None:
            wait_s = max(0.0, self._way.not_before_s - time.monotonic())
            asyncio.get_running_loop().call_later(wait_s, self.other.close)

    def pause_writing(self) -> None:
        self._throttle(is_full=True)

    def resume_writing(self) -> None:
        self._throttle(is_full=False)

    def flow(self) -> None:
        """Read, unless the line is held or the other side takes no more."""
        wants_pause = self._is_full or self._line.is_held
        if self._transport is None or self.is_closed or wants_pause == self._is_paused:
            return
        self._is_paused = wants_pause
        if wants_pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def hears(self, since_s: float) -> bool:
        """Whether the other side has said something since."""
        return self.other is not None and self.other.spoke_s > since_s

    def close(self) -> None:
        """What was written goes out first."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    def write(self, data: bytes) -> None:
        """Now, or as soon as it is connected."""
        if self._transport is None:
            self._early += data
        elif not self.is_closed:
            self._transport.write(data)

    def _throttle(self, *, is_full: bool) -> None:
        if self.other is not None:
            self.other._is_full = is_full
            self.other.flow()

    def _send(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)


class Line:
    """One address, and all connections to it."""

    def __init__(self, front: str, back: str) -> None:
        self._front, self._back = front, back
        self.mischief = Mischief()
        self.sides: set[Side] = set()
        self.is_held = False
        self._waiting: list[Side] = []  # dialled in while the line was held
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Take connections."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Side(self), self._front)

    def num_links(self) -> int:
        """Connections on which both sides have said something lately, as links do."""
        since_s = time.monotonic() - FRESH_S
        return sum(side.spoke_s > since_s for side in self.sides if side.hears(since_s)) // 2

    def order(self, order: Order) -> None:
        """Carry it out from now on."""
        self.mischief.order(order, time.monotonic())
        if order.kind in ("hold", "break"):
            self._hold(is_held=True)
            loop = asyncio.get_running_loop()
            loop.call_later(order.s, self._heal, order.kind == "break")

    def dialled(self, side: Side) -> None:
        """A new connection: go on to the back, once the line is whole."""
        side.other = back = Side(self)  # keeps what comes before it is connected
        back.other = side
        if self.is_held:
            self._waiting.append(side)
        else:
            self._join(side, back)

    def _join(self, side: Side, back: Side) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(side, back))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _heal(self, breaks: bool) -> None:
        if breaks:
            for side in list(self.sides):
                side.abort()
        self._hold(is_held=False)
        waiting, self._waiting = self._waiting, []
        for side in waiting:
            if side.other is not None and not side.is_closed:
                self._join(side, side.other)

    def _hold(self, *, is_held: bool) -> None:
        self.is_held = is_held
        for side in list(self.sides):
            side.flow()

    async def _connect(self, side: Side, back: Side) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: back, self._back)
        except OSError:  # nobody listens there now
            side.abort()
            return
        if side.is_closed:
            back.abort()


async def control(lines: list[Line], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):  # noqa: ANN201
    """Orders of one connection."""
    decoder = msgspec.json.Decoder(Order)
    while text := await reader.readline():
        order = decoder.decode(text)
        chosen = lines if order.line < 0 else [lines[order.line]]
        if order.kind != "ask":
            for line in chosen:
                line.order(order)
        left = sum(line.mischief.left[kind] for line in lines for kind in CARRIED_OUT)
        num_links = sum(line.num_links() for line in lines)
        writer.write(msgspec.json.encode(State(left, num_links)) + b"\n")
        await writer.drain()
    writer.close()


async def serve(argv: list[str]) -> None:
    """Until killed."""
    lines = [Line(*pair.split("=", 1)) for pair in argv[1:]]
    for line in lines:
        await line.listen()
    server = await asyncio.start_unix_server(partial(control, lines), argv[0])
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
