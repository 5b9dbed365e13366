"""A tokenizer of another model than the engine's: refused and explained, never answered wrongly."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deepmesh.cli.app import app
from deepmesh.gateway_address import gateway_problem
from deepmesh.supervisor import Mesh
from tests.e2e.conftest import until

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
CONFIG = """
[mesh]
name = "mismatch"
run_dir = "{folder}/run"
model = "{model}"
served_model = "tiny"
[gateway]
port = 0
[executor]
kind = "fake"
[router]
count = {routers}
[tokenizer]
address = "ipc://{folder}/mine.sock"
"""


def other_model(folder: Path) -> Path:
    """The same files, but for two tokens that have changed their ids."""
    other = folder / "other"
    other.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (TINY / name).exists():
            shutil.copy(TINY / name, other / name)
    spec = json.loads((TINY / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    one, two = list(vocab)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(spec))
    return other


@pytest.mark.parametrize("routers", [0, 1])
def test_requests_get_503_with_the_reason_and_doctor_has_it_too(
    tmp_path: Path, routers: int
) -> None:
    path, theirs = tmp_path / "mesh.toml", tmp_path / "theirs.toml"
    path.write_text(CONFIG.format(folder=tmp_path, model=TINY, routers=routers))
    theirs.write_text(CONFIG.format(folder=tmp_path, model=other_model(tmp_path), routers=routers))
    argv = [sys.executable, "-m", "deepmesh.cli", "serve", "tokenizer", "--config", str(theirs)]
    log_path = tmp_path / "mine.log"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    log = log_path.open("wb")
    with log, subprocess.Popen(argv, stdout=log, stderr=log) as foreign:
        try:
            scheduler = tmp_path / "run" / "scheduler-0.ready"
            with Mesh(path, is_ready=scheduler.exists) as mesh:
                text = "scheduler-0 serves a model with vocabulary"
                until(lambda: text in gateway_problem(mesh.url), text)
                assert httpx.get(mesh.url + "/ready", timeout=10).status_code == 503
                answer = httpx.post(mesh.url + "/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == 503, answer.text
                error = answer.json()["error"]
                assert error["code"] == "engine_mismatch"
                assert "another vocabulary" in error["message"]
                found = CliRunner().invoke(app, ["doctor", "--config", str(path)])
                assert found.exit_code == 1
                assert text in found.output
        finally:
            foreign.kill()
    assert text in log_path.read_text()
