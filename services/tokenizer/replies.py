"""What schedulers and the router say of our requests: tokens in, events and ends out."""

from collections.abc import Sequence

from deepmesh.wire.messages import (
    Accepted,
    AckRow,
    AnyMessage,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    ResponseFailed,
    TokenBatch,
    TokenRow,
)
from services.tokenizer.actions import Outbox
from services.tokenizer.book import TEXT_ERRORS, Book, Clock
from services.tokenizer.request import Phase, Request
from services.tokenizer.spans import Stamps, finish_span, hop_span
from services.tokenizer.tokens import feed, joined
from services.tokenizer.upstream import Upstream

# A replica that says one of these may be the only one to say so: another one is tried.
ELSEWHERE = (ErrorCode.OVERLOADED, ErrorCode.MISMATCH)
MAX_ABORTS = 16  # of others that hit one request; each is answered by a later attempt


class Replies:
    """Applies each reply to the request that it is about."""

    def __init__(self, me: str, book: Book, upstream: Upstream, outbox: Outbox) -> None:
        self._me = me
        self._book = book
        self._upstream = upstream
        self._outbox = outbox

    def from_scheduler(self, message: AnyMessage, stamps: Stamps, clock: Clock) -> None:
        """Accepted, TokenBatch, Finished or Failed."""
        match message:
            case TokenBatch():
                self.tokens([message], stamps, clock)
            case Accepted(rid=rid):
                request = self._book.get(rid)
                if request is not None and self._adopt(request, stamps):
                    self._accepted(request, message, stamps, clock)
            case Finished(rid=rid) | Failed(rid=rid):
                request = self._book.get(rid)
                if request is not None and request.end is None:
                    self._terminal(request, message, stamps, clock)
                    self._note_end(request, stamps)
                elif self._book.remembers(rid):  # it ended here before
                    self._outbox.ack(stamps.sender, AckRow(rid, message.final_pos, done=True))
            case _:
                pass  # nothing else is a scheduler's to say

    def tokens(self, batches: Sequence[TokenBatch], stamps: Stamps, clock: Clock) -> None:
        """Batches of one scheduler that wait, oldest first; `stamps` of the oldest."""
        for row in joined(batches):
            request = self._book.get(row.rid)
            if request is not None and self._adopt(request, stamps):
                self._row(request, row, stamps, clock)
                self._note_end(request, stamps)
        self._outbox.took(stamps.sender, max(batch.group_step for batch in batches))

    def from_router(self, message: AnyMessage, stamps: Stamps, clock: Clock) -> None:
        """Failed: it found no replica for a request."""
        if isinstance(message, Failed):
            request = self._book.get(message.rid)
            if request is not None and request.phase is Phase.ROUTED:
                self._fail(request, message, stamps, clock)

    # ------------------------------------------------------------ inside

    def _adopt(self, request: Request, stamps: Stamps) -> bool:
        if self._upstream.adopt(request, stamps.sender):
            return True
        self._upstream.reject(request, stamps.sender)
        return False

    def _accepted(self, request: Request, message: Accepted, stamps: Stamps, clock: Clock) -> None:
        request.spoke_at = clock.now
        request.attempt = max(request.attempt, message.attempt)
        request.refused_by.clear()
        if not request.was_accepted:
            request.was_accepted = True
            request.cached_tokens = message.cached_tokens
            self._hop("Accepted", request, stamps)
        self._book.send_events(request, [])

    def _row(self, request: Request, row: TokenRow, stamps: Stamps, clock: Clock) -> None:
        request.spoke_at = clock.now
        request.was_accepted = True
        if row.pos > request.position:
            self._upstream.attach(request, clock.now)
            return
        if row.pos + len(row.ids) // 4 <= request.position:
            return  # a repeat
        if not request.first_token_ns:
            request.first_token_ns = stamps.received_ns
            self._hop("TokenBatch", request, stamps)
        try:
            events = feed(request, row)
        except TEXT_ERRORS as error:
            self._upstream.abort(request)
            detail = f"the output cannot be decoded: {error}"
            self._book.fail(request, ErrorCode.INTERNAL, detail, clock)
            return
        self._book.send_events(request, events)
        request.note_position()
        self._upstream.ack(request)
        self._look_for_end(request, stamps, clock)

    def _look_for_end(self, request: Request, stamps: Stamps, clock: Clock) -> None:
        """A stop string may just have come, or the token that `Finished` waited for."""
        assert request.generation is not None
        if request.generation.text.stopped:
            self._upstream.stop(request)
            self._book.complete(request, FinishReason.STOP, clock)
        elif request.finished is not None and request.position >= request.finished.final_pos:
            self._finish(request, request.finished, stamps.sender, clock)

    def _terminal(
        self, request: Request, message: Finished | Failed, stamps: Stamps, clock: Clock
    ) -> None:
        if isinstance(message, Failed) and message.code is ErrorCode.UNKNOWN:
            self._upstream.unknown(request, stamps.sender, clock.now)
            return
        if not self._upstream.adopt(request, stamps.sender):
            if request.phase is Phase.RUNNING:  # of a rejected one
                row = AckRow(request.rid, message.final_pos, done=True)
                self._outbox.ack(stamps.sender, row)
            return
        request.spoke_at = clock.now
        if isinstance(message, Failed):
            self._failed(request, message, stamps, clock)
        elif request.position < message.final_pos:  # its last tokens are missing
            request.finished = message
            self._upstream.attach(request, clock.now)
        else:
            self._hop("Finished", request, stamps)
            self._finish(request, message, stamps.sender, clock)

    def _failed(self, request: Request, message: Failed, stamps: Stamps, clock: Clock) -> None:
        """The end, unless only this replica cannot have it: it drains, is full, or is another's."""
        if message.code in ELSEWHERE:
            request.refused_by.add(stamps.sender)
            is_placed = self._upstream.place_elsewhere(
                request,
                stamps.sender,
                message.final_pos,
                clock.now,
                same_weights=message.code is ErrorCode.MISMATCH,
            )
            if is_placed:
                return
        self._upstream.done(request, stamps.sender, message.final_pos)
        self._fail(request, message, stamps, clock)

    def _fail(self, request: Request, message: Failed, stamps: Stamps, clock: Clock) -> None:
        self._hop("Failed", request, stamps)
        code, detail = message.code, message.detail
        names = request.generation.field_names if request.generation is not None else {}
        param = names.get(message.param, message.param)
        failed = ResponseFailed(request.rid, code, detail, param, message.retry_after_s)
        self._book.end(request, failed, clock)

    def _finish(self, request: Request, message: Finished, sender: str, clock: Clock) -> None:
        if message.reason is FinishReason.ABORT and self._goes_on(request):
            self._outbox.ack(sender, AckRow(request.rid, message.final_pos, done=True))
            request.finished = None
            self._upstream.place(request, clock.now)
            return
        self._upstream.done(request, sender, message.final_pos)
        if message.reason is FinishReason.ABORT:
            code, detail = ErrorCode.ENGINE_ERROR, "the engine aborted this request"
            whole = request.reader.generation
            if whole is not None and whole.record is not None:  # clients name it to cancel it
                code, detail = ErrorCode.CANCELLED, "the response was cancelled"
            self._book.fail(request, code, detail, clock)
        else:
            request.cached_tokens = max(request.cached_tokens, message.cached_tokens)
            self._book.complete(request, message.reason, clock)

    def _note_end(self, request: Request, stamps: Stamps) -> None:
        if request.end is not None:
            self._outbox.add(finish_span(request, stamps))

    def _hop(self, name: str, request: Request, stamps: Stamps) -> None:
        self._outbox.add(hop_span(name, request.submit.traceparent, stamps, self._me))

    @staticmethod
    def _goes_on(request: Request) -> bool:
        """Whether an abort was not meant for it: another tokenizer had the same request there, from
        before a link was lost, and gave that up. Ours is still wanted."""
        reader = request.reader
        whole = reader.generation
        if not reader.is_heard or (whole is not None and whole.record is not None):
            return False
        request.num_aborts += 1
        return request.num_aborts <= MAX_ABORTS
