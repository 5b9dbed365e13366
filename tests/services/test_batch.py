"""Offline batches: every line exactly once, whatever is killed, and what is wrong is named."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deepmesh.async_client import AsyncClient
from deepmesh.batch import BatchError, Output, Totals, check_lines, run_batch

NUM_LINES = 60


class Server(ThreadingHTTPServer):
    """A gateway's place: answers each request with its own content."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.busy = 0  # 429 for so many requests
        self.broken = 0  # the status of every answer, if it is one
        self.gate = threading.Semaphore(0)  # a request needs a permit
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients are killed here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = body["prompt"]
        with self.server.lock:
            self.server.asked[prompt] += 1
            is_busy, self.server.busy = self.server.busy > 0, max(0, self.server.busy - 1)
        if self.server.broken:
            self._answer(self.server.broken, {"error": {"message": "down"}})
        elif is_busy:
            self._answer(429, {"error": {"message": "busy"}}, ("retry-after", "0"))
        elif prompt == "bad":
            self._answer(400, {"error": {"message": "no", "param": "prompt"}})
        else:
            self.server.gate.acquire()
            self._answer(200, {"echo": prompt})

    def _answer(self, status: int, body: object, *headers: tuple[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (("content-length", str(len(data))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(10)


def line(id: str, prompt: str, **more: object) -> str:
    body = {"model": "tiny", "prompt": prompt}
    return json.dumps(
        {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body} | more
    )


def write(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(line(f"id-{i}", p) + "\n" for i, p in enumerate(prompts)))
    return path


def start(source: Path, output: Path, server: Server, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "deepmesh.cli", "batch", str(source), "-o", str(output)]
    return subprocess.Popen(
        [*command, "--url", server.url, "--json", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, dict[str, int], str]:
    out, error = process.communicate(timeout=60)
    return process.returncode, json.loads(out) if out else {}, error


def answers(output: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in output.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found), "a line is doubled"
    return {each["custom_id"]: each for each in found}


def test_a_batch_in_openais_format(tmp_path: Path, server: Server) -> None:
    source = write(tmp_path / "in.jsonl", ["a", "bad", "c"])
    server.busy = 2
    server.gate.release(10)
    status, totals, _ = finish(start(source, tmp_path / "out.jsonl", server))
    assert (status, totals) == (1, {"lines": 3, "resumed": 0, "succeeded": 2, "failed": 1})
    found = answers(tmp_path / "out.jsonl")
    assert found["id-0"]["response"] == {
        "status_code": 200,
        "request_id": "",
        "body": {"echo": "a"},
    }
    assert found["id-0"]["error"] is None
    assert str(found["id-0"]["id"]).startswith("batch_req_")
    refused = found["id-1"]["response"]
    assert isinstance(refused, dict)
    assert refused["status_code"] == 400
    assert server.asked.total() == 3 + 2  # busy ones again, who is at fault is not


def test_a_batch_that_is_killed_goes_on(tmp_path: Path, server: Server) -> None:
    source = write(tmp_path / "in.jsonl", [f"p{i}" for i in range(NUM_LINES)])
    output = tmp_path / "out.jsonl"
    for share in (10, 25):
        process = start(source, output, server, "--concurrency", "4")
        server.gate.release(share)
        while not output.exists() or output.read_text().count("\n") < share:
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        server.gate.release(8)  # those that were open
        with output.open("a") as file:
            file.write('{"id":"batch_req_0a","custom_id":"id-59","resp')  # in the middle of a line
        share = output.read_text().count("\n")
    server.gate.release(2 * NUM_LINES)
    status, totals, error = finish(start(source, output, server))
    assert status == 0, error
    assert totals["resumed"] > 0
    assert totals["resumed"] + totals["succeeded"] == NUM_LINES
    found = answers(output)
    assert set(found) == {f"id-{i}" for i in range(NUM_LINES)}
    for i in range(NUM_LINES):
        response = found[f"id-{i}"]["response"]
        assert isinstance(response, dict)
        assert response["body"] == {"echo": f"p{i}"}


def test_a_whole_batch_asks_nothing_again(tmp_path: Path, server: Server) -> None:
    source = write(tmp_path / "in.jsonl", ["a", "b"])
    server.gate.release(5)
    finish(start(source, tmp_path / "out.jsonl", server))
    _, totals, _ = finish(start(source, tmp_path / "out.jsonl", server))
    assert totals == {"lines": 2, "resumed": 2, "succeeded": 0, "failed": 0}
    assert server.asked == Counter("ab")


@pytest.mark.parametrize("status", [0, 401, 429, 503])
def test_what_may_pass_is_asked_again(tmp_path: Path, server: Server, status: int) -> None:
    """One line an id in the end, at its old place or not; a wrong request is asked once."""
    source = write(tmp_path / "in.jsonl", ["a", "bad", "c"])
    output = tmp_path / "out.jsonl"
    server.gate.release(5)

    def go(url: str) -> Totals:
        async def run() -> Totals:
            async with AsyncClient(url, attempts=1) as client:
                return await run_batch(source, file, client, concurrency=1)

        file = Output(output)
        try:
            return asyncio.run(run())
        finally:
            file.close()

    server.broken = status
    assert go(server.url if status else "http://127.0.0.1:9") == Totals(3, 0, 0, failed=3)
    assert len(answers(output)) == 3
    server.broken = 0
    assert go(server.url) == Totals(3, 0, succeeded=2, failed=1)
    server.asked.clear()
    assert go(server.url) == Totals(3, resumed=2, succeeded=0, failed=1)  # still a failed line
    assert not server.asked
    found = answers(output)
    codes = {id: each["response"]["status_code"] for id, each in found.items()}
    assert codes == {"id-0": 200, "id-1": 400, "id-2": 200}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_an_output_that_was_replaced_is_still_locked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = Output(path)
    first.write({"id": "batch_req_1", "custom_id": "a", "response": None, "error": {}})
    first.close()
    again = Output(path)
    assert path.read_bytes() == b""
    with pytest.raises(BatchError, match="another batch"):
        Output(path)
    again.close()


def test_one_batch_writes_an_output_at_a_time(tmp_path: Path) -> None:
    first = Output(tmp_path / "out.jsonl")
    with pytest.raises(BatchError, match="another batch"):
        Output(tmp_path / "out.jsonl")
    first.close()
    Output(tmp_path / "out.jsonl").close()


def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    for text in ("Dear Ann", '{"a": 1', "Dear Ann,\nhow are you?"):
        path.write_text(text)
        with pytest.raises(BatchError, match=r"letter\.txt:1"):
            Output(path)
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", ":1"),
        ('{"custom_id": 5}', ":1"),
        (line("a", "x") + "\n" + line("a", "y"), "'a' is there twice"),
        (line("a", "x", url="/v1/embeddings"), "/v1/chat/completions"),
        (line("a", "x", method="GET"), "POST"),
        (line("a", "x", body={"stream": True}), "stream"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_asked(
    tmp_path: Path, text: str, what: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(BatchError) as caught:
        check_lines(path)
    assert what in str(caught.value)
    with pytest.raises(BatchError, match="No such file"):
        check_lines(tmp_path / "nowhere.jsonl")


def test_an_empty_batch(tmp_path: Path, server: Server) -> None:
    source = write(tmp_path / "in.jsonl", [])
    status, totals, _ = finish(start(source, tmp_path / "out.jsonl", server))
    assert (status, totals["lines"]) == (0, 0)
