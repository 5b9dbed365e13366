"""The whole mesh beside its executor alone: throughput, first token, and long prompts between."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.load.cpu import CpuMeter
from bench.load.drive import Client, LoadError
from bench.load.figures import Limits, Window, case_of, gaps_ms, percentile, ttft_ms
from bench.load.http import Answer
from bench.load.offline import Speed
from bench.load.workload import Fit, Shape, synthetic
from deepmesh.report import Json

SETTLE_EVENTS = 8  # of every stream, before anything is measured
SETTLE_S = 0.5  # behind the last token of a long prompt
START_S = 60.0  # until all streams are under way
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    streams: int = 32
    prompt_tokens: int = 32
    output_tokens: int = 512
    waves: int = 3
    firsts: int = 40  # prompts on an idle mesh
    long_prompts: int = 5
    long_tokens: int = 1500
    steady_s: float = 8.0  # of decoding alone, before the long prompts and after them
    long_s: float = 300.0  # for all of them
    lasting_tokens: int = 4000  # of the streams meanwhile, which are cut off at the end


class Course:
    """All measurements of one mesh that runs, one after the other."""

    def __init__(self, url: str, shape: Shape, plan: Plan, pids: dict[str, int], say: Say) -> None:
        self._client = Client(url, api=shape.api)
        self._shape, self._plan, self._pids, self._say = shape, plan, pids, say
        self._seeds = itertools.count(1)
        self._fit = Fit()

    async def run(self) -> "Found":
        """Raises LoadError when a request fails: a figure without it would be wrong."""
        try:
            self._fit = await self._client.fit(self._shape)
            self._say("warm-up")
            await self._wave(min(32, self._plan.output_tokens))
            firsts = [await self._first(n) for n in range(self._plan.firsts)]
            waves: list[Window] = []
            for number in range(self._plan.waves):
                self._say(f"wave {number + 1} of {self._plan.waves}")
                waves.append(await self._wave(self._plan.output_tokens))
            steady, busy, long_ttft = await self._with_long_prompts()
        finally:
            self._client.close()
        return Found(firsts, waves, steady, busy, long_ttft)

    def _bodies(self, tokens: int, output_tokens: int) -> Iterator[bytes]:
        """Prompts that nobody has sent before."""
        shape = replace(self._shape, output_tokens=output_tokens)
        return synthetic(shape, self._fit, tokens=lambda _: tokens, seed=next(self._seeds))

    async def _first(self, number: int) -> Answer:
        self._say(f"first token, {number + 1} of {self._plan.firsts}")
        bodies = self._bodies(self._plan.prompt_tokens, 2)
        return _good(await self._client.ask(next(bodies), Answer(time.perf_counter())))

    async def _wave(self, output_tokens: int) -> Window:
        """All streams at once, from the first request to the last token."""
        bodies = self._bodies(self._plan.prompt_tokens, output_tokens)
        meter, start_s = CpuMeter(self._pids), time.perf_counter()
        answers = [Answer(start_s) for _ in range(self._plan.streams)]
        await asyncio.gather(*(self._client.ask(next(bodies), answer) for answer in answers))
        for answer in answers:
            _good(answer)
        end_s = max(answer.times[-1] for answer in answers)
        return Window(start_s, end_s, answers, meter.take())

    async def _with_long_prompts(self) -> tuple[list[float], list[float], list[float]]:
        """Times between tokens of steady streams, without and with long prompts, and how long
        these waited for their first token; ms."""
        plan = self._plan
        lasting = self._bodies(plan.prompt_tokens, plan.lasting_tokens)
        answers = [Answer(time.perf_counter()) for _ in range(plan.streams)]
        tasks = [asyncio.create_task(self._client.ask(next(lasting), a)) for a in answers]
        try:
            self._say("streams without long prompts")
            await self._until(lambda: all(len(a.times) >= SETTLE_EVENTS for a in answers), START_S)
            bounds = [await self._pass(plan.steady_s)]
            self._say("streams with long prompts")
            bodies = self._bodies(plan.long_tokens, 1)
            start_s = time.perf_counter()
            longs = [Answer(start_s) for _ in range(plan.long_prompts)]
            async with asyncio.timeout(plan.long_s):
                await asyncio.gather(*(self._client.ask(next(bodies), a) for a in longs))
            busy = (start_s, max(_good(answer).times[-1] for answer in longs))
            self._say("streams without long prompts")
            await asyncio.sleep(SETTLE_S)
            bounds.append(await self._pass(plan.steady_s))
            if any(task.done() for task in tasks):
                raise LoadError("a stream ended before the measurement did")
        except TimeoutError as error:
            raise LoadError("long prompts or streams got no token in time") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        steady = [gap for span in bounds for gap in gaps_ms(answers, *span).tolist()]
        return steady, gaps_ms(answers, *busy).tolist(), [ttft_ms(answer) for answer in longs]

    async def _pass(self, seconds: float) -> tuple[float, float]:
        start_s = time.perf_counter()
        await asyncio.sleep(seconds)
        return start_s, time.perf_counter()

    async def _until(self, what: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not what():  # noqa: ASYNC110  answers are plain records, nobody notifies
                await asyncio.sleep(0.02)


@dataclass
class Found:
    """What a course measured; times in ms."""

    firsts: list[Answer]
    waves: list[Window]
    steady: list[float]
    busy: list[float]
    long_ttft: list[float]


def _good(answer: Answer) -> Answer:
    if answer.error or not answer.times:
        raise LoadError(f"a request failed: {answer.error or 'no token came'}")
    return answer


def mesh_case(plan: Plan, found: Found, alone: list[Speed]) -> dict[str, Json]:
    """The figures of a mesh beside those of its executor alone."""
    medians = sorted(found.waves, key=lambda wave: wave.tokens / wave.seconds)
    middle = medians[len(medians) // 2]
    offline = [speed for run in alone for speed in run.tokens_per_s]
    firsts = [first for run in alone for first in run.first_token_ms]
    case = case_of(middle, Limits())
    tokens_per_s = statistics.median(wave.tokens / wave.seconds for wave in found.waves)
    offline_per_s, first_ms = statistics.median(offline), statistics.median(firsts)
    ttft = [ttft_ms(answer) for answer in found.firsts]
    steady, busy = percentile(found.steady, 99), percentile(found.busy, 99)
    case |= {
        "tokens_per_s": round(tokens_per_s, 1),
        "tokens_per_s_samples": [round(w.tokens / w.seconds, 1) for w in found.waves],
        "offline_tokens_per_s": round(offline_per_s, 1),
        "offline_tokens_per_s_samples": [round(speed, 1) for speed in offline],
        "offline_step_ms": round(statistics.median(ms for run in alone for ms in run.step_ms), 3),
        "offline_cpu_us_per_token": round(
            statistics.median(us for run in alone for us in run.cpu_us_per_token), 2
        ),
        "share_of_offline": round(tokens_per_s / offline_per_s, 4),
        "idle_prompt_tokens": statistics.median(
            a.usage.prompt_tokens if a.usage else 0 for a in found.firsts
        ),
        "idle_ttft_ms_p50": round(statistics.median(ttft), 3),
        "idle_ttft_ms_p99": percentile(ttft, 99),
        "executor_ttft_ms_p50": round(first_ms, 3),
        "idle_ttft_over_ms": round(statistics.median(ttft) - first_ms, 3),
        "steady_itl_ms_p50": percentile(found.steady, 50),
        "steady_itl_ms_p99": steady,
        "long_itl_ms_p50": percentile(found.busy, 50),
        "long_itl_ms_p99": busy,
        "long_itl_rise": round(busy / steady - 1, 4) if busy and steady else None,
        "long_ttft_ms": [round(ms, 1) for ms in found.long_ttft],
        "long_prompts": plan.long_prompts,
        "long_tokens": plan.long_tokens,
    }
    return case
