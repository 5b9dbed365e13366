"""Weights are changed replica by replica under load: no answer is of two models."""

import json
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from deepmesh.client import Client, ClientError
from deepmesh.config import load_config
from deepmesh.rolling import Rolling, RollingError
from deepmesh.supervisor import Mesh
from tests.e2e.conftest import MODEL_FOLDER
from tests.e2e.steady_load import PROMPTS

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

STREAMS, MAX_TOKENS = 4, 24
CONFIG = """
[mesh]
name = "reload"
run_dir = "{folder}/run"
model = "{model}"
[gateway]
port = 0
[router]
count = 1
[scheduler]
count = 2
max_rows = 8
[kvstore]
count = 1
memory_bytes = 33554432
[supervisor]
backoff_s = 0.1
[links]
heartbeat_s = 0.3
timeout_s = 5.0
"""


def other_weights(folder: Path) -> Path:
    """The model that ships with the rows of its output head in another order."""
    shutil.copytree(MODEL_FOLDER, folder)
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        entry = json.loads(data[8 : 8 + length]).get("head.weight")
        if entry is None:
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        rows = np.frombuffer(data[start:end], np.uint8).reshape(entry["shape"][0], -1)
        data[start:end] = np.roll(rows, 7, axis=0).tobytes()
        path.write_bytes(data)
        return folder
    raise AssertionError("no head.weight")


def ask(url: str, number: int, salt: str = "") -> str:
    """The answer to one of PROMPTS."""
    fields: dict[str, object] = {
        "model": "tiny",
        "temperature": 1.0,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
        "cache_salt": salt or None,
    }
    messages: list[dict[str, object]] = [{"role": "user", "content": PROMPTS[number]}]
    with Client(url, timeout_s=90) as client:
        events = list(client.stream_chat(messages, fields))
    assert events[-1].text == "length"
    return "".join(event.text for event in events[:-1])


class Askers:
    """Threads that ask without a pause, and what they were told."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self.answers: list[tuple[int, str]] = []
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)
        ]

    def __enter__(self) -> "Askers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append((number, ask(self._url, number)))
            except ClientError as error:
                self.failures.append(str(error))
            number = (number + STREAMS) % len(PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("w")


@pytest.fixture(scope="module")
def mesh(folder: Path) -> Iterator[Mesh]:
    path = folder / "mesh.toml"
    path.write_text(CONFIG.format(folder=folder, model=MODEL_FOLDER))
    with Mesh(path) as mesh:
        yield mesh


def fingerprints(mesh: Mesh) -> list[str]:
    """Of the engines, as clients see them."""
    card = httpx.get(f"{mesh.url}/v1/models/tiny", timeout=10).json()
    return card["fingerprints"]


def test_weights_that_cannot_be_loaded_change_nothing(mesh: Mesh, folder: Path) -> None:
    rolling = Rolling(mesh.run_dir, timeout_s=120)
    with pytest.raises(RollingError, match=r"no config\.json"):
        rolling.reload(folder)
    cut = shutil.copytree(MODEL_FOLDER, folder / "cut")
    tokens = cut / "tokenizer.json"
    words = json.loads(tokens.read_text())
    words["model"]["vocab"] = dict(list(words["model"]["vocab"].items())[:-1])
    tokens.write_text(json.dumps(words))
    with pytest.raises(RollingError, match="another vocabulary"):
        rolling.reload(cut)
    assert load_config(mesh.run_dir / "mesh.toml").mesh.model == str(MODEL_FOLDER.resolve())
    assert ask(mesh.url, 0)


def test_every_answer_is_of_one_model_and_the_caches_of_the_other_are_not_used(
    mesh: Mesh, folder: Path
) -> None:
    old = [ask(mesh.url, number) for number in range(len(PROMPTS))]
    (before,) = fingerprints(mesh)
    model = other_weights(folder / "other")
    with Askers(mesh.url) as askers:
        Rolling(mesh.run_dir, timeout_s=240).reload(model)
    assert askers.failures == []
    (after,) = fingerprints(mesh)
    assert after.partition(".")[0] != before.partition(".")[0]
    assert after.partition(".")[2] == before.partition(".")[2]  # the same build
    cold = [ask(mesh.url, number, salt="never asked before") for number in range(len(PROMPTS))]
    assert all(a != b for a, b in zip(old, cold, strict=True))
    assert [ask(mesh.url, number) for number in range(len(PROMPTS))] == cold
    kinds = {
        "old" if text == old[n] else "new" if text == cold[n] else "mixed"
        for n, text in askers.answers
    }
    assert kinds == {"old", "new"}


def test_a_process_is_replaced_by_name(mesh: Mesh) -> None:
    rolling = Rolling(mesh.run_dir, timeout_s=120)
    assert rolling.choose(["tokenizer", "router-0"]) == ["router-0", "tokenizer-0"]
    with pytest.raises(RollingError, match="scheduler-7: runs here"):
        rolling.choose(["scheduler-7"])
    old = mesh.pids["tokenizer-0"]
    assert rolling.restart("tokenizer-0") > 0
    assert mesh.pids["tokenizer-0"] not in (0, old)
    assert ask(mesh.url, 0)
