"""All requests of this process, and the one way in which each of them ends."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from deepmesh.wire.messages import (
    DELTA_ADMITTED,
    Delta,
    ErrorCode,
    FinishReason,
    ResponseFailed,
    ResponseFinished,
    Rid,
    Submit,
)
from services.tokenizer.actions import Outbox, ToGateway
from services.tokenizer.choices import part_rid
from services.tokenizer.generation import Generation
from services.tokenizer.panics import panics_as_errors
from services.tokenizer.request import Phase, Request
from services.tokenizer.spans import detokenize_span
from services.tokenizer.text_stream import Token
from services.tokenizer.upstream import Upstream

KEEP_S = 10.0  # an ended request, for a gateway that asks again
MAX_KEPT = 512
# what an output may cause that neither the recipe nor we can read: it fails its request alone
TEXT_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError)


class Clock(NamedTuple):
    """The time of an event."""

    now: float  # monotonic, s
    wall_ns: int


class Book:
    """Requests by rid, from `Submit` until nobody can ask for them any more."""

    def __init__(self, outbox: Outbox, upstream: Upstream) -> None:
        self._outbox = outbox
        self._upstream = upstream
        self._requests: dict[Rid, Request] = {}
        self._ended: dict[Rid, None] = {}  # in the order of their ends
        self._tombstones: dict[Rid, float] = {}  # dropped here, until when
        self.on_end: Callable[[Request, str], None] = lambda request, status: None

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests) - len(self._ended)

    @property
    def live(self) -> list[Request]:
        """Requests that have not ended."""
        return [request for request in self._requests.values() if request.end is None]

    @property
    def all(self) -> list[Request]:
        """Those that have ended and are kept, too."""
        return list(self._requests.values())

    def get(self, rid: Rid) -> Request | None:
        """A request, live or kept."""
        return self._requests.get(rid)

    def open(self, submit: Submit, gateway: str, arrived_ns: int) -> Request:
        """A new request."""
        request = Request(submit, gateway, arrived_ns)
        self._requests[submit.rid] = request
        return request

    def remembers(self, rid: Rid) -> bool:
        """Whether its scheduler may be told to forget it."""
        return rid in self._requests or rid in self._tombstones

    # ------------------------------------------------------------ parts

    def place(self, request: Request, clock: Clock) -> None:
        """Have a prepared request generated, or each of its parts."""
        for part in self._split(request) or [request]:
            self._upstream.place_or_ask(part, clock.now)

    def _split(self, request: Request) -> list[Request]:
        """Open a part for each choice, if there are several or the one has stages."""
        assert request.generation is not None
        if request.generation.choices:
            request.phase = Phase.SPLIT
            request.has_started = True
        for index, choice in enumerate(request.generation.choices):
            request.parts.append(self._open_part(request, choice, index, stage=0))
        return list(request.parts)

    def _open_part(self, whole: Request, choice: Generation, index: int, *, stage: int) -> Request:
        submit = msgspec.structs.replace(whole.submit, rid=part_rid(whole.rid, index, stage))
        part = Request(submit, "", whole.arrived_ns, generation=choice, whole=whole)
        part.part_index = index
        part.is_thinking = choice.thinking is not None and not stage
        part.must_ask, part.give_up_at = whole.must_ask, whole.give_up_at
        self._requests[part.rid] = part
        return part

    def _go_on(self, part: Request, clock: Clock) -> bool:
        """Its thinking is over, or was cut where the budget ends: the answer is a part of its own,
        whose prompt's continuation the thinking is. False if the whole choice is over."""
        generation, last = part.generation, part.last_id
        assert generation is not None
        thinking = generation.thinking
        if not part.is_thinking or thinking is None or generation.text.stopped:
            return False
        was_cut = part.position >= part.max_tokens
        if last != thinking.end_id and (not was_cut or last in part.stops):
            return False
        if part.position >= generation.max_tokens:
            return False
        assert part.whole is not None
        answer = self._open_part(part.whole, generation, part.part_index, stage=1)
        answer.output, answer.position = bytearray(part.output), part.position
        answer.probs = part.probs
        answer.has_started, answer.cached_tokens = True, part.cached_tokens
        answer.was_accepted = True
        if last != thinking.end_id:
            part.lane.push(Token(thinking.end_id))
            answer.output += thinking.end_id.to_bytes(4, "little")
            answer.position += 1
        part.whole.parts[part.part_index] = answer
        part.phase = Phase.ENDED
        self.bury(part.rid, clock)
        self.forget(part)
        self._advance(part.whole)
        if (reason := local_end(answer)) is not None:
            self.complete(answer, reason, clock)
        else:
            self._upstream.place_or_ask(answer, clock.now)
        return True

    def _advance(self, whole: Request) -> None:
        """Send the events whose turn has come."""
        if whole.end is not None:
            return
        events = whole.merge.take()
        if events or all(part.was_accepted for part in whole.parts):
            self.send_events(whole, events)

    def _part_ended(
        self, whole: Request, end: ResponseFinished | ResponseFailed, clock: Clock
    ) -> None:
        """All parts must end well; one that fails takes the others with it."""
        if whole.end is not None:
            return
        if isinstance(end, ResponseFailed):
            self.end(whole, msgspec.structs.replace(end, rid=whole.rid), clock)
            return
        self._advance(whole)
        if any(part.end is None for part in whole.parts):
            return
        whole.position = sum(part.position for part in whole.parts)
        whole.cached_tokens = max(part.cached_tokens for part in whole.parts)
        was_cut = any(part.reason is FinishReason.LENGTH for part in whole.parts)
        self.complete(whole, FinishReason.LENGTH if was_cut else FinishReason.STOP, clock)

    def _drop_parts(self, whole: Request, clock: Clock) -> None:
        for part in whole.parts:
            if part.end is None:
                self._upstream.abort(part)
                part.phase = Phase.ENDED
                self.bury(part.rid, clock)
                self.forget(part)

    # ------------------------------------------------------------ towards the gateway

    def send_events(self, request: Request, events: list[bytes]) -> None:
        """Events of a stream; the first delta says that it is admitted."""
        if request.whole is not None:
            self._advance(request.whole)
        if not request.is_stream:
            return
        flags = 0 if request.is_admitted else DELTA_ADMITTED
        request.is_admitted = True
        delta = request.add_events(events, flags)
        if delta is not None and request.is_heard:  # an orphan's gateway will ask
            self._outbox.delta(request.gateway, delta)

    def send_again(self, request: Request, next_event: int) -> None:
        """What the gateway may have missed, from `next_event` on."""
        if request.is_admitted:
            first = max(next_event, request.first_kept)
            delta = Delta(request.rid, first, request.since(first), DELTA_ADMITTED)
            self._outbox.delta(request.gateway, delta)
        end = request.end
        if isinstance(end, ResponseFinished) and end.events:
            end = msgspec.structs.replace(end, first_event=request.next_event, events=[])
        if end is not None:
            self._outbox.add(ToGateway(request.gateway, end))

    def complete(self, request: Request, reason: FinishReason, clock: Clock) -> None:
        """All tokens are there: the last events, or the body."""
        generation = request.generation
        assert generation is not None
        if self._go_on(request, clock):
            return
        request.reason = reason
        events: list[bytes] = []
        try:
            with panics_as_errors():
                if not request.has_started:
                    request.has_started = True
                    events += generation.text.start(request.cached_tokens)
                events += generation.text.finish(reason)
        except TEXT_ERRORS as error:
            detail = f"the output cannot be decoded: {error}"
            self.fail(request, ErrorCode.INTERNAL, detail, clock)
            return
        request.is_admitted |= request.is_stream
        delta = request.add_events(events) if request.is_stream else None
        first = delta.first_event if delta is not None else request.next_event
        fresh = delta.events if delta is not None else []
        self.end(request, finished_message(request, first, fresh), clock)

    def fail(self, request: Request, code: ErrorCode, detail: str, clock: Clock) -> None:
        """The bad end, for a reason found here."""
        self.end(request, ResponseFailed(request.rid, code, detail), clock)

    def end(self, request: Request, end: ResponseFinished | ResponseFailed, clock: Clock) -> None:
        """The one place where a request ends for its gateway."""
        if request.rid not in self._requests:
            return  # a part of one that has ended
        self._drop_parts(request, clock)
        self._upstream.release(request)
        request.phase = Phase.ENDED
        request.end = end
        request.ended_at = clock.now
        self._ended[request.rid] = None
        if request.whole is not None:
            self._part_ended(request.whole, end, clock)
        elif request.is_heard:
            self._outbox.add(ToGateway(request.gateway, end))
        failed = isinstance(end, ResponseFailed)
        cancelled = failed and end.code is ErrorCode.CANCELLED
        self.on_end(request, "cancelled" if cancelled else "failed" if failed else "completed")
        if (span := detokenize_span(request, clock.wall_ns)) is not None:
            self._outbox.add(span)
        if len(self._ended) > MAX_KEPT:
            self.forget(self._requests[next(iter(self._ended))])

    # ------------------------------------------------------------ forgetting

    def drop(self, request: Request, clock: Clock) -> None:
        """The gateway wants nothing more of it."""
        if request.end is None:
            self._upstream.abort(request)
            self._drop_parts(request, clock)
            self.on_end(request, "cancelled")
        self.bury(request.rid, clock)
        self.forget(request)

    def bury(self, rid: Rid, clock: Clock) -> None:
        """What still comes for it is acknowledged and ignored."""
        self._tombstones[rid] = clock.now + KEEP_S

    def forget(self, request: Request) -> None:
        """No trace of it stays."""
        self._requests.pop(request.rid, None)
        self._ended.pop(request.rid, None)

    def sweep(self, clock: Clock) -> None:
        """Forget what was kept long enough."""
        for rid in list(self._ended):
            if clock.now - self._requests[rid].ended_at < KEEP_S:
                break
            self.forget(self._requests[rid])
        for rid, until in list(self._tombstones.items()):
            if until > clock.now:
                break
            del self._tombstones[rid]


def local_end(request: Request) -> FinishReason | None:
    """The end that the tokens themselves show, when the scheduler's word on it was lost."""
    generation = request.generation
    if generation is None or request.position == 0:
        return None
    if request.last_id in request.stops and request.position > request.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.position >= request.max_tokens else None


def finished_message(request: Request, first_event: int, events: list[bytes]) -> ResponseFinished:
    """The good end; `events` are those that the gateway does not have yet."""
    generation = request.generation
    assert generation is not None
    return ResponseFinished(
        rid=request.rid,
        status=200,
        body=b"" if generation.stream else generation.text.body(),
        first_event=first_event,
        events=events,
        prompt_tokens=generation.prompt_len,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.position,
        finish_reason=request.reason.name.lower(),
    )
