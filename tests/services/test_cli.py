"""The commands as a user runs them."""

import asyncio
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deepmesh import __version__, checks
from deepmesh.cli.app import app
from deepmesh.cli.demo import Question, known_questions, shortened
from deepmesh.cli.model import number, size
from deepmesh.cli.trace import bar, drawn
from deepmesh.cli.up import last_words, loading_bar
from deepmesh.client import Client, ClientError, agenerate, generate
from deepmesh.errors import UserError
from deepmesh.run_dir import MeshRecord, ProcessRecord, RunDir
from deepmesh.waterfall import Span, TraceError, build

RUN = CliRunner()
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"


def run_process(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "deepmesh.cli", *arguments]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
    return subprocess.run(
        argv, input=stdin, capture_output=True, text=True, timeout=60, env=environment
    )


# ---------------------------------------------------------------- a gateway of our own


class SmallGateway(BaseHTTPRequestHandler):
    """Answers like a gateway: thinks "hm", says what it was told in capitals."""

    seen: list[dict[str, object]]
    headers_seen: list[dict[str, str]]
    fault: dict[str, str]  # what /ready says instead of yes

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": "small"}]})
        elif self.path == "/ready" and self.fault:
            self._answer(503, {"error": self.fault})
        else:
            self._answer(200 if self.path == "/ready" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).seen.append(body)
        type(self).headers_seen.append({k.lower(): v for k, v in self.headers.items()})
        said = body["messages"][-1]["content"]
        if said == "refuse":
            error = {"message": "temperature must be a number", "param": "temperature"}
            self._answer(400, {"error": error})
        elif body["stream"]:
            self._stream(said)
        else:
            message = {"content": said.upper(), "reasoning_content": "hm"}
            self._answer(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

    def _stream(self, said: str) -> None:
        deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}]
        deltas += [{"content": character} for character in said.upper()]
        chunks: list[dict[str, object]] = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if said == "break":
            chunks[3:] = [{"error": {"message": "engine restarted"}}]
        lines = [
            ": keep-alive",
            *[f"data: {json.dumps(chunk)}" for chunk in chunks],
            "data: [DONE]",
        ]
        self._send(200, "text/event-stream", "\n\n".join(lines) + "\n\n")

    def _answer(self, status: int, body: dict[str, object]) -> None:
        self._send(status, "application/json", json.dumps(body))

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def gateway() -> Iterator[str]:
    SmallGateway.seen, SmallGateway.headers_seen, SmallGateway.fault = [], [], {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallGateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


# ---------------------------------------------------------------- chat


def test_chat_streams_and_names_the_first_model(gateway: str) -> None:
    result = RUN.invoke(app, ["chat", "hello", "--url", gateway, "--no-thinking", "--seed", "3"])
    assert result.exit_code == 0
    assert result.stdout == "HELLO\n"  # no terminal: the answer alone
    assert result.stderr == "hm\n\n[length]\n"
    assert SmallGateway.seen == [
        {
            "messages": [{"role": "user", "content": "hello"}],
            "model": "small",
            "thinking": {"type": "disabled"},
            "seed": 3,
            "stream": True,
        }
    ]


def test_chat_without_streaming_with_a_key_and_a_system_message(gateway: str) -> None:
    options = ["--no-stream", "--api-key", "dm-1", "--system", "be brief", "--temperature", "0"]
    result = RUN.invoke(app, ["chat", "hello", "--url", gateway, *options, "--model", "other"])
    assert (result.stdout, result.stderr) == ("HELLO\n", "hm\n\n")
    body, headers = SmallGateway.seen[0], SmallGateway.headers_seen[0]
    assert (body["model"], body["temperature"], body["stream"]) == ("other", 0, False)
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    assert headers["authorization"] == "Bearer dm-1"


def test_a_terminal_shows_thinking_and_answer(gateway: str) -> None:
    result = RUN.invoke(app, ["chat", "hello", "--url", gateway], env={"FORCE_COLOR": "1"})
    assert result.stdout == "\x1b[2mhm\x1b[0m\n\nHELLO\n\x1b[2m[length]\x1b[0m\n"
    assert not result.stderr


def test_a_conversation_keeps_what_was_said(gateway: str) -> None:
    result = RUN.invoke(app, ["chat", "--url", gateway], input="one\ntwo\n")
    assert result.exit_code == 0
    assert [len(m) for m in (body["messages"] for body in SmallGateway.seen)] == [1, 3]  # type: ignore[arg-type]
    assert SmallGateway.seen[1]["messages"][1] == {"role": "assistant", "content": "ONE"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("refuse", "deepmesh: HTTP 400: temperature must be a number (field: temperature)\n"),
        ("break", "hm\n\ndeepmesh: engine restarted\n"),
    ],
)
def test_a_refusal_is_one_line_and_exit_1(gateway: str, said: str, message: str) -> None:
    result = run_process("chat", said, "--url", gateway)
    assert (result.returncode, result.stderr) == (1, message)


def test_no_mesh_says_what_to_do() -> None:
    result = RUN.invoke(app, ["chat", "x", "--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, ClientError)
    assert "deepmesh doctor" in str(result.exception)


NOWHERE = ["http://127.0.0.1:9", "127.0.0.1:9", "http://127.0.0.1:port"]


@pytest.mark.parametrize("url", NOWHERE)
def test_from_python_a_url_where_nobody_is_is_named(url: str) -> None:
    with pytest.raises(ClientError, match=re.escape(url)):
        generate(["x"], url=url)
    with pytest.raises(ClientError, match=re.escape(url)):
        asyncio.run(agenerate(["x"], url=url))
    with pytest.raises(ClientError, match=re.escape(url)), Client(url) as client:
        client.models()


def test_from_python_something_else_that_answers_is_no_mesh(gateway: str) -> None:
    """Neither where there is nothing (404) nor where the answer has another form."""
    with pytest.raises(ClientError, match="HTTP 404"):
        generate(["x"], url=f"{gateway}/elsewhere")
    talk = [{"role": "user", "content": "x"}]
    with pytest.raises(ClientError, match="not the answer of a mesh"):
        generate([talk], url=gateway, stream=True)  # events where an answer was wanted
    with pytest.raises(ClientError, match="temperature must be a number"):
        generate([[{"role": "user", "content": "refuse"}]], url=gateway, stream=False)


# ---------------------------------------------------------------- trace


def write_trace(folder: Path) -> None:
    lines: list[dict[str, object]] = [
        {"span_id": "1", "parent_id": "", "name": "request", "start_ns": 0, "end_ns": 10_000_000},
        {"span_id": "2", "parent_id": "1", "name": "tokenize", "start_ns": 0, "end_ns": 2_500_000},
    ]
    (folder / "traces").mkdir()
    text = ""
    for line in lines:
        whole = {"trace_id": "e" * 32, "service": "gateway", "process": "gateway-0", **line}
        text += json.dumps(whole) + "\n"
    (folder / "traces" / "gateway-0.jsonl").write_text(text)


def test_trace_draws_bars_and_shares(tmp_path: Path) -> None:
    write_trace(tmp_path)
    result = RUN.invoke(app, ["trace", "last", "--run-dir", str(tmp_path)], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "10.00 ms" in result.output
    assert re.search(r"tokenize +gateway-0 +0\.00 +2\.50 +█{10}(?!█)", result.output)
    assert re.search(r"tokenize +1 +2\.50 +25\.0%", result.output)


def test_on_a_narrow_terminal_the_bars_give_way_and_the_numbers_stay(tmp_path: Path) -> None:
    write_trace(tmp_path)
    result = RUN.invoke(app, ["trace", "last", "--run-dir", str(tmp_path)], env={"COLUMNS": "80"})
    (line,) = [line for line in result.stdout.splitlines() if line.strip().startswith("request ")]
    assert line.split()[:4] == ["request", "gateway-0", "0.00", "10.00"]


def test_trace_as_json(tmp_path: Path) -> None:
    write_trace(tmp_path)
    result = RUN.invoke(app, ["trace", "ee", "--run-dir", str(tmp_path), "--json"])
    waterfall = json.loads(result.output)
    assert waterfall["trace_id"] == "e" * 32
    assert waterfall["uncovered_ms"] == 7.5
    assert [span["name"] for span in waterfall["spans"]] == ["request", "tokenize"]


def test_trace_without_traces_says_so(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["trace", "--run-dir", str(tmp_path)])
    assert isinstance(result.exception, TraceError)


def hops(count: int) -> list[Span]:
    return [Span("t", str(i), "", "hop", "s", "s-0", i * 10, i * 10 + 1) for i in range(count)]


def test_many_like_siblings_are_drawn_as_one_line() -> None:
    assert [more for _, more in drawn(hops(3))] == [0, 0, 0]
    assert [more for _, more in drawn(hops(50))] == [0, 0, 0, 47]


def test_the_shortest_span_is_still_seen() -> None:
    root = Span("t", "r", "", "request", "g", "g-0", 0, 1000)
    waterfall = build([root, *hops(1)])
    assert bar(root, waterfall) == "█" * 40
    assert bar(hops(1)[0], waterfall) == "▏"
    assert bar(Span("t", "x", "", "late", "g", "g", 5000, 9000), waterfall).strip() == "█"


# ---------------------------------------------------------------- doctor


def write_config(folder: Path, text: str = "") -> Path:
    path = folder / "mesh.toml"
    head = f'[mesh]\nrun_dir = "{folder}/run"\nmodel = "model"\n'
    path.write_text(head + (text or '[gateway]\nport = 0\n[executor]\nkind = "fake"\n'))
    (folder / "model").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / "model" / name).write_text("{}")
    return path


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = RUN.invoke(app, ["doctor", *arguments, "--json"])
    return result.exit_code, {check["name"]: check for check in json.loads(result.output)}


def test_doctor_is_content_with_a_mesh_that_could_start(tmp_path: Path) -> None:
    code, found = findings("--config", str(write_config(tmp_path)))
    assert {check["state"] for check in found.values()} <= {"ok", "warn"}, found
    assert code == 0
    assert found["mesh"]["next_step"] == "deepmesh up"


def test_doctor_names_the_wrong_key(tmp_path: Path) -> None:
    code, found = findings("--config", str(write_config(tmp_path, "[gateway]\nprt = 1\n")))
    assert (code, found["configuration"]["state"]) == (1, "fail")
    assert "prt" in found["configuration"]["found"]


def test_doctor_lists_missing_shards(tmp_path: Path) -> None:
    path = write_config(tmp_path, "[executor]\n")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model" / "model-1.safetensors").touch()
    code, found = findings("--config", str(path))
    assert code == 1
    assert found["model"]["found"].endswith("missing model-2.safetensors")


def record_of(folder: Path, url: str, supervisor_pid: int, pid: int) -> None:
    processes = {
        "gateway-0": ProcessRecord("gateway", os.getpid(), "running", 0, ""),
        "tokenizer-0": ProcessRecord("tokenizer", pid, "running", 2, str(folder / "t.log")),
    }
    run_dir = RunDir(folder / "run")
    run_dir.write_record(MeshRecord("local", url, supervisor_pid, "", processes, {}))
    (folder / "t.log").write_text("first\nbang: out of tea\n")


def test_doctor_looks_at_the_processes_of_a_running_mesh(tmp_path: Path, gateway: str) -> None:
    path = write_config(tmp_path)
    record_of(tmp_path, gateway, os.getpid(), pid=0)
    code, found = findings("--config", str(path))
    assert code == 1
    assert found["gateway-0"]["state"] == "ok"
    assert found["tokenizer-0"]["found"] == "not running, started again 2 times; bang: out of tea"
    assert found["mesh"]["found"] == f"ready at {gateway}"


def test_doctor_says_how_to_end_a_drain(tmp_path: Path, gateway: str) -> None:
    path = write_config(tmp_path)
    record_of(tmp_path, gateway, os.getpid(), pid=os.getpid())
    (tmp_path / "run" / "gateway.admin").write_text("http://127.0.0.1:8100\n")
    SmallGateway.fault = {"message": "drained by an operator", "code": "draining"}
    _, found = findings("--config", str(path))
    assert found["mesh"]["state"] == "fail"
    assert "drained" in found["mesh"]["found"]
    assert "http://127.0.0.1:8100/admin/resume" in found["mesh"]["next_step"]
    SmallGateway.fault = {"message": "no tokenizer is linked", "code": "not_ready"}
    _, found = findings("--config", str(path))
    assert found["mesh"]["found"] == "not ready: no tokenizer is linked"


def test_doctor_tells_a_killed_mesh_from_a_running_one(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record_of(tmp_path, "http://127.0.0.1:9", ended.pid, pid=0)
    code, found = findings("--config", str(path))
    assert code == 0
    assert found["run folder"]["state"] == "warn"
    assert found["mesh"]["found"] == "not running"


def test_doctor_sees_sockets_without_a_mesh(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer-0.sock").touch()
    code, found = findings("--config", str(path))
    assert (code, found["run folder"]["state"]) == (0, "warn")
    assert "tokenizer-0.sock" in found["run folder"]["found"]


def test_doctor_for_people_says_what_to_do_next(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["doctor", "--config", str(write_config(tmp_path))])
    assert "→ deepmesh up" in result.output


def test_single_checks() -> None:
    assert checks.check_python((3, 10, 2)).state == "fail"
    assert checks.is_alive(os.getpid())
    assert not checks.is_alive(0)


# ---------------------------------------------------------------- the rest


def test_keys_prints_a_key_and_its_digest() -> None:
    output = RUN.invoke(app, ["keys"]).output
    key = re.search(r"dm-\S{43}", output)
    digest = re.search(r'api_keys = \["([0-9a-f]{64})"\]', output)
    assert key is not None
    assert digest is not None
    assert hashlib.sha256(key.group().encode()).hexdigest() == digest.group(1)
    assert RUN.invoke(app, ["keys"]).output != output


def test_version_and_help_import_nothing_heavy() -> None:
    assert run_process("--version").stdout == f"deepmesh {__version__}\n"
    argv = [sys.executable, "-X", "importtime", "-m", "deepmesh.cli", "--help"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for command in ("up", "serve", "chat", "demo", "doctor", "trace", "keys", "model"):
        assert command in result.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    heavy = {"torch", "zmq", "httpx", "opentelemetry", "starlette", "uvicorn", "numpy", "asyncio"}
    assert not imported & heavy


@pytest.mark.parametrize("command", ["up", "serve gateway", "demo", "trace", "chat x"])
def test_a_wrong_configuration_is_one_line_and_exit_1(tmp_path: Path, command: str) -> None:
    path = write_config(tmp_path, '[scheduler]\ndepth = "deep"\n')
    result = run_process(*command.split(), "--config", str(path))
    assert result.returncode == 1
    assert re.fullmatch(r"deepmesh: .*mesh\.toml: .*scheduler\.depth.*\n", result.stderr)


def test_up_names_a_model_folder_that_is_not_there(tmp_path: Path) -> None:
    for folder, what in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no config.json")):
        result = RUN.invoke(app, ["up", "--model", str(folder)])
        assert isinstance(result.exception, UserError)
        assert str(result.exception).startswith(f"{folder}: {what}")


def test_known_prompts_of_the_checkpoint_are_asked_one_of_a_kind(tmp_path: Path) -> None:
    entries = [
        {"kind": kind, "messages": [{"role": "user", "content": kind}], "expected": str(number)}
        for number, kind in enumerate(["sum", "sum", "copy", "lookup", "tool"])
    ]
    (tmp_path / "known-prompts.json").write_text(json.dumps(entries))
    asked = known_questions(tmp_path)
    assert [(q.kind, q.expected) for q in asked] == [("sum", "0"), ("copy", "2"), ("lookup", "3")]
    assert len({q.traceparent for q in asked}) == 3


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [("673", True), ("The sum is 673.", True), ("1673", False), ("673a", False), ("", False)],
)
def test_an_answer_is_right_when_the_expected_words_stand_in_it(
    answer: str, is_right: bool
) -> None:
    question = Question("sum", [], "673")
    question.answer = answer
    assert question.is_right == is_right
    question.error = "HTTP 503"
    assert not question.is_right


def test_long_prompts_are_shortened_in_the_middle() -> None:
    assert shortened("abc") == "abc"
    assert shortened("a" * 300 + "b" * 300, 20) == "aaaaaaaaaa … bbbbbbbbbb"


def test_up_shows_the_last_words_of_a_log_and_a_bar_while_weights_load() -> None:
    line = "2026-11-29T16:33:41.644Z INFO    executor-0-0 loading: layers 3 of 11"
    assert last_words(["before", line]) == "loading: layers 3 of 11"
    assert last_words(["Traceback"]) == "Traceback"
    assert last_words([]) == ""
    console = Console(width=80, record=True)
    console.print(loading_bar("loading: layers 3 of 11"))
    assert "loading: layers 3/11" in console.export_text()
    assert loading_bar("layers 3 of 11") is None


def test_model_inspect_shows_sizes_and_checks_the_weights() -> None:
    result = RUN.invoke(app, ["model", "inspect", str(TINY), "--ranks", "2"])
    assert result.exit_code == 0
    for words in ("routed experts", "a token of context", "resumable point", "halo", "rank"):
        assert words in result.output
    assert "all tensors are there" in result.output


def test_model_inspect_works_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    arguments = ["model", "inspect", str(tmp_path), "--ranks", "3", "--json"]
    summary = json.loads(RUN.invoke(app, arguments).output)
    assert (summary["has_weights"], summary["problems"]) == (False, "")
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1, 2]
    experts = summary["config"]["n_routed_experts"]
    assert sum(rank["num_experts"] for rank in summary["ranks"]) == experts
    assert sum(part["num_bytes"] for part in summary["parts"]) == summary["num_bytes"]


def test_model_inspect_of_something_else_is_one_line(tmp_path: Path) -> None:
    result = run_process("model", "inspect", str(tmp_path))
    assert result.returncode == 1
    assert re.fullmatch(r"deepmesh: .*config\.json.*\n", result.stderr)


def test_sizes_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 30)] == ["0 B", "1023 B", "1.00 KiB", "5.00 GiB"]
    assert [number(n) for n in (7, 1500, 284_000_000_000)] == ["7", "1.50 k", "284.00 G"]


def test_bench_without_a_name_says_what_there_is() -> None:
    result = RUN.invoke(app, ["bench"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "prompt" in lines["prefill"]
    unknown = RUN.invoke(app, ["bench", "nosuch"])
    assert (unknown.exit_code, "prefill" in unknown.stderr) == (2, True)


def test_a_second_gateway_has_the_port_behind_the_first(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = tmp_path / "mesh.toml"
        path.write_text(f'[mesh]\nrun_dir = "{tmp_path}/run"\n[gateway]\nport = {port - 1}\n')
        result = run_process("serve", "gateway", "--index", "1", "--config", str(path))
    assert result.returncode == 2
    assert result.stderr.startswith(f"gateway-1: gateway.port: 127.0.0.1:{port}: Address already")


def test_there_is_no_second_router(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[mesh]\nrun_dir = "{tmp_path}/run"\n')
    result = RUN.invoke(app, ["serve", "router", "--index", "1", "--config", str(path)])
    assert (result.exit_code, "one router" in result.stderr) == (2, True)
