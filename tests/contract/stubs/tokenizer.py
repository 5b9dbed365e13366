"""A tokenizer whose text is made of letters: `tokenizer.py --listen ADDRESS --dial SCHEDULER`.

Chat only. A prompt id is 600 + a byte of the last message, an output id is one letter.
"""

import json
import struct
from typing import Any

from link import Message, Node, options

INVALID, UNKNOWN, ADMITTED = 1, 11, 1
REASONS = {1: "stop", 2: "length", 3: "abort"}


class Refusal(Exception):
    """What is wrong with a body, and with which field."""


class Request:
    """One chat, from Submit to its end and a while beyond."""

    def __init__(self, gateway: str, fields: list[Any]) -> None:
        self.rid, protocol, body, self.seed = fields[:4]
        self.gateway, self.scheduler, self.attempt = gateway, "", 0
        self.withheld = fields[9] if len(fields) > 9 else 0
        self.created = fields[10] if len(fields) > 10 else 0
        self.out: list[int] = []
        self.events: list[bytes] = []
        self.end: Message | None = None
        if protocol != "chat":
            raise Refusal("only chat is served", "")
        try:
            self.body = json.loads(body)
            text = self.body["messages"][-1]["content"]
            self.prompt = [600 + byte for byte in text.encode()]
        except ValueError as error:
            raise Refusal(f"the body is no JSON: {error}", "") from error
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Refusal("messages: a list of messages with text", "messages") from error
        self.stream = bool(self.body.get("stream"))

    def generate(self, me: str) -> Message:
        ids = struct.pack(f"<{len(self.prompt)}i", *self.prompt)
        out = struct.pack(f"<{len(self.out)}i", *self.out)
        sampling = [float(self.body.get("temperature", 1.0))]
        seed, most = self.body.get("seed", self.seed), self.body.get("max_tokens", 16)
        request = [self.rid, self.attempt, me, ids, len(self.prompt), out, sampling, seed, 0, b""]
        return ["Generate", *request, most]

    def chunk(self, delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {"id": self.rid.hex(), "object": "chat.completion.chunk", "choices": [choice]}
        return f"data: {json.dumps(chunk | {'created': self.created})}\n\n".encode()

    def answer(self, reason: str) -> bytes:
        message = {"role": "assistant", "content": "".join(map(letter, self.out))}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.out)}
        body = {"id": self.rid.hex(), "object": "chat.completion", "choices": [choice]}
        return json.dumps(body | {"usage": usage}).encode()


def letter(token: int) -> str:
    return chr(97 + token % 26)


class Tokenizer:
    """Requests by rid."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.requests: dict[bytes, Request] = {}

    def on_message(self, peer: str, message: Message) -> None:
        try:
            match message:
                case ["Submit", bytes() as rid, str(), bytes(), int(), *_]:
                    self.submit(peer, rid, message[1:])
                case ["Cancel", bytes() as rid]:
                    if request := self.requests.pop(rid, None):
                        self.node.send(request.scheduler, "Abort", rid, request.attempt)
                case ["TokenBatch", _, _, list() as rows]:
                    for rid, pos, ids, *_ in rows:
                        self.tokens(rid, pos, ids)
                case ["Accepted", bytes() as rid, *_] if rid in self.requests:
                    self.deliver(self.requests[rid], [], flags=ADMITTED)
                case [("Finished" | "Failed") as tag, bytes() as rid, int() as code, *rest]:
                    self.node.send(peer, "Ack", [[rid, 0, code != UNKNOWN or tag == "Finished"]])
                    if (request := self.requests.get(rid)) and request.end is None:
                        self.ended(request, tag, code, rest)
                case _:
                    pass
        except (TypeError, ValueError, struct.error):
            pass  # a message of the wrong shape

    def submit(self, gateway: str, rid: bytes, fields: list[Any]) -> None:
        request = self.requests.get(rid)
        if request is not None:
            request.gateway, request.withheld = gateway, fields[9] if len(fields) > 9 else 0
            self.deliver(request, request.events, 0, ADMITTED)
            if request.end is not None:
                self.node.send(gateway, *request.end)
            return
        try:
            self.requests[rid] = request = Request(gateway, fields)
        except Refusal as refusal:
            self.node.send(gateway, "ResponseFailed", rid, INVALID, *refusal.args, 0.0)

    def tokens(self, rid: bytes, pos: int, packed: bytes) -> None:
        request = self.requests.get(rid)
        if request is None or request.end is not None:
            return
        if pos > len(request.out):
            have, me = len(request.out), self.node.me[1]
            self.node.send(request.scheduler, "Attach", rid, request.attempt, me, have)
            return
        new = struct.unpack(f"<{len(packed) // 4}i", packed)[len(request.out) - pos :]
        request.out += new
        self.deliver(request, [request.chunk({"content": letter(token)}) for token in new])

    def deliver(
        self, request: Request, events: list[bytes], first: int | None = None, flags: int = 0
    ) -> None:
        """Events that the gateway does not have yet."""
        if not request.stream:
            return
        if first is None:
            first = len(request.events)
            request.events += events
        skip = min(max(request.withheld - first, 0), len(events))
        if events[skip:] or flags:
            delta = [request.rid, first + skip, events[skip:], flags]
            self.node.send(request.gateway, "DeltaBatch", [delta])

    def ended(self, request: Request, tag: str, code: int, rest: list[Any]) -> None:
        if tag == "Failed" and code == UNKNOWN:
            request.scheduler = ""  # `on_idle` sends it again
            return
        if tag == "Failed":
            request.end = ["ResponseFailed", request.rid, code, *rest[:3]]
        else:
            reason, counts = REASONS[code], [len(request.prompt), 0, len(request.out)]
            self.deliver(request, [request.chunk({}, reason), b"data: [DONE]\n\n"])
            body = b"" if request.stream else request.answer(reason)
            first = len(request.events)
            request.end = ["ResponseFinished", request.rid, 200, body, first, [], *counts, reason]
        self.node.send(request.gateway, *request.end)

    def on_down(self, name: str) -> None:
        for request in self.requests.values():
            if request.scheduler == name:
                request.scheduler = ""

    def on_idle(self) -> None:
        """Place what has no scheduler; tell what the schedulers told."""
        up = {name: link.stats for name, link in self.node.links.items() if link.address}
        for request in self.requests.values():
            if up and not request.scheduler and request.end is None:
                request.scheduler, request.attempt = min(up), request.attempt + 1
                self.node.send(request.scheduler, *request.generate(self.node.me[1]))
        replicas = [r for stats in up.values() if stats and stats[2:] for r in stats[2]]
        live = sum(request.end is None for request in self.requests.values())
        self.node.stats = [True, live, replicas]


if __name__ == "__main__":
    given = options()
    node = Node("tokenizer", "tokenizer-0")
    node.listen(given["listen"][0])
    for address in given["dial"]:
        node.dial(address)
    tokenizer = Tokenizer(node)
    node.run(tokenizer.on_message, tokenizer.on_down, tokenizer.on_idle)
