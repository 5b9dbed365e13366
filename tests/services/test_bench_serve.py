"""`bench serve`: what it reads off the wire, its figures, and short runs against real servers."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from bench.load.cpu import CpuMeter
from bench.load.drive import Client, LoadError, closed_loop, open_loop
from bench.load.figures import Limits, Window, case_of, gaps_ms
from bench.load.http import Answer, Connection, Usage
from bench.load.workload import Fit, PromptsError, Shape, from_file, synthetic

ROOT = Path(__file__).parents[2]
TOKEN = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
SHAPE = Shape("m", output_tokens=4)


def chunked(*pieces: bytes) -> bytes:
    """A chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class Pipe(asyncio.Transport):
    """The connection's end of a transport: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


async def read(
    pieces: list[bytes], *, ends: bool = False, timeout_s: float = 5.0
) -> tuple[Answer, bool]:
    """Feed an answer in pieces; what it says, and whether the connection may be used again."""
    connection, answer = Connection(), Answer(time.perf_counter())
    connection.connection_made(Pipe())
    task = asyncio.create_task(connection.ask(b"GET", answer, timeout_s))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if ends:
        connection.connection_lost(None)
    await task
    return answer, connection.is_reusable


# ---------------------------------------------------------------- the wire


def test_a_connection_that_closes_just_now_is_an_error_of_the_request() -> None:
    async def ask() -> Answer:
        connection, answer, pipe = Connection(), Answer(time.perf_counter()), Pipe()
        connection.connection_made(pipe)
        pipe.close()
        await connection.ask(b"GET", answer, 5.0)
        return answer

    assert asyncio.run(ask()).error == "connection closed"


def test_events_are_found_however_the_bytes_are_cut() -> None:
    body = ROLE + TOKEN * 3 + FINISH + USAGE + DONE
    cuts = random.Random(0)
    for _ in range(200):
        at = sorted(cuts.randrange(len(body)) for _ in range(cuts.randrange(1, 12)))
        edges = [0, *at, len(body)]
        whole = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        whole += chunked(*[body[a:b] for a, b in pairwise(edges) if a < b])
        size = cuts.randrange(1, 60)
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        answer, is_reusable = asyncio.run(read(pieces))
        assert (answer.error, len(answer.times), answer.num_tokens) == ("", 3, 5)
        assert answer.usage == Usage(7, 5)
        assert answer.is_over
        assert is_reusable


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices": [{"delta": {"content": "spaced \\"content\\":\\"\\""}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"","reasoning_content":"x"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":null,"reasoning":"x"}}]}\n\n',
        b'data: {"choices":[{"text":" x","index":0}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}\n\n',
        b'event: x\r\ndata: {"choices":[{"delta":{"content":"x"}}]}\r\n\r\n',
    ],
)
def test_text_is_known_in_the_words_of_many_servers(event: bytes) -> None:
    answer, _ = asyncio.run(read([HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(event)]))
    assert (answer.error, len(answer.times)) == ("", 1)


@pytest.mark.parametrize(
    "event",
    [
        ROLE,
        FINISH,
        USAGE,
        b": ping\n\n",
        b'data: {"choices":[{"delta":{"role":"assistant","content": ""}}]}\n\n',
        b'data: {"choices":[{"text":"","index":0,"finish_reason":"length"}]}\n\n',
    ],
)
def test_events_without_text_are_no_tokens(event: bytes) -> None:
    answer, _ = asyncio.run(read([HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(event)]))
    assert (answer.error, len(answer.times)) == ("", 0)


@pytest.mark.parametrize(
    ("pieces", "ends", "error"),
    [
        ([b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}"], False, "HTTP 429"),
        ([b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n"], False, "HTTP 503"),
        (
            [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"],
            False,
            "the answer is no event stream",
        ),
        (
            [HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(TOKEN)[:-7]],
            True,
            "connection closed (by the server)",
        ),
        ([], True, "connection closed (by the server)"),
        ([b"SSH-2.0-hello\r\n\r\n"], False, "not HTTP: b'SSH-2.0-hello'"),
        (
            [
                HEAD
                + b"transfer-encoding: chunked\r\n\r\n"
                + chunked(TOKEN, b'data: {"error":{"message":"x"}}\n\n')
            ],
            False,
            'in the stream: {"error":{"message":"x"}}',
        ),
    ],
)
def test_what_is_no_whole_answer_is_an_error(pieces: list[bytes], ends: bool, error: str) -> None:
    answer, _ = asyncio.run(read(pieces, ends=ends))
    assert answer.error == error


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    answer, is_reusable = asyncio.run(
        read([HEAD.replace(b"1.1", b"1.0") + b"\r\n" + TOKEN], ends=True)
    )
    assert (answer.error, len(answer.times), is_reusable) == ("", 1, False)


def test_an_answer_that_does_not_come_is_given_up() -> None:
    answer, is_reusable = asyncio.run(read([HEAD], timeout_s=0.01))
    assert (answer.error, is_reusable) == ("timeout", False)


# ---------------------------------------------------------------- figures


def answer_at(due_s: float, *times: float, tokens: int = 0, error: str = "") -> Answer:
    answer = Answer(due_s)
    answer.times, answer.error = list(times), error
    answer.end_s = times[-1] if times else due_s
    answer.usage = Usage(10, tokens or len(times))
    return answer


def test_percentiles_are_those_of_the_answers_that_were_due_in_the_window() -> None:
    answers = [answer_at(1 + n, 1 + n + 0.001 * (n + 1), 1 + n + 0.5) for n in range(101)]
    early, late = answer_at(0.5, 90.0), answer_at(200.0, 201.0)
    window = Window(1.0, 101.0, [early, *answers, late])
    case = case_of(window, Limits())
    assert case["requests"] == 101
    assert [case[f"ttft_ms_p{p}"] for p in (50, 90, 99)] == [51.0, 91.0, 100.0]
    assert case["itl_ms_p50"] == pytest.approx(449.0)
    assert case["e2e_ms_p99"] == pytest.approx(500.0)
    # 101 first tokens and 100 second ones came up to its end, and one of the early request
    assert case["tokens_per_s"] == pytest.approx(201 / 100, abs=0.11)


def test_events_count_as_many_tokens_as_the_server_says() -> None:
    window = Window(0.0, 2.0, [answer_at(0.0, 0.5, 1.0, 1.5, 3.0, tokens=8)], {"server": 0.3})
    case = case_of(window, Limits())
    assert case["tokens_per_s"] == 3.0  # three of four events, of two tokens each, in two seconds
    assert case["cpu_us_per_token"] == {"server": 50_000.0}
    assert case["tpot_ms_p50"] == pytest.approx(1e3 * 2.5 / 7, abs=0.001)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    answers = [
        answer_at(0.0, 0.1, 0.2),
        answer_at(0.0, 0.3, 0.4),  # its first token is late
        answer_at(0.0, 0.1, 0.9),  # and the second one of this
        answer_at(0.0, 0.1, 0.2, error="HTTP 500"),
    ]
    case = case_of(Window(0.0, 2.0, answers), Limits(ttft_ms=200.0, tpot_ms=150.0))
    assert case["goodput"] == 0.5
    assert (case["errors"], case["error_kinds"]) == (1, {"HTTP 500": 1})
    assert case_of(Window(0.0, 2.0, answers), Limits())["goodput"] is None


def test_a_window_without_answers_has_no_latencies() -> None:
    case = case_of(Window(0.0, 1.0, []), Limits(e2e_ms=1.0))
    assert (case["requests"], case["tokens_per_s"], case["ttft_ms_p50"]) == (0, 0.0, None)
    assert case["goodput"] == 0.0


def test_gaps_are_those_that_end_within_the_bounds() -> None:
    gaps = gaps_ms([answer_at(0.0, 1.0, 1.5, 2.5), answer_at(0.0, 2.0, 2.2)], 1.6, 2.4)
    assert gaps == pytest.approx([200.0])


def test_cpu_time_is_that_of_the_process() -> None:
    meter = CpuMeter({"me": os.getpid(), "gone": 1 << 30})
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    taken = meter.take()
    assert 0.05 <= taken["me"] <= 5.0
    assert taken["gone"] == 0.0


# ---------------------------------------------------------------- what is asked


def test_prompts_have_the_length_that_the_server_counts() -> None:
    fit = Fit.of((5 + 2 * 16, 5 + 2 * 272))
    assert (fit.words(105), fit.words(1)) == (50, 1)
    assert Fit.of((3, 3)) == Fit()  # a server that counts nothing
    body = json.loads(next(synthetic(SHAPE, fit, tokens=lambda _: 105, seed=1)))
    assert len(body["messages"][0]["content"].split()) == 50
    assert (body["max_tokens"], body["stream"]) == (4, True)
    assert "ignore_eos" not in body


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(
        'Say hello.\n\n{"prompt": "Hi", "output_tokens": 9}\n'
        '{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    bodies = from_file(SHAPE, path)
    first, second, third, again = (json.loads(next(bodies)) for _ in range(4))
    assert first["messages"] == [{"role": "user", "content": "Say hello."}]
    assert (second["messages"][0]["content"], second["max_tokens"]) == ("Hi", 9)
    assert third["messages"][0]["content"] == "x"
    assert again == first


@pytest.mark.parametrize(
    "text", ["", '{"text": 1}', '{"prompt"', '{"prompt":"x","output_tokens":-1}']
)
def test_a_file_that_is_no_list_of_prompts_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(PromptsError):
        from_file(SHAPE, path)


# ---------------------------------------------------------------- a scripted server

Handler = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[bool]]  # False: hang up


class Server:
    """Answers by a script: the handler gets the number of the request."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.num_requests = self.num_connections = 0
        self.running = self.most_running = 0

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                body = await reader.readexactly(int(length))
                number, self.num_requests = self.num_requests, self.num_requests + 1
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                goes_on = await self._handler(number, body, writer)
                self.running -= 1
                if not goes_on:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def whole(number: int, body: bytes, writer: asyncio.StreamWriter) -> bool:
    """Three tokens and their usage."""
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    writer.write(chunked(TOKEN, TOKEN + TOKEN, FINISH, USAGE, DONE))
    await asyncio.sleep(0)
    return True


def bodies() -> Iterator[bytes]:
    return synthetic(SHAPE, Fit(), tokens=lambda _: 5, seed=0)


def test_a_closed_loop_keeps_so_many_requests_running_and_reuses_connections() -> None:
    async def run() -> None:
        async with Server(whole) as server:
            client = Client(server.url, api="chat")
            window = await closed_loop(client, bodies(), concurrency=4, requests=40)
            client.close()
            case = case_of(window, Limits())
            assert (case["requests"], case["errors"], server.num_requests) == (40, 0, 40)
            assert server.num_connections <= 4
            assert 1 <= server.most_running <= 4
            assert case["output_tokens_mean"] == 5
            assert sum(len(a.times) for a in window.answers) == 120

    asyncio.run(run())


def test_an_open_loop_sends_at_its_rate_whatever_the_answers_take() -> None:
    gate = asyncio.Event()

    async def held(number: int, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if number == 29:
            gate.set()
        await gate.wait()
        return await whole(number, body, writer)

    async def run() -> None:
        async with Server(held) as server:
            client = Client(server.url, api="chat")
            window = await open_loop(client, bodies(), rate=200.0, requests=30)
            client.close()
            assert case_of(window, Limits())["errors"] == 0
            assert server.most_running == 30  # none waited for another's answer
            due = [answer.due_s for answer in window.answers]
            assert due == sorted(due)
            assert 0.05 < due[-1] - due[0] < 0.6  # 29 gaps of 5 ms on average

    asyncio.run(run())


def test_failures_are_counted_by_kind_and_hang_nothing() -> None:
    async def script(number: int, body: bytes, writer: asyncio.StreamWriter) -> bool:
        match number % 4:
            case 0:
                return await whole(number, body, writer)
            case 1:
                writer.write(b"HTTP/1.1 429 Busy\r\ncontent-length: 0\r\n\r\n")
                return True
            case 2:
                writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\ndata:")
                await writer.drain()
                return False  # in the middle of a stream
            case _:
                await asyncio.Event().wait()  # for ever
                return False

    async def run() -> None:
        async with Server(script) as server:
            client = Client(server.url, api="chat", timeout_s=2.0)
            window = await closed_loop(client, bodies(), concurrency=1, requests=8)
            client.close()
            case = case_of(window, Limits())
            assert case["requests"] == 8
            assert case["error_kinds"] == {
                "HTTP 429": 2,
                "connection closed (by the server)": 2,
                "timeout": 2,
            }

    asyncio.run(run())


def test_a_connection_that_the_server_closed_meanwhile_is_no_failure() -> None:
    async def once(number: int, body: bytes, writer: asyncio.StreamWriter) -> bool:
        await whole(number, body, writer)
        return False  # although the answer said nothing of closing

    async def run() -> None:
        async with Server(once) as server:
            client = Client(server.url, api="chat")
            window = await closed_loop(client, bodies(), concurrency=2, requests=20)
            client.close()
            assert case_of(window, Limits())["errors"] == 0

    asyncio.run(run())


def test_nobody_there_is_said_at_once() -> None:
    async def run() -> None:
        async with Server(whole) as server:
            url = server.url
        client = Client(url, api="chat")
        with pytest.raises(LoadError, match="cannot reach"):
            await client.first_model()
        answer = await client.ask(b"{}", Answer(time.perf_counter()))
        assert answer.error.startswith("cannot connect")

    asyncio.run(run())


# ---------------------------------------------------------------- the command


def bench(*options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepmesh.cli", "bench", "serve", *options]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.timeout(240)
def test_a_short_run_on_a_mesh_of_its_own_gives_the_keys_of_a_report() -> None:
    options = ["--fake-executor", "--concurrency", "8", "--output-tokens", "16", "--requests", "32"]
    done = bench(*options, "--no-store", "--json", timeout_s=220)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (case,) = found["cases"]
    assert found["command"] == "bench serve"
    assert found["ok"]
    assert (case["mode"], case["concurrency"], case["requests"], case["errors"]) == (
        "closed",
        8,
        32,
        0,
    )
    assert case["output_tokens_mean"] == 16
    assert set(case["cpu_us_per_token"]) >= {"gateway", "tokenizer", "scheduler", "client"}
    for key in ("ttft_ms_p90", "itl_ms_p99", "e2e_ms_p50", "goodput", "tokens_per_s"):
        assert key in case


def test_without_a_server_it_cannot_run() -> None:
    assert bench("--url", "http://127.0.0.1:9", timeout_s=60).returncode == 1
    assert bench("--no-store", timeout_s=60).returncode == 2


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_mesh_is_compared_with_its_executor_alone() -> None:
    options = ["--mesh", "--quick", "--concurrency", "4", "--output-tokens", "16"]
    done = bench(*options, "--no-store", "--json", timeout_s=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (case,) = found["cases"]
    assert found["ok"]
    assert (found["command"], case["mode"]) == ("bench serve", "mesh")
    assert (case["concurrency"], case["requests"], case["errors"]) == (4, 4, 0)
    assert case["output_tokens_mean"] == 16
    for figure in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 < case[f"{figure}_p50"] <= case[f"{figure}_p99"]
    services = {"gateway", "tokenizer", "scheduler", "executor", "client"}
    assert set(case["cpu_us_per_token"]) >= services
    assert {target["key"] for target in found["config"]["targets"]} == {
        "share_of_offline",
        "idle_ttft_over_ms",
        "long_itl_rise",
    }
    assert 0 < case["share_of_offline"] < 1.5
    assert case["tokens_per_s"] == pytest.approx(
        case["share_of_offline"] * case["offline_tokens_per_s"], rel=0.01
    )
    over_ms = case["idle_ttft_ms_p50"] - case["executor_ttft_ms_p50"]
    assert case["executor_ttft_ms_p50"] > 0
    assert case["idle_ttft_over_ms"] == pytest.approx(over_ms, abs=0.01)
    assert over_ms > 0
    assert 0 < case["steady_itl_ms_p50"] <= case["steady_itl_ms_p99"]
    assert len(case["long_ttft_ms"]) == case["long_prompts"] == 5
