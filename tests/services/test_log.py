"""Log lines as their readers see them: text, or JSON that leads to a trace."""

import json
import logging
import sys

from deepmesh.log import JsonFormatter, TextFormatter, about
from deepmesh.telemetry import new_traceparent, trace_id_of

RID = bytes(range(16))


def record(text: str, traceparent: str = "") -> logging.LogRecord:
    made = logging.LogRecord("deepmesh.test", logging.WARNING, "f", 1, "%s: %d", (text, 7), None)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    if traceparent:
        made.__dict__.update(about(RID, traceparent))
    return made


def test_a_json_line_names_request_and_trace() -> None:
    trace = new_traceparent()
    line = JsonFormatter("gateway-0").format(record('a "quoted"\nline', trace))
    assert "\n" not in line
    assert json.loads(line) == {
        "timestamp": "2023-11-14T22:13:20.250000Z",
        "severity_text": "WARNING",
        "process": "gateway-0",
        "logger": "deepmesh.test",
        "body": 'a "quoted"\nline: 7',
        "request_id": RID.hex(),
        "trace_id": trace_id_of(trace),
    }


def test_a_traceback_is_within_its_line() -> None:
    made = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonFormatter("gateway-0").format(made)
    assert "\n" not in line
    assert "ValueError: why" in json.loads(line)["exception"]
    assert "trace_id" not in json.loads(line)


def test_a_text_line_ends_with_its_trace() -> None:
    trace = new_traceparent()
    line = TextFormatter("gateway-0").format(record("hello", trace))
    assert line == f"2023-11-14T22:13:20.250Z WARNING gateway-0 hello: 7 trace={trace_id_of(trace)}"
    assert TextFormatter("gateway-0").format(record("hello")).endswith("hello: 7")
