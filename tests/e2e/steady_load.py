"""Streams that never pause while something happens to the mesh: what each must say is known before.

Every text is compared with that of an undisturbed run, so a token that was lost, doubled or
another one is seen, whatever caused it.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from deepmesh.client import Client, ClientError

PROMPTS = (
    "What is 417 + 256?",
    "Tell me about the river.",
    "Copy: red green blue red",
    "Who lives in the old house?",
    "Count the words of this sentence, please.",
    "What is 12 + 900?",
    "Hello, again and again and again.",
    "Name three colours.",
)
GIVE_UP_S = 90.0  # of one request, with all its tries


class SteadyLoad:
    """`with SteadyLoad(url, expected) as load: …`; afterwards `load.check()`."""

    def __init__(
        self, url: str, expected: Sequence[str], *, streams: int = 16, max_tokens: int = 60
    ) -> None:
        """`expected`: of `reference` with the same `max_tokens`."""
        self._url, self._expected, self._max_tokens = url, expected, max_tokens
        self._turn = itertools.count()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(streams)]
        self.counts: Counter[str] = Counter()  # whole, retried
        self.wrong: list[str] = []
        self.longest_gap_s = 0.0  # within a stream
        self.last_whole_s = 0.0  # monotonic

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * GIVE_UP_S)

    def check(self, least: int) -> None:
        """All answers were right and whole, and there were at least so many."""
        assert self.wrong == []
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"
        assert self.counts["whole"] >= least, self.counts

    def wait_whole(self, more: int, timeout_s: float = GIVE_UP_S) -> None:
        """Until so many further answers have ended well."""
        wanted, deadline = self.counts["whole"] + more, time.monotonic() + timeout_s
        while self.counts["whole"] < wanted and not self.wrong:
            assert time.monotonic() < deadline, f"{self.counts} after {timeout_s:g} s"
            self._stop.wait(0.05)

    def _run(self) -> None:
        while not self._stop.is_set() and not self.wrong:
            number = next(self._turn) % len(PROMPTS)
            text, retries = self._ask(number)
            with self._lock:
                self.counts["retried"] += retries
                if text == self._expected[number]:
                    self.counts["whole"] += 1
                    self.last_whole_s = time.monotonic()
                else:
                    self.wrong.append(f"{PROMPTS[number]!r}: {text!r}")

    def _ask(self, number: int) -> tuple[str, int]:
        """The text, and how often it was asked again: a gateway that ends cuts its clients."""
        deadline, retries = time.monotonic() + GIVE_UP_S, 0
        while True:
            try:
                text, gap_s = stream(self._url, number, self._max_tokens)
            except ClientError as error:
                if time.monotonic() > deadline:
                    return f"failed for {GIVE_UP_S:g} s: {error}", retries
                retries += 1
                self._stop.wait(0.1)
                continue
            with self._lock:
                self.longest_gap_s = max(self.longest_gap_s, gap_s)
            return text, retries


def stream(url: str, number: int, max_tokens: int) -> tuple[str, float]:
    """The whole text of one of PROMPTS, and the longest pause within it, s.

    Raises:
        ClientError: refused, cut, or ended without its reason.
    """
    fields: dict[str, object] = {
        "model": "tiny",
        "temperature": 1.0,
        "seed": number,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }
    messages: list[dict[str, object]] = [{"role": "user", "content": PROMPTS[number]}]
    pieces: list[str] = []
    gap_s, last_s = 0.0, 0.0
    with Client(url, timeout_s=GIVE_UP_S) as client:
        for event in client.stream_chat(messages, fields):
            now_s = time.monotonic()
            gap_s, last_s = max(gap_s, now_s - last_s if last_s else 0.0), now_s
            if event.kind == "finish":
                if event.text != "length":
                    raise ClientError(f"ended with {event.text!r}")
                return "".join(pieces), gap_s
            pieces.append(event.text)
    raise ClientError("the stream ended without a reason")


def reference(url: str, max_tokens: int = 60) -> list[str]:
    """The texts of an undisturbed mesh."""
    return [stream(url, number, max_tokens)[0] for number in range(len(PROMPTS))]
