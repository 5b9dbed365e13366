"""What the service decides: requests from `Submit` to their one end. No I/O, no own clock."""

from typing import NamedTuple

from deepmesh.config import Config
from deepmesh.telemetry import SPAN_HOP, SPAN_TOKENIZE
from deepmesh.wire.link import Peer
from deepmesh.wire.messages import (
    DELTA_ADMITTED,
    Accepted,
    AckRow,
    AnyMessage,
    Cancel,
    Credit,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    ResponseFailed,
    ResponseFinished,
    Rid,
    ServiceStats,
    Submit,
    TokenBatch,
    TokenRow,
)
from services.tokenizer.actions import Action, Outbox, Prepare, ToGateway, Trace
from services.tokenizer.answers import Answer
from services.tokenizer.endings import detokenize_span, finished_message, local_end
from services.tokenizer.prepare import Generation
from services.tokenizer.refusal import Refusal
from services.tokenizer.request import Phase, Request
from services.tokenizer.tokens import feed
from services.tokenizer.upstream import Upstream, is_gap

KEEP_S = 10.0  # an ended request, for a gateway that asks again
MAX_KEPT = 512
_LIVE = (Phase.PREPARING, Phase.UNPLACED, Phase.ASKED, Phase.SENT, Phase.RUNNING)


class Clock(NamedTuple):
    """The time of an event."""

    now: float  # monotonic, s
    wall_ns: int


class Stamps(NamedTuple):
    """Of a message that came in."""

    sender: str
    sent_ns: int
    received_ns: int


class Core:
    """All requests of this process. Each method is one event; `take` gives what it caused."""

    def __init__(self, me: str, config: Config) -> None:
        self._config = config
        self._me = me
        self._outbox = Outbox()
        self._requests: dict[Rid, Request] = {}
        self._ended: dict[Rid, None] = {}  # in order of their ends
        self._tombstones: dict[Rid, float] = {}  # dropped here, until when
        self._upstream = Upstream(me, self._outbox)
        self.draining = False

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests) - len(self._ended)

    def take(self) -> list[Action]:
        """What the events since the last call ask for."""
        return self._outbox.take()

    def stats(self) -> ServiceStats:
        """For heartbeats to gateways."""
        replicas = self._upstream.schedulers.replicas
        return ServiceStats(not self.draining, self.num_live, replicas)

    def context(self, most: int) -> int:
        """Tokens that a request may have at present."""
        return self._upstream.schedulers.context(most)

    # ------------------------------------------------------------ gateways

    def gateway_mail(self, message: AnyMessage, stamps: Stamps, clock: Clock) -> None:
        """Submit, Cancel or Credit."""
        match message:
            case Submit():
                self._submit(message, stamps, clock)
            case Cancel(rid=rid):
                self._cancel(rid, clock)
            case Credit(rid=rid, num_events=num_events):
                request = self._requests.get(rid)
                if request is not None:
                    request.credit(num_events)
                    request.stuck_since = 0.0
                    self._upstream.ack(request)
            case _:
                pass  # nothing else is a gateway's to say

    def gateway_down(self, name: str, clock: Clock) -> None:
        """Its requests go on as orphans for a while."""
        for request in self._requests.values():
            if request.gateway == name and not request.orphaned_at:
                request.orphaned_at = clock.now

    def prepared(
        self, rid: Rid, outcome: Generation | Answer | Refusal, began_ns: int, clock: Clock
    ) -> None:
        """The conversion of a request is over."""
        request = self._requests.get(rid)
        if request is None or request.phase is not Phase.PREPARING:
            return
        self._tokenize_span(request, outcome, began_ns, clock)
        match outcome:
            case Refusal():
                failed = ResponseFailed(rid, outcome.code, outcome.detail, outcome.param)
                self._end(request, failed, clock)
            case Answer():
                body, prompt_tokens = outcome
                finished = ResponseFinished(rid, 200, body, prompt_tokens=prompt_tokens)
                self._end(request, finished, clock)
            case Generation():
                request.generation = outcome
                request.withheld = request.submit.next_event
                request.must_ask = request.submit.next_event > 0
                request.give_up_at = clock.now + self._patience_s(request, clock)
                self._upstream.place_or_ask(request, clock.now)

    # ------------------------------------------------------------ schedulers

    def scheduler_up(self, peer: Peer, clock: Clock) -> None:
        """Requests that wait for a scheduler go on."""
        self._upstream.schedulers.up(peer)
        for request in self._live():
            if request.phase is Phase.UNPLACED:
                self._continue(request, clock)

    def scheduler_down(self, name: str, clock: Clock) -> None:
        """Its requests go on elsewhere, or with it when it is back."""
        for request in self._upstream.down(name, self._live()):
            request.give_up_at = max(
                request.give_up_at, clock.now + self._config.gateway.deadline_s
            )
            self._continue(request, clock)
        for rid in self._ended:
            if self._requests[rid].scheduler == name:
                self._requests[rid].scheduler = ""

    def scheduler_mail(self, message: AnyMessage, stamps: Stamps, clock: Clock) -> None:
        """Accepted, TokenBatch, Finished or Failed."""
        match message:
            case Accepted(rid=rid):
                self._accepted(message, self._requests.get(rid), stamps, clock)
            case TokenBatch(rows=rows):
                for row in rows:
                    request = self._requests.get(row.rid)
                    if request is not None and self._upstream.adopt(request, stamps.sender):
                        self._row(request, row, stamps, clock)
            case Finished(rid=rid):
                self._finished(message, self._requests.get(rid), stamps, clock)
            case Failed(rid=rid):
                self._failed(message, self._requests.get(rid), stamps, clock)
            case _:
                pass  # nothing else is a scheduler's to say

    # ------------------------------------------------------------ time

    def tick(self, clock: Clock) -> None:
        """What time alone makes due; a few times a second."""
        for request in list(self._requests.values()):
            if request.end is not None:
                if clock.now - request.ended_at >= KEEP_S:
                    self._forget(request)
            elif request.orphaned_at and self._is_over(request.orphaned_at, clock):
                self._drop(request, clock)
            elif request.phase is Phase.UNPLACED and clock.now >= request.give_up_at:
                self._give_up(request, clock)
            elif self._is_too_slow(request, clock):
                self._upstream.abort(request)
                self._bury(request.rid, clock)
                detail = "the client does not read its events"
                self._fail(request, ErrorCode.SLOW_CONSUMER, detail, clock)
            else:
                self._upstream.remind(request, clock.now)
        for rid in [rid for rid, until in self._tombstones.items() if until <= clock.now]:
            del self._tombstones[rid]

    def fail_all(self, detail: str, clock: Clock) -> None:
        """The process ends: whatever still runs fails, and is aborted upstream."""
        for request in self._live():
            self._upstream.abort(request)
            self._fail(request, ErrorCode.OVERLOADED, detail, clock)

    # ------------------------------------------------------------ inside: gateways

    def _submit(self, submit: Submit, stamps: Stamps, clock: Clock) -> None:
        self._hop("Submit", submit.traceparent, stamps)
        known = self._requests.get(submit.rid)
        if known is not None:
            self._reattach(known, submit, stamps.sender)
            return
        request = Request(submit, stamps.sender, stamps.received_ns)
        self._requests[submit.rid] = request
        if self.draining:
            detail = "this tokenizer is shutting down; send the request again"
            self._fail(request, ErrorCode.OVERLOADED, detail, clock)
            return
        self._outbox.add(Prepare(submit))

    def _reattach(self, request: Request, submit: Submit, gateway: str) -> None:
        """The gateway asks again, after its link or another tokenizer was lost."""
        request.gateway = gateway
        request.orphaned_at = 0.0
        first = submit.next_event
        if request.phase is Phase.PREPARING:
            request.submit = submit
            return
        events = request.since(first)
        match request.end:
            case ResponseFailed() as failed:
                self._outbox.add(ToGateway(gateway, failed))
            case ResponseFinished():
                self._outbox.add(ToGateway(gateway, finished_message(request, first, events)))
            case None if request.is_stream and (request.is_admitted or events):
                delta = Delta(request.rid, first, events, DELTA_ADMITTED)
                self._outbox.delta(gateway, delta)
            case None:
                pass

    def _cancel(self, rid: Rid, clock: Clock) -> None:
        request = self._requests.get(rid)
        if request is not None:
            self._drop(request, clock)
            return
        # a former instance of this process may have placed it
        orphan = Request(Submit(rid, "", b"", 0), "", 0, phase=Phase.ASKED)
        orphan.asked = self._upstream.schedulers.names
        self._upstream.abort(orphan)
        self._bury(rid, clock)

    # ------------------------------------------------------------ inside: schedulers

    def _continue(self, request: Request, clock: Clock) -> None:
        """Place a request again, unless the tokens known already are all there will be."""
        reason = local_end(request)
        if reason is not None:
            self._complete(request, reason, clock)
        else:
            self._upstream.place_or_ask(request, clock.now)

    def _accepted(
        self, message: Accepted, request: Request | None, stamps: Stamps, clock: Clock
    ) -> None:
        if request is None or not self._upstream.adopt(request, stamps.sender):
            return
        request.spoke_at = clock.now
        request.attempt = max(request.attempt, message.attempt)
        if not request.was_accepted:
            request.was_accepted = True
            request.cached_tokens = message.cached_tokens
            self._hop("Accepted", request.submit.traceparent, stamps)
        self._send_events(request, [])

    def _row(self, request: Request, row: TokenRow, stamps: Stamps, clock: Clock) -> None:
        request.spoke_at = clock.now
        request.was_accepted = True
        if is_gap(request, row):
            self._upstream.attach(request, clock.now)
            return
        if row.pos + len(row.ids) // 4 <= request.position:
            return  # a repeat
        if not request.first_token_ns:
            request.first_token_ns = stamps.received_ns
            self._hop("TokenBatch", request.submit.traceparent, stamps)
        try:
            events = feed(request, row)
        except RuntimeError as error:  # the recipe cannot go on with this output
            self._upstream.abort(request)
            self._fail(request, ErrorCode.INTERNAL, f"the output cannot be decoded: {error}", clock)
            return
        self._send_events(request, events)
        request.acks.append((request.next_event, request.position))
        self._upstream.ack(request)
        assert request.generation is not None
        if request.generation.text.stopped:
            self._upstream.stop(request)
            self._complete(request, FinishReason.STOP, clock)
        elif request.finished is not None and request.position >= request.finished.final_pos:
            self._finish(request, request.finished, stamps.sender, clock)

    def _finished(
        self, message: Finished, request: Request | None, stamps: Stamps, clock: Clock
    ) -> None:
        if request is None or request.end is not None:
            self._acknowledge_late(message.rid, message.final_pos, stamps.sender)
            return
        if not self._upstream.adopt(request, stamps.sender):
            return
        request.spoke_at = clock.now
        request.finished = message
        if request.position < message.final_pos:
            self._upstream.attach(request, clock.now)
        else:
            self._hop("Finished", request.submit.traceparent, stamps)
            self._finish(request, message, stamps.sender, clock)

    def _finish(self, request: Request, message: Finished, sender: str, clock: Clock) -> None:
        self._upstream.done(request, sender, message.final_pos)
        if message.reason is FinishReason.ABORT:
            detail = "the engine aborted this request"
            self._fail(request, ErrorCode.ENGINE_ERROR, detail, clock)
        else:
            request.cached_tokens = max(request.cached_tokens, message.cached_tokens)
            self._complete(request, message.reason, clock)

    def _failed(
        self, message: Failed, request: Request | None, stamps: Stamps, clock: Clock
    ) -> None:
        if request is None or request.end is not None:
            self._acknowledge_late(message.rid, message.final_pos, stamps.sender)
            return
        if message.code is ErrorCode.UNKNOWN:
            self._upstream.unknown(request, message, stamps.sender, clock.now)
            return
        if not self._upstream.adopt(request, stamps.sender):
            return
        self._hop("Failed", request.submit.traceparent, stamps)
        self._upstream.done(request, stamps.sender, message.final_pos)
        end = ResponseFailed(
            request.rid, message.code, message.detail, message.param, message.retry_after_s
        )
        self._end(request, end, clock)

    def _acknowledge_late(self, rid: Rid, position: int, sender: str) -> None:
        """The end of a request that ended here before. One that we never knew may be asked for."""
        if rid in self._requests or rid in self._tombstones:
            self._outbox.ack(sender, AckRow(rid, position, done=True))

    # ------------------------------------------------------------ inside: ends

    def _send_events(self, request: Request, events: list[bytes]) -> None:
        if not request.is_stream:
            return
        flags = 0 if request.is_admitted else DELTA_ADMITTED
        request.is_admitted = True
        delta = request.add_events(events, flags)
        if delta is not None:
            self._outbox.delta(request.gateway, delta)

    def _complete(self, request: Request, reason: FinishReason, clock: Clock) -> None:
        """All tokens are there: the last events, or the body."""
        generation = request.generation
        assert generation is not None
        request.reason = reason
        events: list[bytes] = []
        try:
            if not request.has_started:
                request.has_started = True
                events += generation.text.start(request.cached_tokens)
            events += generation.text.finish(reason)
        except RuntimeError as error:
            detail = f"the output cannot be decoded: {error}"
            self._fail(request, ErrorCode.INTERNAL, detail, clock)
            return
        delta = request.add_events(events) if request.is_stream else None
        first = delta.first_event if delta is not None else request.next_event
        fresh = delta.events if delta is not None else []
        self._end(request, finished_message(request, first, fresh), clock)

    def _fail(self, request: Request, code: ErrorCode, detail: str, clock: Clock) -> None:
        self._end(request, ResponseFailed(request.rid, code, detail), clock)

    def _end(self, request: Request, end: ResponseFinished | ResponseFailed, clock: Clock) -> None:
        """The one place where a request ends for its gateway."""
        self._upstream.release(request)
        request.phase = Phase.ENDED
        request.end = end
        request.ended_at = clock.now
        self._ended[request.rid] = None
        self._outbox.add(ToGateway(request.gateway, end))
        if (span := detokenize_span(request, clock.wall_ns)) is not None:
            self._outbox.add(span)
        if len(self._ended) > MAX_KEPT:
            self._forget(self._requests[next(iter(self._ended))])

    def _give_up(self, request: Request, clock: Clock) -> None:
        if request.was_accepted:
            detail = "the engine was lost and did not come back in time; send the request again"
            self._fail(request, ErrorCode.ENGINE_RESTARTED, detail, clock)
        else:
            detail = "no engine is up; try again later"
            self._fail(request, ErrorCode.OVERLOADED, detail, clock)

    def _drop(self, request: Request, clock: Clock) -> None:
        """The gateway wants nothing more of it."""
        if request.end is None:
            self._upstream.abort(request)
        self._bury(request.rid, clock)
        self._forget(request)

    def _bury(self, rid: Rid, clock: Clock) -> None:
        self._tombstones[rid] = clock.now + KEEP_S

    def _forget(self, request: Request) -> None:
        del self._requests[request.rid]
        self._ended.pop(request.rid, None)

    def _live(self) -> list[Request]:
        return [request for request in self._requests.values() if request.end is None]

    # ------------------------------------------------------------ inside: limits, traces

    def _patience_s(self, request: Request, clock: Clock) -> float:
        """How long a request waits for its first scheduler."""
        if request.submit.deadline_ns:
            return max((request.submit.deadline_ns - clock.wall_ns) / 1e9, 0.0)
        return self._config.gateway.deadline_s

    def _is_over(self, since: float, clock: Clock) -> bool:
        return clock.now - since >= self._config.scheduler.orphan_s

    def _is_too_slow(self, request: Request, clock: Clock) -> bool:
        behind = request.next_event - request.credited
        if not request.is_stream or behind <= self._config.tokenizer.unacked_events:
            request.stuck_since = 0.0
            return False
        request.stuck_since = request.stuck_since or clock.now
        return clock.now - request.stuck_since >= self._config.tokenizer.slow_consumer_s

    def _hop(self, name: str, traceparent: str, stamps: Stamps) -> None:
        attributes: dict[str, str | int | float | bool] = {
            "message": name,
            "from": stamps.sender,
            "to": self._me,
        }
        span = Trace(SPAN_HOP, traceparent, stamps.sent_ns, stamps.received_ns, attributes)
        self._outbox.add(span)

    def _tokenize_span(
        self,
        request: Request,
        outcome: Generation | Answer | Refusal,
        began_ns: int,
        clock: Clock,
    ) -> None:
        submit = request.submit
        attributes: dict[str, str | int | float | bool] = {
            "protocol": submit.protocol,
            "body_bytes": len(submit.body),
            "wait_us": (began_ns - request.arrived_ns) / 1000,
        }
        error = ""
        match outcome:
            case Generation(prompt_len=prompt_len, max_tokens=max_tokens):
                attributes |= {"prompt_tokens": prompt_len, "max_tokens": max_tokens}
            case Answer(prompt_tokens=prompt_tokens):
                attributes["prompt_tokens"] = prompt_tokens
            case Refusal(detail=detail):
                error = detail
        span = Trace(SPAN_TOKENIZE, submit.traceparent, began_ns, clock.wall_ns, attributes, error)
        self._outbox.add(span)
