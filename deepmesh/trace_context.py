"""W3C Trace Context: who a trace and a span are, as it travels in headers and messages."""

import os
import random
import re
from functools import lru_cache

_HEX = "([0-9a-f]{%d})"
_TRACEPARENT = re.compile(f"{_HEX % 2}-{_HEX % 32}-{_HEX % 16}-{_HEX % 2}(-.*)?")
_LENGTH = 55  # of version 00
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


def new_traceparent(sampled: bool = True) -> str:
    """A fresh root context. For a request start its root span (`Tracer.start`) instead: that one
    applies telemetry.sample_ratio, and its `traceparent` is the parent of all that follows."""
    return make_traceparent(random_bits(128), random_bits(64), sampled)


def parse_traceparent(header: str) -> str | None:
    """The header as version 00 in lower case, or None if W3C Trace Context calls it invalid."""
    return _parse_known(header) if len(header) == _LENGTH else _parse(header)


def _parse(header: str) -> str | None:
    match = _TRACEPARENT.fullmatch(header.strip().lower())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest):
        return None  # ff is forbidden; a later version may append fields, version 00 may not
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return f"00-{trace_id}-{span_id}-{'01' if int(flags, 16) & 1 else '00'}"


_parse_known = lru_cache(1024)(_parse)  # a process sees each parent several times


def is_sampled(traceparent: str) -> bool:
    """Whether spans of this (normalised) trace context are recorded."""
    return traceparent.endswith("1")


def trace_id_of(traceparent: str) -> str:
    """The 32 hex digits that `deepmesh trace` takes."""
    return traceparent[3:35]


def make_traceparent(trace_id: int, span_id: int, sampled: bool) -> str:
    """Version 00."""
    return f"00-{trace_id:032x}-{span_id:016x}-{'01' if sampled else '00'}"


def random_bits(count: int) -> int:
    """A fresh id."""
    while (value := _ids.getrandbits(count)) == 0:
        pass  # all zero means "no id"
    return value


_ids = random.Random(os.urandom(32))  # not the global one: tests and users seed that
