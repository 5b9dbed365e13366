"""Spans as OTLP protobuf, written straight from our records.

The SDK's objects cost some 49 us a span, this 3: what repeats (names, kinds, short attributes) is
encoded once. Field numbers are those of opentelemetry-proto's trace.proto; tests compare what they
parse with what the SDK's own encoder makes.
"""

import struct
from collections.abc import Mapping, Sequence

from deepmesh.trace_export import SpanRecord, Value

MAX_CACHED = 8192  # pieces; then all are forgotten
MAX_CACHED_CHARS = 64  # of a text that is worth keeping
MAX_VALUES = 64  # of one attribute: one with more is an id, whose values do not come again

_ATTRIBUTE = b"\x4a"  # of a span
_KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_BODY = struct.Struct("<2s8scQcQ")  # span id, start, end
_LINK = struct.Struct("<4s16s2s8scI")
_DOUBLE = struct.Struct("<d")
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_START, _END = b"\x39", b"\x41"
_LINK_HEAD = b"\x6a\x21\x0a\x10"  # Span.links, 33 bytes, and the link's trace id
_LINK_FLAGS = b"\x35"
_KNOWN, _REMOTE = 0x100, 0x300  # of a context: it is known whether it is remote; and it is
_FLAGS = b"\x85\x01"
_NO_STATUS = b"\x7a\x00"
_LOW_64 = (1 << 64) - 1


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a negative one as 64-bit two's complement."""
    if 0 <= value < 0x80:
        return _SMALL[value]
    if 0 <= value < 0x4000:
        return bytes((value & 127 | 128, value >> 7))
    if 0 <= value < 0x20_0000:
        return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14))
    value &= _LOW_64
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


_SMALL = [bytes((value,)) for value in range(128)]


def delimited(tag: bytes, body: bytes) -> bytes:
    """A field with its length in front."""
    return tag + varint(len(body)) + body


def text(tag: bytes, value: str) -> bytes:
    """A string field; what UTF-8 cannot say becomes a question mark."""
    return delimited(tag, value.encode("utf-8", "replace"))


_NOTHING: dict[object, bytes] = {}


class Encoder:
    """Spans of one resource and scope; used by one thread at a time."""

    def __init__(
        self, resource: Mapping[str, Value], scope: str, version: str, schema_url: str = ""
    ) -> None:
        """
        Args:
            schema_url: of the resource.
        """
        attributes = b"".join(self._plain(b"\x0a", *each) for each in resource.items())
        named = text(b"\x0a", scope) + text(b"\x12", version)
        self._resource = delimited(b"\x0a", attributes)
        self._schema_url = text(b"\x1a", schema_url) if schema_url else b""
        self._scope = delimited(b"\x0a", named)
        self.num_cached = 0
        self._forget()

    def _forget(self) -> None:
        # by kind, then name, for roots and for children; by parent; by key, then value
        self._names = [{kind: dict[str, bytes]() for kind in _KINDS} for _ in range(2)]
        self._parents: dict[str, bytes] = {}
        self._texts: dict[str, dict[Value, bytes]] = {}  # flags and lists, too
        self._ints: dict[str, dict[int, bytes]] = {}
        self._doubles: dict[str, bytes] = {}  # all but the number
        self._heads: dict[tuple[str, int], bytes] = {}  # all but a text of so many bytes

    def request(self, spans: Sequence[SpanRecord]) -> bytes:
        """An ExportTraceServiceRequest."""
        if self.num_cached > MAX_CACHED:
            self.num_cached = 0
            self._forget()
        encoded: list[bytes] = [self._scope]
        for span in spans:
            body = self._span(span)
            encoded += (b"\x12", varint(len(body)), body)
        scope_spans = delimited(b"\x12", b"".join(encoded))
        return delimited(b"\x0a", self._resource + scope_spans + self._schema_url)

    def _span(self, span: SpanRecord) -> bytes:
        # One long function: a call for each attribute would double what a span costs.
        name, own, parent, start_ns, end_ns, attributes, links, error, kind = span
        if parent:
            head = self._parents.get(parent) or self._parent(parent)
        else:
            head = _TRACE_ID + bytes.fromhex(own[3:35])
        span_id = bytes.fromhex(own[36:52])
        named = self._names[bool(parent)][kind].get(name) or self._named(name, kind, bool(parent))
        times = _BODY.pack(_SPAN_ID, span_id, _START, start_ns & _LOW_64, _END, end_ns & _LOW_64)
        parts = [head, times, named]
        texts, ints, doubles = self._texts, self._ints, self._doubles
        for key, value in attributes.items():
            what = type(value)  # a bool is an int, and equal to one: not isinstance
            if what is str:
                parts.append(texts.get(key, _NOTHING).get(value) or self._text(key, value))  # pyright: ignore[reportArgumentType]
            elif what is int:
                number = varint(value)  # pyright: ignore[reportArgumentType]
                parts.append(ints.get(key, _NOTHING).get(len(number)) or self._int(key, number))
                parts.append(number)
            elif what is float:
                parts.append(doubles.get(key) or self._double(key))
                parts.append(_DOUBLE.pack(value))
            else:
                parts.append(texts.get(key, _NOTHING).get(value) or self._keep(key, value))
        if links:
            parts += map(_link, links)
        parts.append(_status(error) if error else _NO_STATUS)
        return b"".join(parts)

    def _parent(self, parent: str) -> bytes:
        """Trace id, which is the parent's, and the parent's id: a process makes several spans below
        each parent."""
        trace_id, span_id = bytes.fromhex(parent[3:35]), bytes.fromhex(parent[36:52])
        found = _TRACE_ID + trace_id + _PARENT_ID + span_id
        self._parents[parent] = found
        self.num_cached += 1
        return found

    def _named(self, name: str, kind: str, has_parent: bool) -> bytes:
        flags = _FLAGS + (_REMOTE if has_parent else _KNOWN).to_bytes(4, "little")
        found = text(b"\x2a", name) + b"\x30" + varint(_KINDS[kind]) + flags
        self._names[has_parent][kind][name] = found
        self.num_cached += 1
        return found

    def _text(self, key: str, value: str) -> bytes:
        if len(value) > MAX_CACHED_CHARS:
            return self._plain(_ATTRIBUTE, key, value)
        if len(self._texts.get(key, _NOTHING)) < MAX_VALUES:
            return self._keep(key, value)
        raw = value.encode("utf-8", "replace")
        head = self._heads.get((key, len(raw)))
        if head is None:
            whole = self._plain(_ATTRIBUTE, key, value)
            head = self._heads[key, len(raw)] = whole[: len(whole) - len(raw)]
        return head + raw

    def _keep(self, key: str, value: Value) -> bytes:
        """Encode a value and keep that, while there are few of its key."""
        found = self._plain(_ATTRIBUTE, key, value)
        known = self._texts.setdefault(key, {})
        if len(known) < MAX_VALUES:
            known[value] = found
            self.num_cached += 1
        return found

    def _int(self, key: str, number: bytes) -> bytes:
        """All that comes before a number of this length."""
        value = delimited(b"\x12", b"\x18" + number)
        found = delimited(_ATTRIBUTE, text(b"\x0a", key) + value)[: -len(number)]
        self._ints.setdefault(key, {})[len(number)] = found
        return found

    def _double(self, key: str) -> bytes:
        found = self._doubles[key] = self._plain(_ATTRIBUTE, key, 0.0)[: -_DOUBLE.size]
        return found

    @staticmethod
    def _plain(tag: bytes, key: str, value: Value) -> bytes:
        """A KeyValue."""
        return delimited(tag, text(b"\x0a", key) + delimited(b"\x12", _any(value)))


def _any(value: Value) -> bytes:
    """An AnyValue."""
    match value:
        case str():
            return text(b"\x0a", value)
        case bool():
            return b"\x10" + varint(value)
        case int():
            return b"\x18" + varint(value)
        case float():
            return b"\x21" + _DOUBLE.pack(value)
        case _:
            return delimited(b"\x2a", b"".join(delimited(b"\x0a", _any(one)) for one in value))


def _link(traceparent: str) -> bytes:
    trace_id, span_id = bytes.fromhex(traceparent[3:35]), bytes.fromhex(traceparent[36:52])
    return _LINK.pack(_LINK_HEAD, trace_id, _SPAN_ID, span_id, _LINK_FLAGS, _REMOTE)


def _status(error: str) -> bytes:
    return delimited(b"\x7a", text(b"\x12", error) + b"\x18\x02")
