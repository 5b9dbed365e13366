"""A scheduler and its executors in one: every request gets its own prompt back, token by token.

`echo_engine.py --listen ADDRESS [--name NAME]`, and in mesh.toml `[scheduler] address = "ADDRESS"`,
`[executor] address = "none"`. docs/wire.md says what the messages mean.
"""

import struct
import time
from typing import Any

from link import Message, Node, options

INVALID, UNKNOWN = 1, 11
LENGTH, ABORT, STOP = 2, 3, 1
VOCABULARY = 1 << 20


class Request:
    """One request: its output is a function of the prompt alone, so a restart changes nothing."""

    def __init__(self, fields: list[Any]) -> None:
        self.rid, self.attempt, self.reply_to, self.prompt = fields[:4]
        self.out = ids(fields[5])
        self.max_tokens = fields[10]
        self.end: Message | None = None

    def grow(self) -> None:
        prompt = ids(self.prompt)
        self.out.append(prompt[len(self.out) % len(prompt)])


def ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


class Scheduler:
    def __init__(self, node: Node) -> None:
        self.node, self.name = node, node.me[1]
        self.requests: dict[bytes, Request] = {}
        self.buried: dict[bytes, int] = {}
        self.step = 0

    def on_message(self, peer: str, message: Message) -> None:
        tag, *fields = message
        try:
            match tag:
                case "Generate":
                    self.generate(fields)
                case "Attach":
                    self.attach(*fields[:4])
                case "StopAt":
                    self.stop_at(*fields[:2])
                case "Abort":
                    self.abort(peer, *fields)
                case "Ack":
                    for rid, _, *done in fields[0]:
                        if done and done[0] and self.requests[rid].end:
                            del self.requests[rid]
                case _:
                    pass
        except (TypeError, ValueError, KeyError, IndexError, struct.error):
            pass  # a message of the wrong shape

    def generate(self, fields: list[Any]) -> None:
        given = [*fields, *DEFAULTS[len(fields) - 5 :]]
        rid, attempt, reply_to, prompt, prompt_len = given[:5]
        known = self.requests.get(rid)
        if known is not None and (attempt <= known.attempt or known.end is None):
            known.attempt, known.reply_to = max(attempt, known.attempt), reply_to
            if known.end is None:
                self.node.send(reply_to, "Accepted", rid, attempt, self.name, 0)
            else:
                self.replay(known, len(given[5]) // 4)
            return
        if attempt <= self.buried.get(rid, 0):
            self.node.send(reply_to, "Finished", rid, ABORT, 0, 0, 0)
            return
        if why := wrong(prompt, prompt_len, given[10]):
            self.node.send(reply_to, "Failed", rid, INVALID, *why, 0.0, 0)
            return
        self.requests[rid] = Request(given)
        self.node.send(reply_to, "Accepted", rid, attempt, self.name, 0)

    def attach(self, rid: bytes, attempt: int, reply_to: str, from_pos: int) -> None:
        request = self.requests.get(rid)
        if request is None:
            self.node.send(reply_to, "Failed", rid, UNKNOWN, "no such request", "", 0.0, 0)
            return
        request.reply_to = reply_to
        self.node.send(reply_to, "Accepted", rid, attempt, self.name, 0)
        self.replay(request, from_pos)

    def replay(self, request: Request, from_pos: int) -> None:
        self.tokens(request, from_pos)
        if request.end:
            self.node.send(request.reply_to, *request.end)

    def stop_at(self, rid: bytes, keep: int) -> None:
        request = self.requests[rid]
        if request.end is None:
            del request.out[keep:]
            self.finish(request, STOP)

    def abort(self, peer: str, rid: bytes, attempt: int = 0) -> None:
        self.buried[rid] = attempt or 1 << 62
        request = self.requests.get(rid)
        if request is not None and request.end is None and request.reply_to == peer:
            self.finish(request, ABORT)

    def finish(self, request: Request, reason: int) -> None:
        request.end = ["Finished", request.rid, reason, len(request.out), len(request.prompt) // 4]
        self.node.send(request.reply_to, *request.end)

    def tokens(self, request: Request, pos: int) -> None:
        if new := request.out[pos:]:
            row = [request.rid, pos, struct.pack(f"<{len(new)}i", *new)]
            self.node.send(request.reply_to, "TokenBatch", self.step, time.time_ns(), [row])

    def on_idle(self) -> None:
        self.step += 1
        for request in [r for r in self.requests.values() if r.end is None]:
            if len(request.out) < request.max_tokens:
                request.grow()
                self.tokens(request, len(request.out) - 1)
            if len(request.out) >= request.max_tokens:
                self.finish(request, LENGTH)
        live = sum(r.end is None for r in self.requests.values())
        self.node.stats = [True, live, [[self.name, True, "tiny", "stub", 4096, 0, live]]]


DEFAULTS: list[Any] = [b"", [], 0, 0, b"", 16]  # of Generate, from confirmed_ids on


def wrong(prompt: bytes, prompt_len: int, max_tokens: int) -> tuple[str, str] | None:
    if len(prompt) % 4 or not 1 <= prompt_len <= len(prompt) // 4:
        return "the prompt is no list of ids", "prompt"
    if not all(0 <= token < VOCABULARY for token in ids(prompt)):
        return f"token ids must lie in 0..{VOCABULARY - 1}", "prompt"
    return ("max_tokens must be at least 1", "max_tokens") if max_tokens < 1 else None


if __name__ == "__main__":
    given = options()
    node = Node("scheduler", given.get("name", ["scheduler-0"])[0])
    node.listen(given["listen"][0])
    scheduler = Scheduler(node)
    node.run(scheduler.on_message, on_idle=scheduler.on_idle)
