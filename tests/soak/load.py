"""Sends the mix: as fast as it is answered, to find out the capacity, and at a share of that."""

import asyncio
import itertools
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self

from bench.load.drive import Client
from bench.load.http import Answer
from tests.soak.mix import Ask, Mix

MAX_OPEN = 96  # requests; what comes above waits at the client, and counts as late
CAPACITY_STREAMS = 48  # more than all rows: what depends on the most at once is there early
TIMEOUT_S = 120.0
NOT_STREAMED = "the answer is no event stream"  # what the client says of a whole answer
REFUSED = ("HTTP 429", "HTTP 503")


class Latencies:
    """Of answers that were streamed to their ends, ms; one entry an answer or a gap."""

    def __init__(self) -> None:
        self.ttft_at, self.ttft = array("d"), array("f")
        self.itl_at, self.itl = array("d"), array("f")

    def take(self, answer: Answer) -> None:
        """Those of one answer."""
        times = answer.times
        if not times:
            return
        self.ttft_at.append(answer.due_s)
        self.ttft.append(1e3 * (times[0] - answer.due_s))
        for before, now in itertools.pairwise(times):
            self.itl_at.append(now)
            self.itl.append(1e3 * (now - before))


class Load:
    """Clients of one gateway; `async with Load(url, model, seed) as load`."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._clients = {
            api: Client(url, api=api, timeout_s=TIMEOUT_S) for api in ("chat", "completions")
        }
        self._asks: Iterator[Ask] = iter(Mix(model, seed))
        self._draw = random.Random(seed)
        self._room = asyncio.Semaphore(MAX_OPEN)
        self.latencies = Latencies()
        self.done: Counter[str] = Counter()  # by kind, whole ones
        self.errors: Counter[str] = Counter()
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.num_open = 0
        self.most_open = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    async def capacity(self, seconds: float) -> float:
        """Requests a second that are answered when so many are always asked; counted behind a
        warm-up of a third of the time."""
        end_s = time.perf_counter() + seconds
        count_from_s = end_s - seconds * 2 / 3
        counted = 0

        async def stream() -> None:
            nonlocal counted
            while time.perf_counter() < end_s:
                await self._one(next(self._asks), time.perf_counter())
                counted += count_from_s <= time.perf_counter() <= end_s

        async with asyncio.TaskGroup() as group:
            for _ in range(CAPACITY_STREAMS):
                group.create_task(stream())
        assert counted, f"not one of the requests was answered within {seconds:g} s"
        return counted / (seconds * 2 / 3)

    async def steady(self, rate: float, seconds: float, is_over: Callable[[], bool]) -> None:
        """`rate` requests a second at random moments, for so long; waits until all have ended."""
        end_s = time.perf_counter() + seconds
        due_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while not is_over():
                due_s += self._draw.expovariate(rate)
                if due_s > end_s:
                    break
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                await self._room.acquire()
                task = group.create_task(self._one(next(self._asks), due_s))
                task.add_done_callback(lambda _: self._room.release())

    async def _one(self, ask: Ask, due_s: float) -> None:
        """Send one request and take note of how it went."""
        answer = Answer(due_s)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async with asyncio.timeout(ask.give_up_s or None):
                await self._clients[ask.api].ask(ask.body, answer)
        except TimeoutError:
            answer.error = ""
            self.done["given up"] += 1
            return
        finally:
            self.num_open -= 1
        if answer.error == NOT_STREAMED and ask.kind == "whole":
            answer.error = ""
        if answer.error:
            self.errors[answer.error] += 1
            if answer.error in REFUSED:
                await asyncio.sleep(0.2)
            return
        self.done[ask.kind] += 1
        self.latencies.take(answer)
        if answer.usage is not None:
            self.prompt_tokens += answer.usage.prompt_tokens
            details = answer.usage.prompt_tokens_details
            self.cached_tokens += details.cached_tokens if details is not None else 0
