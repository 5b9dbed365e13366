"""Spans to an OpenTelemetry collector, over OTLP/HTTP. Imported only where one is configured."""

import gzip
import http.client
import os
import ssl
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.util.re import parse_env_headers

from deepmesh import __version__
from deepmesh.trace_export import SpanRecord
from deepmesh.trace_protobuf import Encoder

OTLP_TIMEOUT_S = 2.0  # unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise
RETRY_S = 0.2  # behind an answer that says "later"; at most `MAX_RETRY_S` if it says when
MAX_RETRY_S = 1.0
DEFAULT_ENDPOINT = "http://localhost:4318"
LATER = (429, 502, 503, 504)
_PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": lambda body: zlib.compress(body, 1),
}


def setting(name: str) -> str:
    """OTEL_EXPORTER_OTLP_TRACES_`name`, or the one for all signals; empty if neither is there."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
    return own or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def endpoint() -> str:
    """Where traces go: the variable for traces is a whole URL, the common one a base."""
    if own := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return own
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT
    return f"{base.removesuffix('/')}/v1/traces"


class OtlpSink:
    """Posts each batch over one connection, which stays open."""

    def __init__(self, resource: Mapping[str, str]) -> None:
        """Settings come from the standard variables: OTEL_EXPORTER_OTLP_{ENDPOINT, HEADERS, TIMEOUT
        (s), COMPRESSION, CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY}, each also with TRACES_
        before its last word, and OTEL_RESOURCE_ATTRIBUTES.

        Raises:
            ValueError: the endpoint is no URL.
        """
        described = Resource.create(dict(resource))
        attributes = {
            key: value if isinstance(value, (bool, int, float)) else str(value)
            for key, value in described.attributes.items()
        }
        self._encoder = Encoder(attributes, "deepmesh", __version__, described.schema_url)
        self._timeout_s = float(setting("TIMEOUT") or OTLP_TIMEOUT_S)
        self._pack = _PACKED.get(setting("COMPRESSION").strip().lower())
        self._headers = {
            "content-type": "application/x-protobuf",
            "user-agent": f"deepmesh/{__version__}",
            **parse_env_headers(setting("HEADERS"), liberal=True),
        }
        if self._pack is not None:
            self._headers["content-encoding"] = setting("COMPRESSION").strip().lower()
        url = urlsplit(endpoint())
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"OTEL_EXPORTER_OTLP_ENDPOINT: {endpoint()!r} is no http URL")
        self._path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._connection = self._connect(url.scheme, url.hostname, url.port)

    def _connect(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        context = ssl.create_default_context(cafile=setting("CERTIFICATE") or None)
        if certificate := setting("CLIENT_CERTIFICATE"):
            context.load_cert_chain(certificate, setting("CLIENT_KEY") or None)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)

    def export(self, spans: Sequence[SpanRecord]) -> bool:
        """One request to the collector, and a second one if it asks for that."""
        body = self._encoder.request(spans)
        if self._pack is not None:
            body = self._pack(body)
        try:
            status, wait_s = self._post(body)
            if status in LATER:
                time.sleep(wait_s)
                status, _ = self._post(body)
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return False
        return 200 <= status < 300

    def _post(self, body: bytes) -> tuple[int, float]:
        """The status, and how long to wait before another try (s)."""
        is_old = self._connection.sock is not None
        try:
            answer = self._ask(body)
        except (ConnectionError, http.client.RemoteDisconnected):
            self._connection.close()
            if not is_old:
                raise
            answer = self._ask(body)  # the collector had closed a connection that was idle
        answer.read()
        asked = answer.headers.get("retry-after", "")
        wait_s = float(asked) if asked.isdecimal() else RETRY_S
        return answer.status, min(wait_s, MAX_RETRY_S)

    def _ask(self, body: bytes) -> http.client.HTTPResponse:
        self._connection.request("POST", self._path, body, self._headers)
        return self._connection.getresponse()

    def close(self) -> None:
        """Close its connection."""
        self._connection.close()
