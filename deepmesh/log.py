"""Log lines of a service on stderr, which `up` puts in a file: as text, or one JSON object each.

Lines about a request carry its id and that of its trace (`extra=about(…)`), so that a log store can
lead from a line to the trace and back.
"""

import logging
import sys
import time
from typing import Literal, get_args

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

_TEXT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s {name} %(message)s"
_ABOUT = ("request_id", "trace_id")
MAX_CHARACTERS = 16_384  # of a line, tracebacks included


def about(rid: bytes, traceparent: str) -> dict[str, str]:
    """For `extra=` of a line about a request; its trace is named if it may be recorded."""
    return {"request_id": rid.hex(), "trace_id": traceparent[3:35]}


class TextFormatter(logging.Formatter):
    """UTC time, level, process, text; the trace behind it."""

    def __init__(self, name: str) -> None:
        super().__init__(_TEXT.format(name=name), datefmt="%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """One line, and those of a traceback."""
        text, trace_id = _short(super().format(record)), getattr(record, "trace_id", "")
        return f"{text} trace={trace_id}" if trace_id else text


class JsonFormatter(logging.Formatter):
    """One object a line, with the names that OpenTelemetry's log model has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """The object; a traceback is in it."""
        fields: dict[str, str] = {
            "timestamp": f"{_utc(record.created)}Z",
            "severity_text": record.levelname,
            "process": self._name,
            "logger": record.name,
            "body": _short(record.getMessage()),
        }
        fields |= {key: found for key in _ABOUT if (found := getattr(record, key, ""))}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def _short(text: str) -> str:
    """Much of a line may be another one's word."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} … ({len(text)})"


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1e6):06d}"


def setup(name: str, level: Level, form: Format = "text") -> None:
    """Send all log records of this process to stderr; `name` is "gateway-0"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(name) if form == "json" else TextFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Change what is logged from here on; an unknown level changes nothing."""
    if level in get_args(Level):
        logging.getLogger().setLevel(level.upper())
