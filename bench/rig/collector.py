"""An OTLP collector in a process of its own: takes what it is sent, and counts the spans."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    num_spans = 0

    def do_POST(self) -> None:
        """A batch."""
        body = self.rfile.read(int(self.headers["content-length"]))
        found = ExportTraceServiceRequest.FromString(body)
        count = sum(len(scope.spans) for each in found.resource_spans for scope in each.scope_spans)
        with _Handler.lock:
            _Handler.num_spans += count
        self._answer(b"")

    def do_GET(self) -> None:
        """How many spans have come."""
        self._answer(str(_Handler.num_spans).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def collector() -> Iterator[str]:
    """Its URL, while it runs."""
    command = [sys.executable, "-m", "bench.rig.collector"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main() -> int:
    """Serve until SIGTERM; the first line of output is the URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
