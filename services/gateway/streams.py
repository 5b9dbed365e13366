"""Owner of the open client connections: places requests, buffers events, survives lost tokenizers.

Everything here runs on one event loop, and nothing blocks: mail from tokenizers fills a stream's
buffer, the task of its connection (`relay.py`) empties it.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from deepmesh.wire.link import LinkEvent, Mail, Peer, PeerDown, PeerUp
from deepmesh.wire.messages import (
    DELTA_ADMITTED,
    Cancel,
    Credit,
    Delta,
    DeltaBatch,
    ErrorCode,
    ResponseFailed,
    ResponseFinished,
    Rid,
    ServiceStats,
    Submit,
)
from services.gateway.stream import End, Stream, StreamLimits
from services.gateway.tokenizers import Tokenizers

_log = logging.getLogger(__name__)


class Streams:
    """All open requests, by rid; each ends exactly once."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        limits: StreamLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_hop: Callable[[Mail, str], None] = lambda mail, traceparent: None,
    ) -> None:
        self._tokenizers = tokenizers
        self._limits = limits
        self._clock = clock
        self._on_hop = on_hop
        self._open: dict[Rid, Stream] = {}
        self._kept_bytes = 0
        self._unsent_cancels: dict[Rid, float] = {}
        self.num_resubmitted = 0
        self.num_stray_messages = 0

    def __len__(self) -> int:
        return len(self._open)

    # ------------------------------------------------------------ the client's side

    def open(self, submit: Submit) -> Stream:
        """Begin a request and place it, at once if a tokenizer is up."""
        stream = Stream(submit, self._clock())
        self._open[stream.rid] = stream
        self._place(stream)
        if self._kept_bytes + len(submit.body) <= self._limits.resume_bytes:
            self._kept_bytes += len(submit.body)
            return stream
        stream.submit = None
        if not stream.placed:
            detail = "no tokenizer is up, and too many bodies wait already"
            self._end(stream, ResponseFailed(stream.rid, ErrorCode.OVERLOADED, detail))
        return stream

    def close(self, stream: Stream) -> None:
        """The connection is done with this request; one that still runs is cancelled."""
        if self._open.pop(stream.rid, None) is None:
            return
        stream.is_gone = True
        if stream.end is None:
            cancel = Cancel(stream.rid)
            if stream.placed and not self._tokenizers.send(stream.placed, cancel):
                self._unsent_cancels[stream.rid] = self._clock()
            self._settle(stream)
        stream.wake()

    def begin_write(self, stream: Stream) -> None:
        """A write to the client's socket begins; the socket may be full."""
        stream.write_began_at = self._clock()

    def end_write(self, stream: Stream) -> None:
        """The socket has accepted it, or a piece that needed no wait."""
        stream.write_began_at = 0.0
        stream.wrote_at = self._clock()
        stream.is_ping_due = False

    def taken(self, stream: Stream, num_events: int) -> None:
        """The client's socket has accepted this many more events."""
        stream.num_taken += num_events
        if stream.placed and stream.num_taken - stream.num_credited >= self._limits.credit_events:
            stream.num_credited = stream.num_taken
            self._tokenizers.send(stream.placed, Credit(stream.rid, stream.num_taken))

    # ------------------------------------------------------------ the tokenizers' side

    def handle(self, event: LinkEvent) -> None:
        """Mail from a tokenizer, or a link that came or went."""
        match event:
            case Mail(message=DeltaBatch(deltas=deltas)):
                now = self._clock()
                for delta in deltas:
                    self._take_delta(event, delta, now)
            case Mail(message=ResponseFinished() | ResponseFailed() as end):
                self._take_end(event, end)
            case PeerUp(peer=peer):
                _log.info("%s is up", peer.name)
                self._resend_cancels(peer.key)
                for stream in self._unplaced():
                    self._place(stream)
            case PeerDown(peer=peer, reason=reason):
                _log.warning("%s is lost: %s", peer.name, reason)
                for stream in self._running():
                    if stream.placed == peer.key:
                        self._lost(stream, peer.name, has_stopped=_said_that_it_stops(peer))
            case Mail(message=message):
                self.num_stray_messages += 1
                _log.warning("%s sent a %s", event.peer.name, type(message).__name__)

    def sweep(self) -> None:
        """What time alone makes due; call it a few times per `keepalive_s`."""
        now = self._clock()
        for stream in self._unplaced():
            self._place(stream)
        for stream in self._running():
            self._check_deadline(stream, now)
        for stream in list(self._open.values()):
            if now - stream.wrote_at >= self._limits.keepalive_s and not stream.write_began_at:
                stream.is_ping_due = True
                stream.wake()
            if stream.write_began_at and now - stream.write_began_at >= self._limits.slow_s:
                self._abandon(stream)
        for rid, since in list(self._unsent_cancels.items()):
            if now - since > self._limits.deadline_s:
                del self._unsent_cancels[rid]

    def fail_all(self, code: ErrorCode, detail: str) -> None:
        """End all requests now (shutdown)."""
        for stream in self._running():
            self._fail(stream, code, detail)

    # ------------------------------------------------------------ inside

    def _running(self) -> list[Stream]:
        return [stream for stream in self._open.values() if stream.end is None]

    def _unplaced(self) -> list[Stream]:
        return [stream for stream in self._running() if not stream.placed]

    def _place(self, stream: Stream) -> None:
        if stream.submit is None:
            return
        submit = msgspec.structs.replace(stream.submit, next_event=stream.num_received)
        stream.placed = self._tokenizers.place(submit)
        if not stream.placed:
            return
        if stream.num_placements:
            self.num_resubmitted += 1
        else:
            stream.placed_ns = time.time_ns()
        stream.num_placements += 1
        stream.placed_at = self._clock()
        stream.has_moved = False
        stream.num_credited = 0  # the new instance has not heard of any

    def _lost(self, stream: Stream, name: str, *, has_stopped: bool) -> None:
        """The tokenizer of this request is gone; go on with another, or with it when back.

        Args:
            has_stopped: on somebody's order, so no request is to blame.
        """
        self._tokenizers.release(stream.placed)
        stream.placed = ""
        if stream.submit is None:
            detail = f"{name} was lost, and this request's body was too large to be kept"
            self._end(stream, ResponseFailed(stream.rid, ErrorCode.ENGINE_RESTARTED, detail))
            return
        if not has_stopped and stream.is_suspect(self._limits, self._clock()):
            detail = (
                f"{stream.num_suspect_losses} tokenizers in a row were lost soon after they got "
                "this request; it is not tried again"
            )
            _log.error("%s: %s", stream.rid.hex(), detail)
            self._end(stream, ResponseFailed(stream.rid, ErrorCode.ENGINE_RESTARTED, detail))
            return
        self._place(stream)

    def _check_deadline(self, stream: Stream, now: float) -> None:
        """Waiting for a tokenizer is bounded; so is waiting at one, after a loss.

        Tokenizer and scheduler bound a request that they have; a plain answer shows no progress
        while it runs. So only a request that was moved is bounded here, and generously.
        """
        limits = self._limits
        if stream.placed:
            if stream.is_stuck(limits, now):
                detail = f"nothing came of it for {limits.stuck_s:g} s after its tokenizer was lost"
                self._fail(stream, ErrorCode.DEADLINE, detail)
            return
        is_new = not stream.num_placements
        limit_s = min(limits.place_s, limits.deadline_s) if is_new else limits.deadline_s
        if now - stream.progress_at >= limit_s:
            detail = f"no tokenizer has been up for {limit_s:g} s"
            self._end(stream, ResponseFailed(stream.rid, ErrorCode.DEADLINE, detail))

    def _find(self, mail: Mail, rid: Rid) -> Stream | None:
        """The stream that this mail belongs to, unless it comes from a former tokenizer."""
        stream = self._open.get(rid)
        return stream if stream is not None and stream.placed == mail.peer.key else None

    def _take_delta(self, mail: Mail, delta: Delta, now: float) -> None:
        stream = self._find(mail, delta.rid)
        if stream is None:
            self.num_stray_messages += 1
            if delta.rid not in self._open:  # this tokenizer does not know that it ended
                self._tokenizers.send(mail.peer.key, Cancel(delta.rid))
            return
        is_news = bool(delta.flags & DELTA_ADMITTED) and not stream.is_admitted
        if is_news:
            stream.is_admitted = True
            stream.admitted_ns = mail.received_ns
        self._take_events(mail, stream, delta.first_event, delta.events, now)
        if is_news:
            self._hop(mail, stream)

    def _take_events(
        self, mail: Mail, stream: Stream, first_event: int, events: list[bytes], now: float
    ) -> None:
        """Pass on what is new, or append it; ends the stream when that cannot be."""
        stream.progress_at = now
        stream.has_moved = True
        num_known = stream.num_received - first_event
        if num_known < 0 and events:
            detail = f"events {stream.num_received} to {first_event - 1} never came"
            self._fail(stream, ErrorCode.INTERNAL, detail)
            return
        fresh = events[num_known:] if num_known > 0 else events
        if fresh:
            is_first = not stream.first_event_ns
            stream.num_received += len(fresh)
            if is_first:
                stream.first_event_ns = mail.received_ns
                stream.is_admitted = True
            is_out = stream.pipe is not None and not stream.events and stream.pipe(fresh)
            if is_first:  # its span comes behind the write that a client waits for
                self._hop(mail, stream)
            if is_out:
                return
            stream.events += fresh
            stream.buffered_bytes += sum(map(len, fresh))
        limits = self._limits
        if (
            len(stream.events) > limits.max_buffer_events
            or stream.buffered_bytes > limits.max_buffer_bytes
        ):
            self._fail(stream, ErrorCode.SLOW_CONSUMER, "the client does not take its events")
        stream.wake()

    def _take_end(self, mail: Mail, end: End) -> None:
        stream = self._find(mail, end.rid)
        if stream is None:
            self.num_stray_messages += 1
            return
        self._hop(mail, stream)
        stream.ended_ns = mail.received_ns
        if isinstance(end, ResponseFinished) and end.events:
            stream.pipe = None  # they leave in one write with the end itself
            self._take_events(mail, stream, end.first_event, end.events, self._clock())
        if stream.end is None:
            self._end(stream, end)

    def _fail(self, stream: Stream, code: ErrorCode, detail: str) -> None:
        """The gateway itself ends a request that may still run."""
        if stream.placed:
            self._tokenizers.send(stream.placed, Cancel(stream.rid))
        self._end(stream, ResponseFailed(stream.rid, code, detail))

    def _abandon(self, stream: Stream) -> None:
        """Its write hangs in a full socket: only stopping the writer ends that."""
        stream.is_abandoned = True
        if stream.end is None:
            self._fail(stream, ErrorCode.SLOW_CONSUMER, "the client does not take its events")
        if stream.writer is not None:
            stream.writer.cancel()
        stream.write_began_at = 0.0

    def _end(self, stream: Stream, end: End) -> None:
        stream.end = end
        self._settle(stream)
        stream.wake()

    def _settle(self, stream: Stream) -> None:
        """Nothing more will come for it, and it will not be placed again."""
        if stream.placed:
            self._tokenizers.release(stream.placed)
            stream.placed = ""
        if stream.submit is not None:
            self._kept_bytes -= len(stream.submit.body)
            stream.submit = None

    def _resend_cancels(self, key: str) -> None:
        """Cancels that a lost link did not take: any tokenizer may have gone on with them."""
        for rid in self._unsent_cancels:
            self._tokenizers.send(key, Cancel(rid))

    def _hop(self, mail: Mail, stream: Stream) -> None:
        self._on_hop(mail, stream.traceparent)


def _said_that_it_stops(peer: Peer) -> bool:
    """A tokenizer is ready from its first heartbeat on, until it is told to stop."""
    return peer.stats != ServiceStats() and not peer.stats.ready
