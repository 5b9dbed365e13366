"""The state of one forwarded request, shared by the links' side and the client's side."""

import asyncio

from deepmesh.wire.messages import ResponseFailed, ResponseFinished, Rid, Submit

WRITE_BYTES = 64 << 10
End = ResponseFinished | ResponseFailed


class Stream:
    """From `Submit` to the end of the answer. `Streams` fills it, `relay` empties it."""

    def __init__(self, submit: Submit, now: float) -> None:
        self.rid: Rid = submit.rid
        self.protocol = submit.protocol
        self.traceparent = submit.traceparent
        self.submit: Submit | None = submit  # None: the body was too large to keep
        self.placed = ""  # key of the tokenizer's link
        self.num_placements = 0  # more than one after a loss
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
        self.placed_ns = 0
        self.admitted_ns = 0
        self.first_event_ns = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_started(self) -> bool:
        """Whether there is something to answer, or nobody left to answer to."""
        return self.is_admitted or self.end is not None or self.is_gone

    @property
    def is_streaming(self) -> bool:
        """Whether the answer is an event stream; told by what came back."""
        return self.is_admitted

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
