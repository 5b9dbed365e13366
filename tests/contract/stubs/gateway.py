"""A gateway on the standard library: `gateway.py --listen http://HOST:PORT --dial TOKENIZER`."""

import json
import os
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from link import Message, Node, options

ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
STATUS = {1: 400, 2: 400, 3: 404, 4: 401, 5: 429, 6: 503, 8: 503, 9: 400, 10: 408}
BEAT_S = 0.3


class Stream:
    """One open connection."""

    def __init__(self, protocol: str, body: bytes) -> None:
        self.rid = os.urandom(16)
        self.submit = [self.rid, protocol, body, int.from_bytes(os.urandom(7), "big")]
        self.mail: queue.Queue[Message] = queue.Queue()
        self.num_events, self.tokenizer = 0, ""


class Gateway:
    """Moves mail between the one thread of the links and a thread for each connection."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.orders: queue.Queue[tuple[str, Stream]] = queue.Queue()
        self.streams: dict[bytes, Stream] = {}

    @property
    def is_ready(self) -> bool:
        stats = [link.stats for link in self.node.links.values()]
        return any(r[1] for found in stats if found and found[2:] for r in found[2])

    def on_message(self, peer: str, message: Message) -> None:
        match message:
            case ["DeltaBatch", list() as deltas]:
                for delta in deltas:
                    if isinstance(delta, list) and len(delta) > 2:
                        self.give(delta[0], ["Delta", *delta])
            case [("ResponseFinished" | "ResponseFailed"), bytes() as rid, int(), *_]:
                self.give(rid, message)
            case _:
                pass

    def give(self, rid: object, message: Message) -> None:
        if isinstance(rid, bytes) and rid in self.streams:
            self.streams[rid].mail.put(message)

    def on_down(self, name: str) -> None:
        for stream in self.streams.values():
            if stream.tokenizer == name:
                stream.tokenizer = ""

    def on_idle(self) -> None:
        while not self.orders.empty():
            order, stream = self.orders.get()
            if order == "open":
                self.streams[stream.rid] = stream
            elif self.streams.pop(stream.rid, None) and order == "cancel":
                self.node.send(stream.tokenizer, "Cancel", stream.rid)
        for stream in self.streams.values():
            if not stream.tokenizer and self.node.links:
                stream.tokenizer = min(self.node.links)
                rest = ["", b"", 0, 0, "", stream.num_events, 1]
                self.node.send(stream.tokenizer, "Submit", *stream.submit, *rest)


class Handler(BaseHTTPRequestHandler):
    """One connection, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    gateway: Gateway
    is_open = False

    def do_GET(self) -> None:
        ready = self.gateway.is_ready
        self.reply(200 if ready else 503, json.dumps({"ready": ready}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path not in ROUTES:
            self.fail(404, f"there is no {self.path} here")
            return
        stream = Stream(ROUTES[self.path], body)
        self.gateway.orders.put(("open", stream))
        try:
            while not self.take(stream, self.next_of(stream)):
                pass
            self.gateway.orders.put(("done", stream))
        except OSError:
            self.gateway.orders.put(("cancel", stream))

    def next_of(self, stream: Stream) -> Message:
        while True:
            try:
                return stream.mail.get(timeout=BEAT_S)
            except queue.Empty:
                if self.is_open:
                    self.write(b": wait\n\n")

    def take(self, stream: Stream, message: Message) -> bool:
        """Write what came; whether it was the end."""
        match message:
            case ["Delta", _, int() as first, list() as events, *_]:
                self.write_events(stream, first, events)
                return False
            case ["ResponseFinished", _, status, *rest]:
                body, first, events = [*rest[:3], *[b"", 0, []][len(rest[:3]) :]]
                self.write_events(stream, first, events)
                if self.is_open:
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    self.reply(status, body)
            case ["ResponseFailed", _, code, detail, *_]:
                self.fail(STATUS.get(code, 500), detail)
            case _:
                pass
        return True

    def write_events(self, stream: Stream, first: int, events: list[bytes]) -> None:
        fresh = events[max(stream.num_events - first, 0) :]
        if fresh and not self.is_open:
            self.is_open = True
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
        for event in fresh:
            self.write(event)
            stream.num_events += 1

    def write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def fail(self, status: int, detail: str) -> None:
        error = json.dumps({"error": {"message": detail, "type": "error"}}).encode()
        if self.is_open:
            self.write(b"data: " + error + b"\n\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.reply(status, error)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if status in (429, 503):
            self.send_header("retry-after", "1")
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        super().end_headers()
        self.wfile.flush()


if __name__ == "__main__":
    given = options()
    node = Node("gateway", "gateway-0")
    for address in given["dial"]:
        node.dial(address)
    Handler.gateway = gateway = Gateway(node)
    url = urlsplit(given["listen"][0])
    server = ThreadingHTTPServer((url.hostname or "127.0.0.1", url.port or 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    node.run(gateway.on_message, gateway.on_down, gateway.on_idle)
