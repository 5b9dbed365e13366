"""Whatever holds or moves prefixes is killed under load, Redis too: the same text, nothing left."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepmesh.client import Client, ClientError
from deepmesh.run_dir import tail
from deepmesh.store_operator import ask_stats
from deepmesh.supervisor import Mesh
from tests.e2e.conftest import RunningMesh
from tests.e2e.wire_client import WireClient
from tests.redis_server import RedisServer, redis_server

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
TALKERS = 6
MAX_TOKENS = 24
TURNS = 3
TRANSFER_TTL_S = 60.0  # of what a kvstore has shown
BACK_S = 60.0
CONFIG = """
[mesh]
name = "caches"
run_dir = "{run_dir}"
model = "{model}"
[gateway]
port = 0
[router]
count = 1
[scheduler]
count = 2
roles = ["prefill", "both"]
max_rows = 8
step_tokens = 512
audit = true
store_lookup_s = 0.5
[executor]
global_blocks = 160
[kvstore]
count = 2
memory_bytes = 4194304
disk_bytes = 67108864
redis_url = "{redis_url}"
redis_max_bytes = 8388608
[links]
heartbeat_s = 0.25
[supervisor]
backoff_s = 0.1
"""
PROCESSES = (
    "kvstore-0",
    "kvstore-1",
    "scheduler-0",  # the prefill side
    "executor-0-0",
    "scheduler-1",  # the decode side
    "executor-1-0",
    "router-0",
)
REDIS = ("redis killed", "redis hangs", "redis flushed")
TEXT = "the mill river stone old house garden north wind paper light seven"
WORDS = TEXT.split()


class Talk:
    """One of the conversations that all talkers go through: every turn begins with the last."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number % 3)  # three system prompts
        own = random.Random(100 + number)
        self._system = " ".join(draw.choice(WORDS) for _ in range(230))
        self._asked = [" ".join(own.choice(WORDS) for _ in range(60)) for _ in range(TURNS)]
        self._seed = number

    def run(self, url: str) -> list[str]:
        """The answers.

        Raises:
            ClientError: refused or cut.
        """
        messages: list[dict[str, object]] = [{"role": "system", "content": self._system}]
        answers: list[str] = []
        with Client(url, timeout_s=240.0) as client:
            for asked in self._asked:
                messages.append({"role": "user", "content": asked})
                answers.append(self._answer(client, messages))
                messages.append({"role": "assistant", "content": answers[-1]})
        return answers

    def _answer(self, client: Client, messages: list[dict[str, object]]) -> str:
        fields: dict[str, object] = {
            "model": "tiny",
            "temperature": 0.8 if self._seed % 2 else 0.0,
            "seed": self._seed,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "thinking": {"type": "disabled"},
        }
        pieces: list[str] = []
        for event in client.stream_chat(messages, fields):
            if event.kind == "finish":
                return "".join(pieces)
            pieces.append(event.text)
        raise ClientError("the stream ended without a reason")


class Talkers:
    """Go through the talks again and again until they are told to stop."""

    def __init__(self, url: str, expected: list[list[str]]) -> None:
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self.num_right = 0
        self.wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(TALKERS)
        ]

    def __enter__(self) -> "Talkers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300.0)

    def check(self) -> None:
        """No answer was lost, cut or another one, and nobody hangs."""
        assert self.wrong == []
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"
        assert self.num_right > 0

    def _run(self, number: int) -> None:
        while not self._stop.is_set() and not self.wrong:
            try:
                answers = Talk(number).run(self._url)
            except ClientError as error:
                self.wrong.append(f"talk {number}: {error}")
                return
            if answers != self._expected[number]:
                self.wrong.append(f"talk {number}: {answers} instead of {self._expected[number]}")
            self.num_right += len(answers)
            number = (number + 1) % TALKERS


class Chaos:
    """Kills one thing at a time, the next once it is back."""

    def __init__(self, mesh: Mesh, redis: RedisServer, seed: int) -> None:
        self._mesh, self._redis = mesh, redis
        self._draw = random.Random(seed)
        self.killed: Counter[str] = Counter()

    def run(self, count: int, talkers: Talkers) -> None:
        """Every victim in turn, in an order of chance; stops when an answer is wrong."""
        victims = [*PROCESSES, *REDIS]
        left: list[str] = []
        for _ in range(count):
            if talkers.wrong:
                return
            if not left:
                left = self._draw.sample(victims, len(victims))
            self._kill(left.pop())
            self._mesh.wait_for(lambda: bool(talkers.wrong), self._draw.uniform(0.1, 2.0))

    def _kill(self, victim: str) -> None:
        self.killed[victim] += 1
        if victim in REDIS:
            self._on_redis(victim)
            return
        pid = self._mesh.kill(victim)
        assert self._mesh.wait_restarted(victim, pid, BACK_S), f"{victim} does not come back"

    def _on_redis(self, how: str) -> None:
        if how == "redis flushed":
            self._redis.client().flushall()
        elif how == "redis killed":
            self._redis.kill()
            self._mesh.wait_for(lambda: False, self._draw.uniform(0.0, 3.0))
            self._redis.start()
        else:
            os.kill(self._redis.pid, signal.SIGSTOP)
            self._mesh.wait_for(lambda: False, self._draw.uniform(0.5, 4.0))
            os.kill(self._redis.pid, signal.SIGCONT)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(420)]),
        pytest.param(50, marks=[pytest.mark.large, pytest.mark.timeout(1500)]),
    ],
)
def test_kills_of_all_that_holds_or_moves_prefixes_change_nothing(
    tmp_path: Path, redis: RedisServer, kills: int
) -> None:
    path = tmp_path / "mesh.toml"
    settings = {"run_dir": tmp_path / "run", "model": MODEL, "redis_url": redis.url}
    path.write_text(CONFIG.format(**settings))
    with Mesh(path) as mesh:
        try:
            _run(mesh, path, redis, kills)
        except BaseException as error:
            for log in sorted((tmp_path / "run" / "logs").glob("*-0*.log")):
                error.add_note(f"{log.name}:\n  " + "\n  ".join(tail(log, 8)))
            raise


def _run(mesh: Mesh, path: Path, redis: RedisServer, kills: int) -> None:
    for index in range(2):
        wait_all_free(mesh, index)
    expected = [Talk(number).run(mesh.url) for number in range(TALKERS)]
    with Talkers(mesh.url, expected) as talkers:
        chaos = Chaos(mesh, redis, seed=kills)
        chaos.run(kills, talkers)
    print(f"{sum(chaos.killed.values())} kills, {talkers.num_right} answers: {dict(chaos.killed)}")
    talkers.check()
    assert sum(chaos.killed.values()) == kills
    running = RunningMesh(mesh, path)
    running.wait_idle()
    assert running.total("deepmesh_failed_audits_total") == 0
    assert running.total("deepmesh_quarantined_blocks") == 0
    assert running.total("deepmesh_stored_blocks_total") > 0, "the kvstores had no part in it"
    for index in range(2):
        wait_all_free(mesh, index)
    for index in range(2):
        assert wait_nothing_held(mesh, index) == {"open_transfers": 0, "memory_held_bytes": 0}


def wait_all_free(mesh: Mesh, index: int) -> None:
    """A scheduler is ready and every block of its group is free or kept for hits."""
    client = WireClient(mesh.config.scheduler_address(index))
    try:
        client.wait_stats(lambda s: s.ready and s.running == 0 and not any(s.pinned_blocks), 90)
        stats = client.stats
        unused = [f + c for f, c in zip(stats.free_blocks, stats.cached_blocks, strict=True)]
        assert unused == list(stats.total_blocks), "blocks leaked"
    finally:
        client.close()


def wait_nothing_held(mesh: Mesh, index: int) -> dict[str, int]:
    """What a kvstore still keeps for transfers, at the latest when their time is over."""
    deadline = time.monotonic() + TRANSFER_TTL_S + 10.0
    while True:
        stats = ask_stats(mesh.config, index)
        values = dict(stats.values) if stats is not None else {}
        held = {name: values.get(name, -1) for name in ("open_transfers", "memory_held_bytes")}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        mesh.wait_for(lambda: False, 0.5)
