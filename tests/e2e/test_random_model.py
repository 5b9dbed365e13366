"""`deepmesh model random`, then `deepmesh up --model` on it: a mesh that answers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deepmesh.cli.app import app

RUN = CliRunner()


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    folder = tmp_path / "nano"
    arguments = ["model", "random", "--preset", "v41-nano", "--out", str(folder), "--seed", "3"]
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "deepmesh model inspect" in result.stderr
    assert result.stdout == ""
    return folder


@contextmanager
def up(*arguments: str) -> Iterator[str]:
    """The address of a mesh that runs meanwhile."""
    command = [sys.executable, "-m", "deepmesh.cli", "up", *arguments]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        said = ""
        for line in process.stdout:
            said += line
            match = re.search(r"serves (\S+) at (http://\S+)", line)
            if match is not None:
                assert match[1] == "nano"
                yield match[2]
                break
        else:
            raise AssertionError(f"it ended:\n{said}")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_the_checkpoint_is_whole(nano: Path) -> None:
    result = RUN.invoke(app, ["model", "inspect", str(nano)])
    assert result.exit_code == 0
    assert "all tensors are there" in result.output


@pytest.mark.timeout(300)
def test_a_mesh_serves_it(nano: Path, tmp_path: Path) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text(f'[mesh]\nname = "nano"\nrun_dir = "{tmp_path / "run"}"\n')
    with up("--config", str(config), "--port", "0", "--model", str(nano)) as url:
        body = {
            "model": "nano",
            "messages": [{"role": "user", "content": "Hello, world"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answers = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60) for _ in "ab"]
    first, second = (answer.json() for answer in answers)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert 0 < first["usage"]["completion_tokens"] <= 24
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model", "random", "--preset", "v5", "--out", "OUT"], "preset 'v5'"),
        (["model", "random", "--layers", "1", "--out", "OUT"], "layers: 1"),
        (["model", "random", "--tokenizer", "nothing.json", "--out", "OUT"], "nothing.json"),
        (["model", "random", "--preset", "v41-nano", "--out", "."], "is there already"),
        (["up", "--model", "OUT"], "no such folder"),
        (["up", "--model", "EMPTY"], "no config.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    out, empty = str(tmp_path / "new"), tmp_path / "empty"
    empty.mkdir()
    paths = {"OUT": out, "EMPTY": str(empty)}
    done = subprocess.run(
        [sys.executable, "-m", "deepmesh.cli", *(paths.get(a, a) for a in arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("deepmesh: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert not Path(out).exists()
