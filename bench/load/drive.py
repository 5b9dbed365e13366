"""Sends requests: a set number at a time (closed loop), or as a Poisson process (open loop)."""

import asyncio
import gc
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from bench.load.cpu import CpuMeter
from bench.load.figures import Window
from bench.load.http import Answer, Connection
from bench.load.workload import PATHS, Api, Fit, Shape, probes

CONNECT_S = 10.0
_REPORT_S = 0.25  # between two looks of the progress display


class LoadError(RuntimeError):
    """The server cannot be asked at all; the text says why."""


class Client:
    """Keeps connections to one server, as many as there are requests at a time."""

    def __init__(self, url: str, *, api: Api, api_key: str = "", timeout_s: float = 600.0) -> None:
        address = urlsplit(url if "//" in url else f"http://{url}")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise LoadError(f"{url!r} is no address of a server")
        self._host = address.hostname
        self._port = address.port or (443 if address.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._timeout_s = timeout_s
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        base = address.path.rstrip("/").removesuffix("/v1")
        self._host_line = f"Host: {address.netloc.rpartition('@')[2]}\r\n"
        self._path, self._base = base + PATHS[api], base
        self._idle: list[Connection] = []
        self.num_open = 0  # requests under way
        self.num_done = 0

    async def ask(self, body: bytes, answer: Answer) -> Answer:
        """Send one request and wait for its answer; failures are its `error`."""
        request = self._request("POST", self._path, body)
        self.num_open += 1
        try:
            connection = self._take_idle()
            if connection is not None:
                await connection.ask(request, answer, self._timeout_s)
                if not (answer.error and connection.was_silent) or answer.error == "timeout":
                    return answer
                answer.error = ""  # the server had closed it meanwhile: that is not its failure
            try:
                connection = await self._connect()
            except (OSError, TimeoutError) as error:
                answer.sent_s = answer.end_s = time.perf_counter()
                answer.error = f"cannot connect: {_words(error)}"
                return answer
            await connection.ask(request, answer, self._timeout_s)
            return answer
        finally:
            if connection is not None and connection.is_reusable:
                self._idle.append(connection)
            self.num_open -= 1
            self.num_done += 1

    async def first_model(self) -> str:
        """The name that the server lists first.

        Raises:
            LoadError: it lists none.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls
                )
                try:
                    path = f"{self._base}/v1/models"
                    writer.write(self._request("GET", path, b"", "Connection: close\r\n"))
                    raw = await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            raise LoadError(f"cannot reach {self._host}:{self._port}: {_words(error)}") from error
        start, end = raw.find(b"{"), raw.rfind(b"}")
        try:
            listed = msgspec.json.decode(raw[start : end + 1], type=_Models)
            return listed.data[0].id
        except (msgspec.DecodeError, IndexError) as error:
            line = raw.split(b"\r\n", 1)[0].decode(errors="replace")
            raise LoadError(f"{self._base}/v1/models names no model ({line}); use --model") from (
                error
            )

    async def fit(self, shape: Shape) -> Fit:
        """Find out how many tokens a word is.

        Raises:
            LoadError: the server does not answer these two requests.
        """
        counts: list[int] = []
        for body in probes(shape):
            answer = await self.ask(body, Answer(time.perf_counter()))
            if answer.error:
                raise LoadError(f"the server refuses a request: {answer.error}")
            if answer.usage is None:
                return Fit()  # it does not say: a word is taken for a token
            counts.append(answer.usage.prompt_tokens)
        return Fit.of((counts[0], counts[1]))

    def close(self) -> None:
        """Hang up everywhere."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._tls
            )
        return connection

    def _request(self, method: str, path: str, body: bytes, more: str = "") -> bytes:
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{self._host_line}{self._key}{more}"
        return f"{head}{length if body else ''}\r\n".encode() + body


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


Progress = Callable[[float, Client], None]  # share of the run that is over


async def closed_loop(
    client: Client,
    bodies: Iterator[bytes],
    *,
    concurrency: int,
    requests: int = 0,
    seconds: float = 0.0,
    warmup_s: float = 0.0,
    pids: Mapping[str, int] | None = None,
    on_progress: Progress = lambda share, client: None,
) -> Window:
    """Keep `concurrency` requests running: so many of them, or for so long.

    By time, what comes in the first `warmup_s` is not measured, and what runs at the end is read
    to its end.
    """
    answers: list[Answer] = []
    start_s = time.perf_counter()
    stop_s = start_s + warmup_s + seconds if seconds else float("inf")

    async def stream() -> None:
        while time.perf_counter() < stop_s and (seconds or len(answers) < requests):
            answer = Answer(time.perf_counter())
            answers.append(answer)
            await client.ask(next(bodies), answer)
            if answer.error.startswith("cannot connect"):
                await asyncio.sleep(0.1)  # a server that is gone is not asked without pause

    async with _measured(answers, start_s, warmup_s, seconds, pids or {}) as window:
        tasks = [asyncio.create_task(stream()) for _ in range(concurrency)]

        def share() -> float:
            if seconds:
                return (time.perf_counter() - start_s) / (warmup_s + seconds)
            return client.num_done / max(1, requests)

        await _watch(tasks, lambda: on_progress(min(1.0, share()), client))
    return window


async def open_loop(
    client: Client,
    bodies: Iterator[bytes],
    *,
    rate: float,
    requests: int = 0,
    seconds: float = 0.0,
    warmup_s: float = 0.0,
    seed: int = 0,
    pids: Mapping[str, int] | None = None,
    on_progress: Progress = lambda share, client: None,
) -> Window:
    """Send requests at random moments, `rate` a second on average, however slow the answers.

    Latencies count from the moment drawn, so that a sender that is late hides nothing.
    """
    draw = random.Random(seed)
    answers: list[Answer] = []
    start_s = time.perf_counter()
    stop_s = start_s + warmup_s + seconds if seconds else float("inf")

    async def arrivals() -> None:
        due_s, tasks = start_s, list[asyncio.Task[Answer]]()
        while seconds or len(answers) < requests:
            due_s += draw.expovariate(rate)
            if due_s > stop_s:
                break
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            answer = Answer(due_s)
            answers.append(answer)
            tasks.append(asyncio.create_task(client.ask(next(bodies), answer)))
        await asyncio.gather(*tasks)

    async with _measured(answers, start_s, warmup_s, seconds, pids or {}) as window:

        def share() -> float:
            if seconds:
                return (time.perf_counter() - start_s) / (warmup_s + seconds)
            return client.num_done / max(1, requests)

        task = asyncio.create_task(arrivals())
        await _watch([task], lambda: on_progress(min(1.0, share()), client))
    return window


@asynccontextmanager
async def _measured(
    answers: list[Answer],
    start_s: float,
    warmup_s: float,
    seconds: float,
    pids: Mapping[str, int],
) -> AsyncIterator[Window]:
    """The window between warm-up and end, with the CPU time of processes in just that."""
    window = Window(start_s + warmup_s, start_s + warmup_s + seconds, answers)
    loop, meter, has_ended = asyncio.get_running_loop(), CpuMeter(pids), False

    def begin() -> None:
        nonlocal meter
        window.start_s, meter = time.perf_counter(), CpuMeter(pids)

    def end() -> None:
        nonlocal has_ended
        if not has_ended:
            has_ended = True
            window.end_s, window.cpu_s = time.perf_counter(), meter.take()

    timers: list[asyncio.TimerHandle] = []
    if seconds:
        timers.append(loop.call_later(warmup_s, begin))
        timers.append(loop.call_later(warmup_s + seconds, end))
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would show as a latency of the server
    try:
        yield window
    finally:
        gc.enable()
        gc.unfreeze()
        for timer in timers:
            timer.cancel()
        end()


async def _watch(tasks: list[asyncio.Task[None]], look: Callable[[], None]) -> None:
    """Wait for tasks, looking now and then; the first that fails ends all."""
    pending: set[asyncio.Task[None]] = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_REPORT_S)
            look()
            for task in done:
                task.result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
