"""Streamed chats in threads, round after round, each compared with what came in peace."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from deepmesh.client import Client, ClientError

NUM_STREAMS = 32
MAX_TOKENS = 24
ROUND_S = 240.0  # a stream that is still open after so long is lost
PROMPTS = (
    "What is {n} + 256?",
    "Tell me about the river of {n} miles.",
    "Copy: red green {n} blue red",
    "Who lives in house {n}?",
)


def ask(client: Client, number: int) -> str:
    """The whole text of stream `number`.

    Raises:
        ClientError: it broke, or ended for another reason than its length.
    """
    fields: dict[str, object] = {
        "model": "tiny",
        "temperature": 1.0,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }
    content = PROMPTS[number % len(PROMPTS)].format(n=number)
    if number % 4 == 3:  # long enough for blocks that go to the kvstore, and on to Redis
        content = " ".join([content] * 24)
    pieces: list[str] = []
    for event in client.stream_chat([{"role": "user", "content": content}], fields):
        if event.kind == "finish":
            if event.text != "length":
                raise ClientError(f"stream {number} ended by {event.text!r}")
            return "".join(pieces)
        pieces.append(event.text)
    raise ClientError(f"stream {number} ended without a reason")


def answers(url: str, key: str) -> list[str]:
    """What comes when nothing is wrong."""

    def one(number: int) -> str:
        with Client(url, api_key=key, timeout_s=ROUND_S) as client:
            return ask(client, number)

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        return list(threads.map(one, range(NUM_STREAMS)))


@dataclass
class Load:
    """As many streams as there are answers, each begun again as soon as it ends; a thread each."""

    url: str
    key: str
    right: list[str]
    wrong: list[str] = field(default_factory=list)  # what went wrong, in words
    asked_again: int = 0  # streams that their clients had to begin anew
    may_break: bool = False  # the gateway, which holds the connections, is being killed

    def __enter__(self) -> "Load":
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._rounds = [0] * len(self.right)
        self._threads = [
            threading.Thread(target=self._run, args=[number], name=f"stream {number}")
            for number in range(len(self.right))
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(ROUND_S)

    def finish_round(self) -> int:
        """Wait until each stream that is open now has ended, and give how many were.

        Raises:
            AssertionError: one was wrong, was lost or takes too long.
        """
        with self._changed:
            goal = [each + 1 for each in self._rounds]
            is_over = self._changed.wait_for(lambda: self.wrong or self._are_at(goal), ROUND_S)
        assert self.wrong == []
        assert is_over, f"streams hang: {[g - r for g, r in zip(goal, self._rounds, strict=True)]}"
        return len(goal)

    def _are_at(self, goal: list[int]) -> bool:
        return all(done >= wanted for done, wanted in zip(self._rounds, goal, strict=True))

    def _run(self, number: int) -> None:
        with Client(self.url, api_key=self.key, timeout_s=ROUND_S) as client:
            while not self._ended.is_set():
                text = self._answer(client, number)
                with self._changed:
                    self._rounds[number] += 1
                    if text != self.right[number]:
                        self.wrong.append(f"stream {number}: {text!r} for {self.right[number]!r}")
                    self._changed.notify_all()

    def _answer(self, client: Client, number: int) -> str:
        give_up = time.monotonic() + ROUND_S
        while True:
            try:
                return ask(client, number)
            except ClientError as error:
                if not self.may_break or time.monotonic() > give_up:
                    return f"{type(error).__name__}: {error}"
            self.asked_again += 1
            with suppress(ClientError):
                self._ended.wait(0.2)  # lets the gateway come back
