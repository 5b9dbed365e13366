"""Streams that never pause while things happen: what each must say, to the bit, is known before."""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from tests.chaos.answers import Answer, Cut, Refused, ask
from tests.chaos.requests import NUM_LONG, REQUESTS, Request, salted

MAX_BROKEN = 20
GIVE_UP_S = 60.0  # of a stream without a sign
_AGAIN_S = 0.2
_AWAY_S, _CUT_FOR_S = 15.0, 30.0  # a gateway at fault refuses, and cuts, for so long at most


class Load:
    """`with Load(url) as load`: learns what is right, then keeps `streams` of them going.

    Its own thread and event loop; everything public may be called from another thread.
    """

    def __init__(self, url: str, *, streams: int, seed: int) -> None:
        """`seed`: of the order of the requests."""
        self.url, self.num_streams = url, streams
        self._draw = random.Random(seed)
        self._turn = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)
        self._tasks: list[Future[None]] = []
        self._stops = False
        self._open: set[Answer] = set()
        self._may_cut_s = -1e9  # a gateway was at fault at this time, monotonic
        self.expected: list[Answer] = []
        self.counts: Counter[str] = Counter()  # whole, tokens, asked again, refused STATUS
        self.lost: list[str] = []
        self.wrong: list[str] = []
        self.longest_gap_s = 0.0  # within a stream

    def __enter__(self) -> Self:
        self._thread.start()
        self.expected = self.run(self._learn(), 300.0)
        self._tasks = [
            asyncio.run_coroutine_threadsafe(self._keep_asking(), self._loop)
            for _ in range(self.num_streams)
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30.0)
        self._loop.close()

    # ------------------------------------------------------------ what the test asks

    def run(self, what: Any, timeout_s: float) -> Any:  # noqa: ANN401  # any coroutine's result
        """A coroutine on the load's loop."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """No new requests; those that are open end. TimeoutError: one hangs."""
        self._stops = True
        for task in self._tasks:
            task.result(timeout_s)

    def in_flight(self) -> list[Answer]:
        """Streams whose first token came and whose last did not."""
        return [answer for answer in tuple(self._open) if answer.times and not answer.is_over]

    def gateway_fault(self) -> None:
        """A gateway is at fault now: its clients' connections may be cut. They ask again."""
        self._may_cut_s = time.monotonic()

    @property
    def goes_on(self) -> bool:
        """Not so much was lost or wrong that there is nothing more to learn."""
        return len(self.lost) + len(self.wrong) < MAX_BROKEN

    # ------------------------------------------------------------ one request

    async def ask_right(self, index: int, *, pace: Callable[[int], float] | None = None) -> Answer:
        """One whole answer, compared with the right one. Cut, Refused: see `answers.ask`."""
        answer = Answer(index)
        await ask(self.url, salted(REQUESTS[index], self._draw), answer, pace=pace)
        self.judge(answer, whole=True)
        return answer

    def judge(self, answer: Answer, *, whole: bool) -> None:
        """Compare what came with what is right; what did not come is not judged unless whole."""
        if difference := answer.difference(self.expected[answer.index], whole=whole):
            self.wrong.append(f"request {answer.index}: {difference}")

    # ------------------------------------------------------------ on the loop

    async def _end(self) -> None:
        """Whatever still runs is cut off."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _learn(self) -> list[Answer]:
        """All answers of an undisturbed mesh."""
        found = [Answer(index) for index in range(len(REQUESTS))]
        await asyncio.gather(
            *(ask(self.url, salted(REQUESTS[one.index], self._draw), one) for one in found)
        )
        return found

    async def _keep_asking(self) -> None:
        while not self._stops and self.goes_on:
            index = next(self._turn) % NUM_LONG
            await self._until_whole(index, salted(REQUESTS[index], self._draw))

    async def _until_whole(self, index: int, request: Request) -> None:
        while self.goes_on:
            answer, began_s = Answer(index), time.monotonic()
            self._open.add(answer)
            try:
                await asyncio.wait_for(ask(self.url, request, answer), 4 * GIVE_UP_S)
            except Refused as refused:
                self.counts[f"refused {refused.status}"] += 1
                if not refused.may_be_asked_again:
                    self.lost.append(f"request {index}: {refused}")
                await asyncio.sleep(max(_AGAIN_S, refused.retry_after_s))
            except (Cut, TimeoutError) as cut:
                self._note_cut(answer, began_s, cut)
                await asyncio.sleep(_AGAIN_S)
            else:
                self.judge(answer, whole=True)
                self.counts["whole"] += 1
                self.counts["events"] += len(answer.times)
                return
            finally:
                answer.is_over = True
                self._open.discard(answer)
                self.longest_gap_s = max(self.longest_gap_s, answer.longest_gap_s)

    def _note_cut(self, answer: Answer, began_s: float, cut: Exception) -> None:
        """A broken connection is a gateway's: nothing else may cause one."""
        since_s = time.monotonic() - self._may_cut_s
        if since_s > _CUT_FOR_S or began_s > self._may_cut_s + _AWAY_S:
            self.lost.append(f"request {answer.index} after {len(answer.times)} events: {cut!r}")
        self.counts["asked again"] += 1
        self.judge(answer, whole=False)
