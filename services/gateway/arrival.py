"""What the gateway decides about a request before it looks at anything else."""

import os
import re
import time
from collections.abc import Mapping

import msgspec

from deepmesh.seeds import SEED_BITS
from deepmesh.telemetry import parse_traceparent
from services.gateway.errors import Shape

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")  # printable, no spaces: safe in logs


class Arrival(msgspec.Struct):
    """One HTTP request as it came in.

    `rid` and `seed` travel with every message of the request, so another instance of any service
    behind the gateway repeats its answer. `request_id` is only a label for the client.
    """

    headers: dict[bytes, bytes]
    shape: Shape
    rid: bytes
    seed: int  # 0 <= seed < 2**63
    created_s: int
    start_ns: int  # wall clock, for traces
    start_s: float  # monotonic, for durations
    request_id: str
    parent: str  # inbound traceparent in normal form, or ""
    trace_id: str = ""  # what `deepmesh trace` takes; empty when the trace is not recorded
    status: int = 0  # of the answer, once it has begun
    end_ns: int = 0  # its last byte was out; 0 of one that no tokenizer answered
    key: str = ""  # digest of the caller's API key
    first_number: int = 0  # of the events of its answer: they may be the rest of earlier ones
    headers_out: list[tuple[bytes, bytes]] = []  # what the answer says of the caller's limits


def arrive(path: str, raw_headers: list[tuple[bytes, bytes]]) -> Arrival:
    """Make the ids of a request."""
    headers = dict(raw_headers)
    rid, now_ns = os.urandom(16), time.time_ns()
    return Arrival(
        headers=headers,
        shape=_shape(path, headers),
        rid=rid,
        seed=int.from_bytes(os.urandom(8), "little") >> (64 - SEED_BITS),
        created_s=now_ns // 1_000_000_000,
        start_ns=now_ns,
        start_s=time.monotonic(),
        request_id=_request_id(headers, rid),
        parent=parse_traceparent(headers.get(b"traceparent", b"").decode("latin-1")) or "",
    )


def _shape(path: str, headers: Mapping[bytes, bytes]) -> Shape:
    """Both SDKs list models under the same path; only Anthropic's names its API's version."""
    is_anthropic = path.startswith("/v1/messages") or b"anthropic-version" in headers
    return Shape.ANTHROPIC if is_anthropic else Shape.OPENAI


def _request_id(headers: Mapping[bytes, bytes], rid: bytes) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req_{rid.hex()}"
