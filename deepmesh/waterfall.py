"""One request out of the trace files: which spans it has, and where its time went. Pure."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from deepmesh.errors import UserError
from deepmesh.telemetry import (
    SPAN_HOP,
    SPAN_REQUEST,
    SPAN_STEP,
    WAITS,
    parse_traceparent,
    trace_id_of,
)


class Span(msgspec.Struct, frozen=True):
    """A line of RUN_DIR/traces/NAME.jsonl."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    process: str
    start_ns: int
    end_ns: int
    kind: str = "internal"
    attributes: dict[str, str | int | float | bool | list[str]] = {}
    status: str = "ok"
    error: str = ""
    links: list[str] = []


class Stage(msgspec.Struct, frozen=True):
    """All spans of one name in a request."""

    name: str
    count: int
    ms: float
    share: float  # of the request's duration; stages overlap, so shares may add up to more than 1


class Hop(msgspec.Struct, frozen=True):
    """All messages of one type from one process to another."""

    message: str
    sender: str
    receiver: str
    count: int
    mean_us: float
    max_us: float


class Gap(msgspec.Struct, frozen=True):
    """A part of the request's time that no span explains."""

    at_ms: float  # from the request's start
    ms: float
    after: str  # the span that ended there; empty: the request's start
    before: str  # the span that begins behind it; empty: the request's end


class Waterfall(msgspec.Struct, frozen=True):
    """What `deepmesh trace` shows."""

    trace_id: str
    start_ns: int
    duration_ms: float
    stages: list[Stage]
    hops: list[Hop]
    uncovered_ms: float  # of the request's duration, in no other span
    spans: list[Span]  # depth first, children by start
    covered: float  # share of the request's duration in other spans
    explained: float  # the same without spans that only wait for others (telemetry.WAITS)
    gaps: list[Gap]  # what is not explained, longest first


class TraceError(UserError):
    """No such trace; the text says what was looked at."""


def read_spans(folder: Path) -> Iterator[Span]:
    """All spans of all processes; the last line may be in the making and is left out then."""
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.1")]):
        for line in path.read_bytes().splitlines():
            try:
                yield msgspec.json.decode(line, type=Span)
            except msgspec.DecodeError:
                continue


def find_trace(spans: Iterable[Span], wanted: str) -> list[Span]:
    """The spans of one trace.

    Args:
        wanted: `last` (request), `step:N`, a trace id or its beginning, or a request id.

    Raises:
        TraceError: nothing fits, or more than one does.
    """
    by_trace: dict[str, list[Span]] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    if not by_trace:
        raise TraceError("no trace is on file yet (telemetry.enabled, telemetry.file?)")
    if wanted == "last":
        requests = [s for group in by_trace.values() for s in group if s.name == SPAN_REQUEST]
        if not requests:
            raise TraceError("no request has ended yet")
        return by_trace[max(requests, key=lambda span: span.start_ns).trace_id]
    if wanted.startswith("step:"):
        return by_trace[_step(by_trace, wanted.removeprefix("step:")).trace_id]
    wanted = _id_of(wanted)
    start = wanted.lower()
    found = [t for t, group in by_trace.items() if t.startswith(start) or _labelled(group, wanted)]
    if len(found) != 1:
        what = "no trace" if not found else f"{len(found)} traces"
        raise TraceError(f"{what} of {len(by_trace)} on file match {wanted!r}")
    return by_trace[found[0]]


def _step(by_trace: dict[str, list[Span]], number: str) -> Span:
    """The root of a group step; a restarted scheduler counts anew, the latest is meant."""
    found = [
        span
        for group in by_trace.values()
        for span in group
        if span.name == SPAN_STEP and str(span.attributes.get("step")) == number
    ]
    if not found:
        raise TraceError(f"no group step {number} is on file")
    return max(found, key=lambda span: span.start_ns)


def _id_of(wanted: str) -> str:
    traceparent = parse_traceparent(wanted)
    return trace_id_of(traceparent) if traceparent else wanted


def _labelled(group: list[Span], wanted: str) -> bool:
    keys = ("deepmesh.request_id", "deepmesh.rid")
    return any(span.attributes.get(key) == wanted for span in group for key in keys)


def build(spans: list[Span]) -> Waterfall:
    """Put the spans of one trace in order and sum up its stages."""
    roots = [span for span in spans if span.name == SPAN_REQUEST] or spans
    root = min(roots, key=lambda span: span.start_ns)
    duration_ns = max(1, root.end_ns - root.start_ns)
    others = [span for span in spans if span is not root]
    stages = [
        Stage(name, len(group), ms := sum(_ms(s) for s in group), round(ms * 1e6 / duration_ns, 4))
        for name, group in _by_name(others).items()
    ]
    covered_ns = duration_ns - sum(ns for _, ns, _, _ in _gaps(others, root))
    gaps = _gaps([span for span in others if span.name not in WAITS], root)
    return Waterfall(
        trace_id=root.trace_id,
        start_ns=root.start_ns,
        duration_ms=duration_ns / 1e6,
        stages=stages,
        hops=_hops(others),
        uncovered_ms=(duration_ns - covered_ns) / 1e6,
        spans=list(_depth_first(spans)),
        covered=covered_ns / duration_ns,
        explained=1 - sum(ns for _, ns, _, _ in gaps) / duration_ns,
        gaps=[
            Gap((at - root.start_ns) / 1e6, ns / 1e6, after, before)
            for at, ns, after, before in sorted(gaps, key=lambda gap: -gap[1])
        ],
    )


def _ms(span: Span) -> float:
    return (span.end_ns - span.start_ns) / 1e6


def _by_name(spans: list[Span]) -> dict[str, list[Span]]:
    groups: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        groups.setdefault(span.name, []).append(span)
    return groups


def _hops(spans: list[Span]) -> list[Hop]:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.name == SPAN_HOP:
            # The receiver records a hop, and names the sender; or the sender does, for both.
            message = str(span.attributes.get("message", "?"))
            receiver = str(span.attributes.get("to", span.process))
            unnamed = span.process if "to" in span.attributes else "?"
            sender = str(span.attributes.get("from", unnamed))
            key = (message, sender, receiver)
            groups.setdefault(key, []).append((span.end_ns - span.start_ns) / 1e3)
    return [
        Hop(*key, count=len(times), mean_us=sum(times) / len(times), max_us=max(times))
        for key, times in groups.items()
    ]


def _gaps(spans: list[Span], root: Span) -> list[tuple[int, int, str, str]]:
    """What of the root lies in none of the spans: start, ns, title of the span before and after."""
    gaps: list[tuple[int, int, str, str]] = []
    until, last = root.start_ns, ""
    for span in sorted(spans, key=lambda span: span.start_ns):
        begin = min(span.start_ns, root.end_ns)
        if begin > until:
            gaps.append((until, begin - until, last, title(span)))
        if span.end_ns > until:
            until, last = span.end_ns, title(span)
    if root.end_ns > until:
        gaps.append((until, root.end_ns - until, last, ""))
    return gaps


def title(span: Span) -> str:
    """Its name; of a hop, which message it was, too."""
    message = span.attributes.get("message")
    return f"{span.name} {message}" if message else span.name


def depths(spans: list[Span]) -> dict[str, int]:
    """How deep each span lies below a span whose parent is not on file."""
    parents = {span.span_id: span.parent_id for span in spans}
    found: dict[str, int] = {}
    for span in spans:
        depth, parent = 0, span.parent_id
        while parent in parents and depth < len(parents):  # a cycle can only come from outside
            depth, parent = depth + 1, parents[parent]
        found[span.span_id] = depth
    return found


def _depth_first(spans: list[Span]) -> Iterator[Span]:
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns), reverse=True):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    stack = children.pop("", [])
    while stack:
        span = stack.pop()
        yield span
        stack += children.pop(span.span_id, [])
