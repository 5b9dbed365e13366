"""The state of one forwarded request, shared by the links' side and the client's side."""

import asyncio
from collections.abc import Callable

import msgspec

from deepmesh.wire.messages import ResponseFailed, ResponseFinished, Rid, Submit

WRITE_BYTES = 64 << 10
End = ResponseFinished | ResponseFailed


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one stream and of all together."""

    keepalive_s: float = 10.0
    deadline_s: float = 120.0  # without a tokenizer and without progress
    stuck_s: float = 1200.0  # placed again after a loss, and no sign of it since
    suspect_s: float = 30.0  # a tokenizer lost so soon after it got a request may have died of it
    max_suspect_losses: int = 3  # in a row; then the request is given up
    place_s: float = 10.0  # for a new request while no tokenizer is up
    resume_bytes: int = 64 << 20
    credit_events: int = 128  # a Credit for each event would cost as much as the event
    max_buffer_events: int = 4096  # the tokenizer stops before: its window is smaller
    max_buffer_bytes: int = 16 << 20
    slow_s: float = 60.0  # a write that the client's socket does not take for so long


class Stream:
    """From `Submit` to the end of the answer. `Streams` fills it, `relay` empties it."""

    def __init__(self, submit: Submit, now: float) -> None:
        self.rid: Rid = submit.rid
        self.protocol = submit.protocol
        self.traceparent = submit.traceparent
        self.submit: Submit | None = submit  # None: the body was too large to keep
        self.num_bytes = len(submit.body)
        self.placed = ""  # key of the tokenizer's link
        self.num_placements = 0  # more than one after a loss
        self.placed_at = now  # the last of them
        self.has_moved = False  # something came from there
        self.num_suspect_losses = 0  # in a row: its tokenizer was lost soon, nothing came before
        self.events: list[bytes] = []  # received, not yet taken by the writer
        self.buffered_bytes = 0
        self.num_received = 0  # events from the tokenizer: index of the next one
        self.num_taken = 0  # events that the client's socket has accepted
        self.num_credited = 0  # num_taken as last told to the tokenizer
        self.is_admitted = False  # headers with status 200 may go out
        self.end: End | None = None
        self.is_gone = False  # the client closed its connection
        self.is_abandoned = False  # the client takes nothing; the writer is stopped
        self.is_ping_due = False
        self.progress_at = now
        self.wrote_at = now
        self.write_began_at = 0.0  # 0: no write in progress
        self.writer: asyncio.Task[None] | None = None
        # Takes events on their way in, while the writer waits for some; False: buffer them.
        self.pipe: Callable[[list[bytes]], bool] | None = None
        self.placed_ns = 0
        self.admitted_ns = 0
        self.first_event_ns = 0
        self.ended_ns = 0  # the tokenizer's end came
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_started(self) -> bool:
        """Whether there is something to answer, or nobody left to answer to."""
        return self.is_admitted or self.end is not None or self.is_gone

    @property
    def is_streaming(self) -> bool:
        """Whether the answer is an event stream; told by what came back."""
        return self.is_admitted

    def is_suspect(self, limits: StreamLimits, now: float) -> bool:
        """Its tokenizer is lost: whether it keeps killing them, as far as can be told from here.

        A plain answer shows no progress, and a mate of the culprit is lost along with it: hence
        several losses in a row, each soon after the request was placed.
        """
        was_soon = now - self.placed_at < limits.suspect_s
        self.num_suspect_losses = self.num_suspect_losses + 1 if was_soon else 0
        if self.has_moved:
            self.num_suspect_losses = 0
        return self.num_suspect_losses >= limits.max_suspect_losses

    def is_stuck(self, limits: StreamLimits, now: float) -> bool:
        """Whether nothing came of it for long since it was moved to another tokenizer."""
        since = max(self.progress_at, self.placed_at)
        return self.num_placements > 1 and now - since >= limits.stuck_s

    async def changed(self) -> None:
        """Wait for the next change. No change is missed between a look and this call."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Something changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> tuple[bytes, int]:
        """Buffered events as one piece of bounded size, and how many they are.

        A slow client's bytes stay in this buffer, where they count, not in the socket's.
        """
        num_bytes = num_events = 0
        for event in self.events:
            if num_events and num_bytes + len(event) > WRITE_BYTES:
                break
            num_bytes += len(event)
            num_events += 1
        taken, self.events = self.events[:num_events], self.events[num_events:]
        self.buffered_bytes -= num_bytes
        return (taken[0] if num_events == 1 else b"".join(taken)), num_events
