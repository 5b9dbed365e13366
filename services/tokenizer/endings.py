"""How a request ends: reasons known here, the last message, the span over its text work."""

import numpy as np

from deepmesh.telemetry import SPAN_DETOKENIZE
from deepmesh.wire.messages import FinishReason, ResponseFailed, ResponseFinished
from services.tokenizer.actions import Trace
from services.tokenizer.request import Request


def local_end(request: Request) -> FinishReason | None:
    """The end that the tokens themselves show, when the scheduler's word on it was lost."""
    generation = request.generation
    if generation is None or request.position == 0:
        return None
    last = int.from_bytes(request.output[-4:], "little", signed=True)
    if last in np.frombuffer(generation.stop_ids, "<i4") and (
        request.position > generation.min_tokens
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if request.position >= generation.max_tokens else None


def finished_message(request: Request, first_event: int, events: list[bytes]) -> ResponseFinished:
    """The good end; `events` are those that the gateway does not have yet."""
    generation = request.generation
    if generation is None:  # answered without tokens
        assert isinstance(request.end, ResponseFinished)
        return request.end
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


def detokenize_span(request: Request, now_ns: int) -> Trace | None:
    """First token in to last event out, with the time spent on text alone."""
    if not request.first_token_ns:
        return None
    error = request.end.detail if isinstance(request.end, ResponseFailed) else ""
    attributes: dict[str, str | int | float | bool] = {
        "tokens": request.position,
        "events": request.next_event,
        "busy_us": request.busy_ns / 1000,
        "first_token_ns": request.first_token_ns,
    }
    parent, began = request.submit.traceparent, request.first_token_ns
    return Trace(SPAN_DETOKENIZE, parent, began, now_ns, attributes, error)
