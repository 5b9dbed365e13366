"""What went wrong, as an HTTP status and as a body in the caller's protocol shape. Pure."""

import math
from enum import Enum
from typing import NamedTuple

import msgspec

from deepmesh.wire.messages import ErrorCode, ResponseFailed

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID: 400,
    ErrorCode.TOO_LONG: 400,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.DEADLINE: 503,
    ErrorCode.ENGINE_ERROR: 500,
    ErrorCode.ENGINE_RESTARTED: 503,
    ErrorCode.GRAMMAR: 400,
    ErrorCode.SLOW_CONSUMER: 408,
    ErrorCode.UNKNOWN: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.MISMATCH: 503,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.CANCELLED: 409,
}

CODE_NAME: dict[ErrorCode, str] = {
    ErrorCode.INVALID: "invalid_request",
    ErrorCode.TOO_LONG: "context_length_exceeded",
    ErrorCode.UNKNOWN_MODEL: "model_not_found",
    ErrorCode.UNAUTHORIZED: "invalid_api_key",
    ErrorCode.OVERLOADED: "rate_limit_exceeded",
    ErrorCode.DEADLINE: "deadline_exceeded",
    ErrorCode.ENGINE_ERROR: "engine_error",
    ErrorCode.ENGINE_RESTARTED: "engine_restarted",
    ErrorCode.GRAMMAR: "invalid_grammar",
    ErrorCode.SLOW_CONSUMER: "slow_consumer",
    ErrorCode.UNKNOWN: "internal_error",
    ErrorCode.INTERNAL: "internal_error",
    ErrorCode.MISMATCH: "engine_mismatch",
    ErrorCode.NOT_FOUND: "not_found",
    ErrorCode.CANCELLED: "cancelled",
}

_OPENAI_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RETRY_AFTER_S = 1.0  # when nobody knows better


class Shape(Enum):
    """Whose error objects the caller's SDK understands."""

    OPENAI = 0
    ANTHROPIC = 1


class Problem(NamedTuple):
    """Why a request gets no good answer."""

    status: int
    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class ProblemError(Exception):
    """Ends the handling of a request with this answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(failed: ResponseFailed) -> Problem:
    """The answer for a request that failed behind the gateway."""
    return problem(failed.code, failed.detail, failed.param, failed.retry_after_s)


def problem(code: ErrorCode, message: str, param: str = "", retry_after_s: float = 0.0) -> Problem:
    """A problem with the status and name of `code`."""
    return Problem(HTTP_STATUS[code], CODE_NAME[code], message, param, retry_after_s)


def retry_after(found: Problem) -> str:
    """Value of the Retry-After header in whole seconds; empty when a retry is no use."""
    if found.status not in (429, 503):
        return ""
    return str(math.ceil(found.retry_after_s or _RETRY_AFTER_S))


def body(found: Problem, shape: Shape, request_id: str) -> bytes:
    """The JSON body of an error answer."""
    if shape is Shape.ANTHROPIC:
        return msgspec.json.encode(_anthropic(found, request_id))
    return msgspec.json.encode({"error": _openai(found)})


def event(found: Problem, protocol: str, request_id: str, next_event: int) -> bytes:
    """The last server-sent event of a stream that failed after its headers went out."""
    if protocol == "messages":
        return b"event: error\ndata: " + body(found, Shape.ANTHROPIC, request_id) + b"\n\n"
    if protocol in ("responses", "response"):
        error = {
            "type": "error",
            "code": found.code,
            "message": found.message,
            "param": found.param or None,
            "sequence_number": next_event,
        }
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    return b"data: " + body(found, Shape.OPENAI, request_id) + b"\n\n"


def _openai(found: Problem) -> dict[str, str | None]:
    default = "server_error" if found.status >= 500 else "invalid_request_error"
    return {
        "message": found.message,
        "type": _OPENAI_TYPE.get(found.status, default),
        "param": found.param or None,
        "code": found.code,
    }


def _anthropic(found: Problem, request_id: str) -> dict[str, object]:
    default = "api_error" if found.status >= 500 else "invalid_request_error"
    message = found.message
    if found.param and found.param not in message:
        message = f"{found.param}: {message}"  # this shape has no field for it
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC_TYPE.get(found.status, default), "message": message},
        "request_id": request_id,
    }
