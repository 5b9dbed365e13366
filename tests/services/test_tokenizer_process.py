"""The process: what it imports, how it starts, stops and complains, and the spans it leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from deepmesh.config import TelemetryConfig
from deepmesh.telemetry import new_traceparent, setup, trace_id_of
from deepmesh.wire.messages import Generate
from tests.fakes import FakeGateway, FakeScheduler, Stage
from tests.services.tokenizer_harness import HI, MODEL, PLAIN, Bench, bench, ids_of, make_config

ROOT = Path(__file__).parents[2]
CHAT = {"model": "tiny", "messages": HI, "stream": True, **PLAIN}


def start(tmp_path: Path, config: str) -> "subprocess.Popen[str]":
    path = tmp_path / "mesh.toml"
    path.write_text(config)
    return subprocess.Popen(
        [sys.executable, "-m", "services.tokenizer", "--config", str(path), "--index", "0"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_it_imports_no_tensor_library() -> None:
    program = (
        "import sys, services.tokenizer.service, services.tokenizer.__main__;"
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_it_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    process = start(tmp_path, f'[mesh]\nmodel = "{MODEL}"\nrun_dir = "{tmp_path}/run"\n')
    config = make_config(tmp_path / "run")
    (tmp_path / "run").mkdir(exist_ok=True)
    stage = Stage()
    try:
        scheduler = FakeScheduler(stage, config.scheduler_address(0))
        gateway = FakeGateway(stage, config.tokenizer_address(0))
        rid = gateway.submit("chat", {**CHAT, "stream": False})
        scheduler.answer(scheduler.expect(Generate), ids_of("Hello"))
        assert gateway.reply(rid).json["choices"][0]["message"]["content"] == "Hello"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
        stage.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[mesh]\nmodle = 3\n", ["modle"]),
        ('[mesh]\nmodel = "nothing-here"\n', ["nothing-here", "config.json"]),
    ],
)
def test_a_wrong_configuration_is_one_line(tmp_path: Path, config: str, words: list[str]) -> None:
    process = start(tmp_path, config)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in errors
    assert all(word in errors for word in words)


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_a_checkpoint_without_its_numbers_is_refused(tmp_path: Path, key: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    config = json.loads((MODEL / "config.json").read_text())
    del config["text_config"][key]
    (model / "config.json").write_text(json.dumps(config))
    process = start(tmp_path, f'[mesh]\nmodel = "{model}"\nrun_dir = "{tmp_path}/run"\n')
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert key in errors


def test_at_debug_each_request_says_what_became_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="services.tokenizer")
    with bench(tmp_path) as mesh:
        rid = mesh.gateway.submit("chat", {**CHAT, "max_tokens": 7})
        mesh.scheduler.answer(mesh.scheduler.expect(Generate), ids_of("Hello"))
        mesh.gateway.reply(rid)
        refused = mesh.gateway.submit("chat", {**CHAT, "max_tokens": 0})
        mesh.gateway.reply(refused)
    lines = [record.message for record in caplog.records if record.levelname == "DEBUG"]
    assert len(lines) == 2, lines
    assert lines[0].startswith(f"{rid.hex()[:12]}.0 -> scheduler-0: ")
    assert "max_tokens=7" in lines[0]
    assert lines[1].startswith(f"{refused.hex()[:12]} refused: INVALID max_tokens")


def test_each_request_leaves_its_spans(tmp_path: Path) -> None:
    config = msgspec.structs.replace(make_config(tmp_path), telemetry=TelemetryConfig())
    tracer = setup("tokenizer", "tokenizer-0", config)
    mesh = Bench(config, tracer)
    traceparent = new_traceparent()
    try:
        rid = mesh.gateway.submit("chat", CHAT, traceparent=traceparent)
        generate = mesh.scheduler.expect(Generate)
        assert generate.traceparent == traceparent
        mesh.scheduler.answer(generate, ids_of("Hello there"))
        mesh.gateway.reply(rid)
    finally:
        mesh.close()
        tracer.shutdown()
    lines = (tmp_path / "traces" / "tokenizer-0.jsonl").read_text().splitlines()
    spans = [text for text in lines if trace_id_of(traceparent) in text]
    for name in ("tokenize", "detokenize"):
        assert sum(f'"{name}"' in text for text in spans) == 1
    assert sum('"hop"' in text for text in spans) == 4
