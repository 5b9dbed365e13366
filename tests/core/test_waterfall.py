"""One request out of trace files: which one, in what order, and the sums."""

import json
from pathlib import Path

import pytest

from deepmesh.waterfall import Hop, Span, Stage, TraceError, build, depths, find_trace, read_spans

A, B = "a" * 32, "ab" * 16


def span(name: str, start_ms: float, end_ms: float, parent: str = "", **other: object) -> Span:
    fields: dict[str, object] = {
        "trace_id": A,
        "span_id": f"{name}@{start_ms}",
        "process": "tokenizer-0",
        "attributes": {},
        **other,
    }
    return Span(
        trace_id=str(fields["trace_id"]),
        span_id=str(fields["span_id"]),
        parent_id=parent,
        name=name,
        service="tokenizer",
        process=str(fields["process"]),
        start_ns=int(start_ms * 1e6),
        end_ns=int(end_ms * 1e6),
        attributes=fields["attributes"],  # type: ignore[arg-type]
    )


def hop(start_ms: float, end_ms: float, process: str) -> Span:
    attributes = {"message": "Submit", "from": "gateway-0"}
    return span("hop", start_ms, end_ms, "request@0", process=process, attributes=attributes)


REQUEST = [
    span("decode", 4, 9, "request@0"),
    hop(1, 1.5, "tokenizer-0"),
    span("request", 0, 10, "from-the-client"),
    span("detokenize", 5, 9.5, "decode@4"),
    span("tokenize", 1.5, 2.5, "hop@1"),
    hop(2.5, 2.75, "tokenizer-0"),
]


def test_spans_come_depth_first_with_children_by_start() -> None:
    waterfall = build(REQUEST)
    names = [(s.name, depths(waterfall.spans)[s.span_id]) for s in waterfall.spans]
    assert names == [
        ("request", 0),
        ("hop", 1),
        ("tokenize", 2),
        ("hop", 1),
        ("decode", 1),
        ("detokenize", 2),
    ]


def test_the_sums_are_shares_of_the_request() -> None:
    waterfall = build(REQUEST)
    assert waterfall.duration_ms == 10
    assert waterfall.stages == [
        Stage("hop", 2, 0.75, 0.075),
        Stage("tokenize", 1, 1.0, 0.1),
        Stage("decode", 1, 5.0, 0.5),
        Stage("detokenize", 1, 4.5, 0.45),
    ]
    assert waterfall.hops == [Hop("Submit", "gateway-0", "tokenizer-0", 2, 375.0, 500.0)]
    # 0-1, 2.75-4 and 9.5-10 lie in no other span
    assert waterfall.uncovered_ms == pytest.approx(2.75)
    assert waterfall.covered == pytest.approx(0.725)


def test_spans_that_only_wait_cover_and_explain_nothing() -> None:
    waterfall = build([*REQUEST, span("first token", 2.5, 5), span("stream", 5, 10)])
    assert waterfall.covered == pytest.approx(0.9)  # all but 0-1
    # nor does detokenize: it lasts as long as tokens come
    assert waterfall.explained == pytest.approx(0.675)
    assert [(g.at_ms, g.ms, g.after, g.before) for g in waterfall.gaps] == [
        (2.75, 1.25, "hop Submit", "decode"),
        (0.0, 1.0, "", "hop Submit"),
        (9.0, 1.0, "decode", ""),
    ]


def test_spans_beyond_the_request_explain_only_what_lies_in_it() -> None:
    waterfall = build([span("request", 0, 10), span("decode", -5, 4), span("finish", 8, 15)])
    assert waterfall.explained == pytest.approx(0.6)
    assert [(g.at_ms, g.ms) for g in waterfall.gaps] == [(4.0, 4.0)]


def test_a_trace_without_its_request_is_shown_too() -> None:
    waterfall = build([span("group step", 3, 4), span("forward", 3.2, 3.9, "group step@3")])
    assert [s.name for s in waterfall.spans] == ["group step", "forward"]
    assert waterfall.duration_ms == pytest.approx(1)


def test_a_cycle_of_parents_from_outside_ends() -> None:
    loop = [span("x", 0, 1, "y@0"), span("y", 0, 1, "x@0")]
    assert set(depths(loop).values()) <= {0, 1, 2}


def spans_of_two() -> list[Span]:
    labelled = {"deepmesh.request_id": "req_7", "deepmesh.rid": "0f"}
    return [
        span("request", 5, 6, attributes=labelled),
        span("request", 9, 11, trace_id=B),
        span("group step", 20, 21, trace_id="c" * 32, attributes={"step": 4}),
        span("group step", 30, 31, trace_id="d" * 32, attributes={"step": 4}),
    ]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("last", B),
        (A, A),
        ("aa", A),
        ("AB", B),
        (f"00-{B}-{'1' * 16}-01", B),
        ("req_7", A),
        ("0f", A),
        ("step:4", "d" * 32),
    ],
)
def test_a_trace_is_found_by_what_a_user_has(wanted: str, found: str) -> None:
    assert {s.trace_id for s in find_trace(spans_of_two(), wanted)} == {found}


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("a", "2 traces of 4 on file match 'a'"),
        ("f00", "no trace of 4 on file match"),
        ("step:5", "no group step 5"),
    ],
)
def test_what_is_not_found_or_not_unique_is_said(wanted: str, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        find_trace(spans_of_two(), wanted)


def test_nothing_on_file_is_said() -> None:
    with pytest.raises(TraceError, match="no trace is on file yet"):
        find_trace([], "last")
    with pytest.raises(TraceError, match="no request has ended yet"):
        find_trace([span("group step", 0, 1)], "last")


def test_a_line_in_the_making_and_a_rotated_file(tmp_path: Path) -> None:
    line = {
        "trace_id": A,
        "span_id": "1",
        "parent_id": "",
        "name": "request",
        "service": "gateway",
        "process": "gateway-0",
        "start_ns": 1,
        "end_ns": 2,
        "field of a later version": 3,
    }
    whole = json.dumps(line)
    (tmp_path / "gateway-0.jsonl").write_text(whole + "\n" + whole[:40])
    (tmp_path / "gateway-0.jsonl.1").write_text(whole + "\n")
    assert len(list(read_spans(tmp_path))) == 2
