"""Endpoints that pass the raw body to a tokenizer and its answer to the client."""

import logging
import time
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from deepmesh import telemetry
from deepmesh.log import about
from deepmesh.telemetry import (
    SPAN_ADMISSION,
    SPAN_ANSWER,
    SPAN_BODY,
    SPAN_FIRST,
    SPAN_HOP,
    SPAN_REQUEST,
    SPAN_STREAM,
    SPAN_WRITE,
    Span,
    Tracer,
    Value,
    is_sampled,
    trace_id_of,
)
from deepmesh.wire.link import Mail
from deepmesh.wire.messages import ResponseFailed, ResponseFinished, Submit
from services.gateway.arrival import Arrival
from services.gateway.auth import tenant_salt
from services.gateway.errors import CODE_NAME, HTTP_STATUS, ProblemError
from services.gateway.limits import BodyReader, ClientGoneError, Gate
from services.gateway.live_requests import SeenRequest, SeenRequests
from services.gateway.metrics import Metrics, RequestTimer
from services.gateway.protocol import ABORT, PIECE
from services.gateway.quotas import Quotas
from services.gateway.relay import CLIENT_GONE, Relay, send_problem
from services.gateway.stream import Stream
from services.gateway.streams import Streams

_log = logging.getLogger(__name__)
OPERATIONS = {  # of the GenAI conventions, by protocol
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
}
_NUMBERS = ("limit", "starting_after")  # of queries
_FLAGS = ("stream", "include_obfuscation")


class Edge(msgspec.Struct, frozen=True):
    """What all endpoints share."""

    gate: Gate
    quotas: Quotas
    bodies: BodyReader
    streams: Streams
    metrics: Metrics
    tracer: Tracer
    seen: SeenRequests
    keep: Callable[[str], None]  # an unsampled trace after all
    slow_s: float  # a request that takes so long is kept; 0: none is
    model: str  # that is served


def _question(scope: Scope) -> bytes:
    """Path and query of a request without a body of its own, as one. A stream of events that goes
    on behind one of them has numbers that do, too."""
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    asked: dict[str, str | int] = {**query, **scope["path_params"]}
    for name in _NUMBERS:
        if len(query.get(name, "")) < 19 and query.get(name, "").isdecimal():
            asked[name] = int(query[name])
    for name in _FLAGS:
        if query.get(name) in ("true", "false"):
            asked[name] = query[name] == "true"
    if isinstance(after := asked.get("starting_after"), int):
        scope["arrival"].first_number = after + 1
    return msgspec.json.encode(asked) if asked else b""


def record_hop(tracer: Tracer, mail: Mail, traceparent: str) -> None:
    """The span of a message: sent to received."""
    attributes: dict[str, str | int | float | bool] = {
        "message": type(mail.message).__name__,
        "from": mail.peer.name,
    }
    tracer.record(SPAN_HOP, traceparent, mail.sent_ns, mail.received_ns, attributes)


def about_operation(protocol: str, model: str) -> dict[str, Value]:
    """What the GenAI conventions ask of a request's span from its begin on."""
    operation = OPERATIONS.get(protocol)
    if operation is None:
        return {}
    return {
        telemetry.GEN_AI_OPERATION: operation,
        telemetry.GEN_AI_PROVIDER: "deepmesh",
        telemetry.GEN_AI_REQUEST_MODEL: model,
    }


def note_answer(
    span: Span, end: ResponseFinished, timer: RequestTimer, about: Mapping[str, Value]
) -> None:
    """The same about its answer."""
    span.set(telemetry.GEN_AI_INPUT_TOKENS, end.prompt_tokens)
    span.set(telemetry.GEN_AI_OUTPUT_TOKENS, end.completion_tokens)
    span.set(telemetry.GEN_AI_CACHED_TOKENS, end.cached_tokens)
    if telemetry.GEN_AI_OPERATION in about:
        span.set(telemetry.GEN_AI_RESPONSE_MODEL, about[telemetry.GEN_AI_REQUEST_MODEL])
    if end.finish_reason:
        span.set(telemetry.GEN_AI_FINISH_REASONS, (end.finish_reason,))
    if timer.ttft_s:
        span.set(telemetry.GEN_AI_FIRST_CHUNK, timer.ttft_s)


class Forward:
    """One route of the API: an ASGI endpoint."""

    def __init__(self, edge: Edge, protocol: str, route: str) -> None:
        self._edge = edge
        self._about = about_operation(protocol, edge.model)
        self._protocol = protocol
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; exactly one answer, unless the client is gone."""
        edge, arrival = self._edge, scope["arrival"]
        span = self._begin(scope, arrival)
        seen = edge.seen.begin(arrival, self._route, self._protocol, span.traceparent)
        timer = seen.timer = RequestTimer(edge.metrics, self._protocol, arrival.start_s)
        edge.metrics.running[self._protocol] += 1
        try:
            with edge.gate.enter(), edge.quotas.enter(arrival, self._protocol) as key_hash:
                # no name for the body here: `Streams` alone decides how long it is kept
                stream = self._open(
                    arrival, span, key_hash, await self._body(scope, receive, arrival)
                )
                if scope["method"] == "POST":  # up to here, so that no moment is left out
                    self._note_body(stream, arrival, span)
                await self._relay(scope, receive, send, stream, span, timer, seen)
        except ProblemError as error:
            seen.error = error.problem.message
            await self._refuse(error, receive, send, arrival, span)
        except ClientGoneError:
            arrival.status = CLIENT_GONE
        finally:
            edge.metrics.running[self._protocol] -= 1
            self._finish(arrival, span, seen)

    def _begin(self, scope: Scope, arrival: Arrival) -> Span:
        span = self._edge.tracer.start(
            SPAN_REQUEST,
            arrival.parent,
            arrival.start_ns,
            {
                **self._about,
                "http.request.method": scope["method"],
                "http.route": self._route,
                "deepmesh.protocol": self._protocol,
                "deepmesh.rid": arrival.rid.hex(),
                "deepmesh.request_id": arrival.request_id,
                "deepmesh.seed": str(arrival.seed),
            },
            kind="server",
        )
        if is_sampled(span.traceparent):
            arrival.trace_id = trace_id_of(span.traceparent)
        return span

    async def _body(self, scope: Scope, receive: Receive, arrival: Arrival) -> bytes:
        if scope["method"] != "POST":
            return _question(scope)
        self._edge.bodies.check_headers(arrival.headers)
        body = await self._edge.bodies.read(receive)
        if scope["path_params"]:
            return _question(scope)
        return body

    def _open(self, arrival: Arrival, span: Span, key_hash: str, body: bytes) -> Stream:
        return self._edge.streams.open(
            Submit(
                rid=arrival.rid,
                protocol=self._protocol,
                body=body,
                seed=arrival.seed,
                api_key_hash=key_hash,
                tenant_salt=tenant_salt(key_hash),
                priority=self._edge.quotas.priority(key_hash),
                traceparent=span.traceparent,
                created_s=arrival.created_s,
            )
        )

    def _note_body(self, stream: Stream, arrival: Arrival, span: Span) -> None:
        about = {"bytes": stream.num_bytes}
        self._edge.tracer.record(
            SPAN_BODY, span.traceparent, arrival.start_ns, time.time_ns(), about
        )

    async def _relay(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        stream: Stream,
        span: Span,
        timer: RequestTimer,
        seen: SeenRequest,
    ) -> None:
        arrival: Arrival = scope["arrival"]
        relay = Relay(
            self._edge.streams,
            stream,
            arrival,
            send,
            on_write=timer.wrote,
            abort=scope[ABORT],
            piece=scope.pop(PIECE),  # it refers to what holds the scope
        )
        try:
            await relay.run(receive)
        finally:
            self._note_end(stream, arrival, span, timer, seen)

    async def _refuse(
        self, error: ProblemError, receive: Receive, send: Send, arrival: Arrival, span: Span
    ) -> None:
        """Answer at once, perhaps before the body was read to its end."""
        span.set("error.type", error.problem.code)
        if self._edge.bodies.is_small(arrival.headers):
            await send_problem(send, error.problem, arrival)
            return
        await send_problem(send, error.problem, arrival, closes=True)
        await self._edge.bodies.linger(receive)
        await send({"type": "http.response.body", "body": b""})

    def _note_end(
        self,
        stream: Stream,
        arrival: Arrival,
        span: Span,
        timer: RequestTimer,
        seen: SeenRequest,
    ) -> None:
        """Child spans and attributes that only the whole course of a request tells."""
        tracer, now_ns = self._edge.tracer, time.time_ns()
        arrival.end_ns = now_ns
        if stream.end is None or stream.is_abandoned:
            arrival.status = CLIENT_GONE
            self._edge.metrics.disconnects[self._protocol] += 1
        elif isinstance(stream.end, ResponseFailed):
            arrival.status = HTTP_STATUS[stream.end.code]  # also when it came after the headers
            span.set("error.type", CODE_NAME[stream.end.code])
            seen.error = stream.end.detail
        if isinstance(stream.end, ResponseFinished):
            end = stream.end
            self._edge.metrics.finish_reasons[end.finish_reason or "stop"] += 1
            self._edge.metrics.prompts.observe(end.prompt_tokens)
            self._edge.metrics.outputs.observe(end.completion_tokens)
            seen.prompt_tokens, seen.cached_tokens = end.prompt_tokens, end.cached_tokens
            seen.output_tokens, seen.finish_reason = end.completion_tokens, end.finish_reason
            note_answer(span, end, timer, self._about)
            self._edge.quotas.used(arrival, end.prompt_tokens + end.completion_tokens)
        else:
            self._edge.quotas.used(arrival, timer.num_events)  # about its tokens
        if not stream.placed_ns:
            return
        if stream.ended_ns:
            tracer.record(SPAN_WRITE, span.traceparent, stream.ended_ns, now_ns)
        if stream.num_placements > 1:
            span.set("deepmesh.resubmissions", stream.num_placements - 1)
        if not stream.is_admitted:
            tracer.record(SPAN_ANSWER, span.traceparent, stream.placed_ns, now_ns)
            return
        admitted_ns = stream.admitted_ns or stream.first_event_ns
        tracer.record(SPAN_ADMISSION, span.traceparent, stream.placed_ns, admitted_ns)
        if timer.num_events:
            first_ns = arrival.start_ns + int(timer.ttft_s * 1e9)
            events: dict[str, str | int | float | bool] = {"events": timer.num_events}
            tracer.record(SPAN_FIRST, span.traceparent, admitted_ns, max(admitted_ns, first_ns))
            tracer.record(SPAN_STREAM, span.traceparent, first_ns, now_ns, events)
            span.set("deepmesh.ttft_ms", timer.ttft_s * 1e3)

    def _finish(self, arrival: Arrival, span: Span, seen: SeenRequest) -> None:
        edge, metrics = self._edge, self._edge.metrics
        seen.end(duration_s := time.monotonic() - arrival.start_s)
        metrics.requests[self._protocol, arrival.status] += 1
        _log.debug(
            "%s %s %s: HTTP %d after %.3f s",
            arrival.rid.hex()[:12],
            arrival.request_id,
            self._route,
            arrival.status,
            duration_s,
            extra=about(arrival.rid, span.traceparent),
        )
        if arrival.status == 200:
            metrics.whole[self._protocol].observe(duration_s)
        span.set("http.response.status_code", arrival.status)
        error = f"HTTP {arrival.status}" if arrival.status >= 500 else ""
        is_slow = 0 < edge.slow_s <= duration_s
        if (error or is_slow) and edge.tracer.enabled and not is_sampled(span.traceparent):
            edge.keep(trace_id_of(span.traceparent))
        span.end(arrival.end_ns, error=error)
