"""Many streams of one gateway at once, every event and its time kept."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, object]
Event = dict[str, Any]  # Any: as the server wrote it, compared as a whole
VARIABLE = ("id", "created", "usage")  # what two runs of one request may differ in


@dataclass(eq=False)
class Stream:
    """What a client saw of one answer."""

    path: str
    body: Json
    events: list[Event] = field(default_factory=list[Event])
    times: list[float] = field(default_factory=list[float])
    num_ends: int = 0

    @property
    def longest_gap_s(self) -> float:
        """Between two events."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for event in self.events
            for choice in event["choices"]
        )

    def take(self, line: str) -> None:
        """One line of the answer."""
        if line == "data: [DONE]":
            self.num_ends += 1
        elif line.startswith("data: "):
            event: Event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            self.events.append({key: event[key] for key in event if key not in VARIABLE})
            self.times.append(time.monotonic())


class Streams:
    """Runs all requests at once; says when each of them is on its way."""

    def __init__(self, requests: list[tuple[str, Json]], under_way: int) -> None:
        """`under_way`: events after which a stream counts as being in the middle."""
        self.streams = [Stream(path, body) for path, body in requests]
        self._under_way = under_way
        self._missing = len(requests)
        self._all_under_way = asyncio.Event()

    async def run(self, url: str, timeout_s: float) -> None:
        """Until each has ended."""
        limits = httpx.Limits(max_connections=len(self.streams))
        async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
            await asyncio.gather(*(self._stream(client, stream) for stream in self.streams))

    async def in_the_middle(self) -> None:
        """Wait until every stream is on its way; none may have ended by then."""
        await self._all_under_way.wait()
        assert not any(stream.num_ends for stream in self.streams), "one has ended before"

    async def _stream(self, client: httpx.AsyncClient, stream: Stream) -> None:
        body = {**stream.body, "stream": True}
        async with client.stream("POST", stream.path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                before = len(stream.events)
                stream.take(line)
                if before < self._under_way == len(stream.events):
                    self._missing -= 1
                    if not self._missing:
                        self._all_under_way.set()
