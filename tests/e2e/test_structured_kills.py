"""Grammars through preemptions and the death of each process: the same tokens as undisturbed."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deepmesh.supervisor import Mesh
from tests.e2e.conftest import MODEL_FOLDER, RunningMesh, until
from tests.e2e.http_streams import Json, Stream, Streams

pytestmark = pytest.mark.long
NUM_STREAMS = 12
UNDER_WAY = 6
CONFIG = """
[mesh]
name = "masks"
run_dir = "{run_dir}"
model = "{model}"
[gateway]
port = 0
[tokenizer]
count = 2
[scheduler]
audit = true
[executor]
global_blocks = 16
window_blocks = 60
[supervisor]
backoff_s = 0.1
"""
ROW = r"([0-9]{1,3}; ){70}"
SCHEMA: Json = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 999},
    "minItems": 40,
    "maxItems": 50,
}


def requests() -> list[tuple[str, Json]]:
    made: list[tuple[str, Json]] = []
    for n in range(NUM_STREAMS):
        body: Json = {
            "model": "tiny",
            "prompt": f"The {n}th river runs past the mill. " * (1 + n % 3),
            "max_tokens": 160,
            "temperature": 1.2,
            "seed": n,
        }
        body |= {"guided_json": SCHEMA} if n % 2 else {"guided_regex": ROW}
        made.append(("/v1/completions", body))
    return made


async def storm(mesh: Mesh, victim: str | None) -> list[Stream]:
    """All streams to their ends; in their middle a process is killed."""
    streams = Streams(requests(), under_way=UNDER_WAY)
    run = asyncio.create_task(streams.run(mesh.url, 100))
    if victim is not None:
        await streams.in_the_middle()
        if victim == "mask worker":
            executor = psutil.Process(mesh.pids["executor-0-0"])
            (worker,) = [c for c in executor.children() if "services.executor.masks" in c.cmdline()]
            os.kill(worker.pid, signal.SIGKILL)
        else:
            mesh.kill(victim)
    await run
    return streams.streams


def check(stream: Stream) -> None:
    """Whole and valid, or cut in the middle of something valid."""
    body, text = stream.body, stream.text
    if stream.events[-1]["choices"][0]["finish_reason"] == "length":
        pattern = r"([0-9]{1,3}; )*[0-9;]*" if "guided_regex" in body else r"\[[0-9,\s]*"
        assert re.fullmatch(pattern, text), text
    elif "guided_regex" in body:
        assert re.fullmatch(ROW, text), text
    else:
        assert 40 <= len(json.loads(text)) <= 50


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    folder = tmp_path_factory.mktemp("g")
    path = folder / "mesh.toml"
    path.write_text(CONFIG.format(run_dir=folder / "run", model=MODEL_FOLDER))
    with Mesh(path) as mesh:
        yield RunningMesh(mesh, path)


@pytest.fixture(scope="module")
def expected(mesh: RunningMesh) -> list[Stream]:
    streams = asyncio.run(storm(mesh.mesh, None))
    for stream in streams:
        check(stream)
    until(lambda: mesh.total("deepmesh_preemptions_total") > 0, "preemptions")
    return streams


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["mask worker", "executor-0-0", "scheduler-0", "tokenizer-0"])
def test_a_killed_process_changes_no_token(
    mesh: RunningMesh, expected: list[Stream], victim: str
) -> None:
    found = asyncio.run(storm(mesh.mesh, victim))
    assert [stream.text for stream in found] == [stream.text for stream in expected]
    assert [stream.num_ends for stream in found] == [1] * NUM_STREAMS
    mesh.wait_idle()


def test_a_preempted_output_is_that_of_a_roomy_mesh(
    expected: list[Stream], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("g")
    path = folder / "mesh.toml"
    roomy = CONFIG.replace("global_blocks = 16\n", "").replace("window_blocks = 60\n", "")
    path.write_text(roomy.format(run_dir=folder / "run", model=Path(MODEL_FOLDER)))
    with Mesh(path) as mesh:
        found = asyncio.run(storm(mesh, None))
        roomy_mesh = RunningMesh(mesh, path)
        roomy_mesh.wait_idle()
        assert roomy_mesh.total("deepmesh_preemptions_total") == 0
    assert [stream.text for stream in found] == [stream.text for stream in expected]
