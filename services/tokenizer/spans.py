"""The service's spans, made from stamps after the fact."""

from typing import NamedTuple

from deepmesh.telemetry import (
    GEN_AI_CHOICES,
    GEN_AI_MAX_TOKENS,
    GEN_AI_STREAM,
    GEN_AI_TEMPERATURE,
    GEN_AI_TOP_K,
    GEN_AI_TOP_P,
    SPAN_DETOKENIZE,
    SPAN_FINISH,
    SPAN_HOP,
    SPAN_TOKENIZE,
)
from deepmesh.wire.messages import ResponseFailed
from services.tokenizer.actions import NOW, Trace, Value
from services.tokenizer.answers import Answer
from services.tokenizer.generation import Generation
from services.tokenizer.jobs import Follow
from services.tokenizer.refusal import Refusal
from services.tokenizer.request import Request


class Stamps(NamedTuple):
    """Of a message that came in."""

    sender: str
    sent_ns: int
    received_ns: int


def hop_span(message: str, traceparent: str, stamps: Stamps, me: str) -> Trace:
    """A message on its way: sent to received."""
    attributes: dict[str, Value] = {"message": message, "from": stamps.sender, "to": me}
    return Trace(SPAN_HOP, traceparent, stamps.sent_ns, stamps.received_ns, attributes)


def tokenize_span(
    request: Request, outcome: Generation | Answer | Refusal | Follow, num_bytes: int, began_ns: int
) -> Trace:
    """Body in to Generate out, or to the answer that needs none; `wait_us` of it for a thread.

    Args:
        num_bytes: of the body, which is not kept.
        began_ns: when the conversion itself began.
    """
    submit = request.submit
    attributes: dict[str, Value] = {
        "protocol": submit.protocol,
        "body_bytes": num_bytes,
        "wait_us": (began_ns - request.arrived_ns) / 1000,
    }
    error = ""
    match outcome:
        case Generation():
            attributes["prompt_tokens"] = outcome.prompt_len
            attributes |= {
                GEN_AI_MAX_TOKENS: outcome.max_tokens,
                GEN_AI_TEMPERATURE: outcome.sampling.temperature,
                GEN_AI_TOP_P: outcome.sampling.top_p,
                GEN_AI_TOP_K: outcome.sampling.top_k,
                GEN_AI_CHOICES: max(1, len(outcome.choices)),
                GEN_AI_STREAM: outcome.stream,
            }
        case Answer(prompt_tokens=prompt_tokens):
            attributes["prompt_tokens"] = prompt_tokens
        case Refusal(detail=detail):
            error = detail
        case Follow(id=id):
            attributes["response"] = id
    parent, arrived = submit.traceparent, request.arrived_ns
    return Trace(SPAN_TOKENIZE, parent, arrived, NOW, attributes, error)


def finish_span(request: Request, stamps: Stamps) -> Trace:
    """The message that ended it in, to the last words for the gateway out."""
    return Trace(SPAN_FINISH, request.submit.traceparent, stamps.received_ns, NOW, {})


def detokenize_span(request: Request, ended_ns: int) -> Trace | None:
    """First token in to last event out, with the time spent on text alone."""
    if not request.first_token_ns:
        return None
    error = request.end.detail if isinstance(request.end, ResponseFailed) else ""
    attributes: dict[str, Value] = {
        "tokens": request.position,
        "events": request.next_event,
        "busy_us": request.busy_ns / 1000,
        "first_token_ns": request.first_token_ns,
    }
    parent, began = request.submit.traceparent, request.first_token_ns
    return Trace(SPAN_DETOKENIZE, parent, began, ended_ns, attributes, error)
