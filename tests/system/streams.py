"""Streamed chats in threads, and what came of them."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from deepmesh.client import Client, ClientError

MAX_TOKENS = 80
PROMPTS = (
    "What is 417 + 256?",
    "Tell me about the river.",
    "Copy: red green blue red",
    "What is 12 + 900?",
    "Who lives in the old house?",
    "Count the words of this sentence, please.",
)


@dataclass
class Load:
    """Streams that run together; each on a connection of its own."""

    url: str
    moving: threading.Event = field(default_factory=threading.Event)  # text flows in all of them
    retries: int = 0  # streams that were begun again by their client
    longest_gap_s: float = 0.0

    def run(self, *, may_retry: bool = False) -> list[str]:
        """All answers, in the order of PROMPTS.

        Args:
            may_retry: begin again when the connection is cut, as clients of a gateway must.

        Raises:
            ClientError: a stream failed.
        """
        self._moved = [False] * len(PROMPTS)
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            numbers = range(len(PROMPTS))
            return list(threads.map(lambda n: self._answer(n, may_retry=may_retry), numbers))

    def _answer(self, number: int, *, may_retry: bool) -> str:
        deadline = time.monotonic() + 180
        while True:
            try:
                return self._stream(number)
            except ClientError:
                if not may_retry or time.monotonic() > deadline:
                    raise
                self.retries += 1
                self.moving.wait(0.2)  # lets the gateway come back

    def _stream(self, number: int) -> str:
        fields: dict[str, object] = {
            "model": "tiny",
            "temperature": 1.0,
            "seed": number,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "thinking": {"type": "disabled"},
        }
        messages: Sequence[dict[str, object]] = [{"role": "user", "content": PROMPTS[number]}]
        pieces: list[str] = []
        last = time.monotonic()
        with Client(self.url, timeout_s=180) as client:
            for event in client.stream_chat([*messages], fields):
                now = time.monotonic()
                if event.kind == "finish":
                    assert event.text == "length", event
                    return "".join(pieces)
                if pieces:
                    self.longest_gap_s = max(self.longest_gap_s, now - last)
                last = now
                pieces.append(event.text)
                if len(pieces) == 5:
                    self._moved[number] = True
                    if all(self._moved):
                        self.moving.set()
        raise ClientError("the stream ended without a reason")
