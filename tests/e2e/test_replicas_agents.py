"""Two replicas behind a router under sessions of agents and skewed prompts, with real processes."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from urllib.request import Request, urlopen

import pytest

from deepmesh.supervisor import Mesh
from tests.e2e.conftest import RunningMesh, until

pytestmark = pytest.mark.alone  # loads are compared

ROOT = Path(__file__).resolve().parents[2]
AGENTS, TURNS, NEW_TOKENS, OUTPUTS = 4, 8, 90, 24
IDS = range(300, 4000)
# What the router itself counts with where an executor has no profile (docs/operations.md).
TOKEN, ROW = 1.0, 4.0


@contextmanager
def replicas(folder: Path, executor: str) -> Iterator[Mesh]:
    """Two of them behind a router that has learned of the tokenizer."""
    path = folder / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "agents"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        f"[gateway]\nport = 0\n[executor]\n{executor}\n"
        "[router]\ncount = 1\n[scheduler]\ncount = 2\naudit = true\n"
        "[supervisor]\nbackoff_s = 0.1\n"
    )
    with Mesh(path) as mesh:
        router_log = mesh.run_dir / "logs" / "router-0.log"
        until(lambda: "tokenizer-0 is up" in router_log.read_text(), "the tokenizer's link")
        running = RunningMesh(mesh, path)
        until(lambda: running.total("deepmesh_replica_ready") == 2, "both replicas")
        yield mesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """With executors whose steps all take the same time."""
    with replicas(tmp_path_factory.mktemp("a"), 'kind = "fake"\nfake_step_ms = 5.0') as made:
        yield made


@pytest.fixture
def profiled(tmp_path: Path) -> Iterator[Mesh]:
    """With executors that have told what prompts cost: by that the router weighs what is cached."""
    with replicas(tmp_path, "threads = 1") as made:
        yield made


def complete(mesh: Mesh, prompt: list[int], seed: int, outputs: int) -> tuple[str, int]:
    """The text of a completion, and how much of the prompt was cached."""
    fields = {
        "model": mesh.config.served_model,
        "prompt": prompt,
        "seed": seed,
        "max_tokens": outputs,
        "ignore_eos": True,
    }
    body, kind = json.dumps(fields).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(f"{mesh.url}/v1/completions", body, kind), timeout=60) as answer:
        found = json.load(answer)
    assert found["usage"]["completion_tokens"] == outputs, found
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def agent(mesh: Mesh, number: int, turn_over: Counter[int], half: Event) -> list[tuple[str, int]]:
    """A session: each prompt is the one before and something new."""
    draw, prompt = random.Random(number), list[int]()
    answers: list[tuple[str, int]] = []
    for turn in range(TURNS):
        prompt = prompt + draw.choices(IDS, k=NEW_TOKENS)
        answers.append(complete(mesh, prompt, seed=turn, outputs=OUTPUTS))
        turn_over[number] += 1
        if turn_over.total() >= AGENTS * TURNS // 2:
            half.set()
    return answers


def sessions(mesh: Mesh, kill: str = "") -> list[list[tuple[str, int]]]:
    """All sessions side by side; the named process dies when they are half through."""
    turn_over, half = Counter[int](), Event()
    with ThreadPoolExecutor(AGENTS) as pool:
        running = [pool.submit(agent, mesh, n, turn_over, half) for n in range(AGENTS)]
        pid = mesh.kill(kill) if kill and half.wait(60) else 0
        found = [each.result(timeout=120) for each in running]
    if kill:
        assert pid
        mesh.wait_restarted(kill, pid)
    return found


def figures(mesh: Mesh, name: str, label: str) -> dict[str, float]:
    """Samples of a metric by one of its labels."""
    with urlopen(f"{mesh.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(rf'^{name}\{{{label}="([^"]+)"\}} (\S+)$', text, re.MULTILINE)
    return {key: float(value) for key, value in found}


def test_sessions_stay_at_their_replica_and_none_is_lost_when_one_dies(profiled: Mesh) -> None:
    mesh = profiled
    undisturbed = sessions(mesh)
    cached = sum(hit for session in undisturbed for _, hit in session)
    prompts = AGENTS * sum(NEW_TOKENS * turn for turn in range(1, TURNS + 1))
    possible = AGENTS * sum(NEW_TOKENS * turn // 128 * 128 for turn in range(1, TURNS))
    assert cached >= 0.9 * possible, (cached, possible, prompts)

    texts = [[text for text, _ in session] for session in undisturbed]
    for killed in ("scheduler-1", "scheduler-0", "router-0"):
        again = sessions(mesh, killed)
        assert [[text for text, _ in session] for session in again] == texts, killed


def test_skewed_prompts_load_both_replicas_alike(mesh: Mesh) -> None:
    """Most requests begin alike; what each replica has computed is what the router counts."""
    draw = random.Random(5)
    beginnings = [draw.choices(IDS, k=512) for _ in range(3)]
    names = ("prompt_tokens", "cached_prompt_tokens", "output_tokens")

    def counters() -> list[dict[str, float]]:
        return [figures(mesh, f"deepmesh_{name}_total", "replica") for name in names]

    before, requests = counters(), []
    for number in range(720):  # fewer say little: a cold prefix costs as much as ten requests
        start = beginnings[0] if draw.random() < 0.7 else draw.choice(beginnings)
        requests.append((start + draw.choices(IDS, k=draw.randrange(8, 60)), number))
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda each: complete(mesh, each[0], each[1], OUTPUTS), requests))
    wanted = before[2]["scheduler-0"] + before[2]["scheduler-1"] + OUTPUTS * len(requests)
    until(lambda: sum(counters()[2].values()) >= wanted, "heartbeats with all output tokens")
    loads: dict[str, float] = {}
    for name in before[0]:
        prompt, cached, output = (
            now[name] - then[name] for now, then in zip(counters(), before, strict=True)
        )
        loads[name] = TOKEN * (prompt - cached) + ROW * output
    assert max(loads.values()) <= 1.15 * sum(loads.values()) / len(loads), loads

    def decisions() -> dict[str, float]:
        return figures(mesh, "deepmesh_router_decisions_total", "reason")

    until(lambda: sum(decisions().values()) >= len(requests), "the router's heartbeat")
    assert decisions()["hit"] > 0
