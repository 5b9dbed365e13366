"""Plays a trace of agents against a server: every session its turns, one behind another."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.agentic_trace import Turn
from bench.load.drive import Client
from bench.load.http import Answer
from bench.load.workload import Shape


@dataclass
class Played:
    """What came of it; times in ms."""

    first: list[float] = field(default_factory=list[float])
    later: list[float] = field(default_factory=list[float])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: list[str] = field(default_factory=list[str])

    def take(self, turn: Turn, number: int, answer: Answer) -> None:
        """One answer."""
        usage = answer.usage
        if answer.error or usage is None or not answer.times:
            self.errors.append(answer.error or "no text, or no usage")
            return
        ttft = 1e3 * (answer.times[0] - answer.sent_s)
        (self.first if number == 0 else self.later).append(ttft)
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        details = usage.prompt_tokens_details
        self.cached_tokens += details.cached_tokens if details is not None else 0
        if (usage.prompt_tokens, usage.completion_tokens) != (len(turn.prompt), turn.num_output):
            self.errors.append(f"counted otherwise than asked: {usage}")


async def play(url: str, model: str, trace: Sequence[Sequence[Turn]], at_once: int) -> Played:
    """All sessions, turn by turn: who has an answer waits until the others had theirs."""
    client = Client(url, api="completions", timeout_s=120.0)
    played = Played()
    queue = deque((session, 0) for session in trace)

    async def agent() -> None:
        while queue:
            session, number = queue.popleft()
            turn = session[number]
            answer = await client.ask(body(model, turn), Answer(time.perf_counter()))
            played.take(turn, number, answer)
            if number + 1 < len(session):
                queue.append((session, number + 1))

    try:
        await asyncio.gather(*(agent() for _ in range(at_once)))
    finally:
        client.close()
    return played


def body(model: str, turn: Turn) -> bytes:
    """The request of a turn; only the trace's token may be sampled."""
    extra: dict[str, object] = {"allowed_token_ids": [turn.output_id]}
    asks = Shape(model, "completions", temperature=0.0, ignore_eos=True, extra=extra)
    return asks.body({"prompt": turn.prompt}, turn.num_output)
