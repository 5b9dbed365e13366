"""`make soak` finds what leaks, and only that: its judgement, and a short run with a leak in it."""

import json
import math
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.soak.mix import KINDS, Mix
from tests.soak.processes import Series
from tests.soak.verdict import (
    MAX_SLOPE_MB_H,
    count_problem,
    floors,
    growth_of,
    latency_problems,
    percentiles_of,
    slope_of,
    thirds,
)

ROOT = Path(__file__).resolve().parents[2]
TIMES = [3.0 * n for n in range(480)]  # 24 minutes
# Holds 40 kB more, and one file descriptor, every 20 ms; ends with its parent.
LEAK = """
import os, time
held, parent = [], os.getppid()
print("leaks", flush=True)
while os.getppid() == parent:
    held.append((bytearray(os.urandom(40_000)), os.open("/dev/null", os.O_RDONLY)))
    time.sleep(0.02)
"""


def memory(mb_per_h: float, *, seed: int, alike: float = 0.0, noise_mb: float = 0.3) -> list[float]:
    """Bytes of a process of 100 MB; `alike`: how much of its noise stays for the next sample."""
    draw, drift, found = random.Random(seed), 0.0, list[float]()
    for time_s in TIMES:
        drift = alike * drift + math.sqrt(1 - alike**2) * draw.gauss(0, noise_mb)
        found.append(1e6 * (100 + drift + mb_per_h * time_s / 3600))
    return found


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_steady_memory_is_no_leak_however_it_wavers(alike: float) -> None:
    problems = [
        problem
        for seed in range(200)
        if (problem := growth_of(TIMES, memory(0.0, seed=seed, alike=alike)).problem)
    ]
    assert len(problems) <= 10  # 2.5 % each way, and some for the guess of the noise


@pytest.mark.parametrize("mb_per_h", [1.5, 6.0, 60.0])
def test_memory_that_grows_is_named(mb_per_h: float) -> None:
    for seed in range(50):
        growth = growth_of(TIMES, memory(mb_per_h, seed=seed, alike=0.5, noise_mb=0.1))
        assert "memory grows" in growth.problem
        assert (growth.slope.mean >= MAX_SLOPE_MB_H) is (mb_per_h > MAX_SLOPE_MB_H)


def test_memory_that_is_given_back_is_no_leak() -> None:
    assert not growth_of(TIMES, memory(-20.0, seed=1)).problem


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    slopes = [slope_of(TIMES, memory(2.0, seed=seed, noise_mb=1.0)) for seed in range(300)]
    assert sum(slope.low <= 2e6 <= slope.high for slope in slopes) >= 0.9 * len(slopes)


def test_counts_may_come_and_go_but_not_stay() -> None:
    draw = random.Random(1)
    busy = [40.0 + draw.randrange(30) for _ in TIMES]
    assert not count_problem("sockets", *floors(TIMES, busy))
    leaking = [count + time_s / 60 for count, time_s in zip(busy, TIMES, strict=True)]
    assert count_problem("sockets", *floors(TIMES, leaking)).startswith("sockets grew from")
    assert count_problem("fds", 2000, 2009)  # many that were leaked before excuse none


def test_a_slower_last_third_is_named_by_its_percentile() -> None:
    draw = random.Random(2)
    steady = [draw.uniform(50, 100) for _ in TIMES]
    assert not latency_problems("ttft_ms", percentiles_of(thirds(TIMES, steady)))
    slower = [value * (1 + time_s / 1440) for value, time_s in zip(steady, TIMES, strict=True)]
    found = latency_problems("ttft_ms", percentiles_of(thirds(TIMES, slower)))
    assert [words.split()[1] for words in found][:2] == ["p50", "p90"]
    assert latency_problems("itl_ms", percentiles_of([[1.0], [], []]))


def test_the_mix_has_all_kinds_and_its_conversations_share_their_beginnings() -> None:
    asks = [ask for ask, _ in zip(Mix("tiny", 1), range(600), strict=False)]
    assert {ask.kind for ask in asks} == set(KINDS)
    assert [ask.body for ask in asks] == [
        a.body for a, _ in zip(Mix("tiny", 1), asks, strict=False)
    ]
    turns = [json.loads(ask.body)["messages"] for ask in asks if ask.kind == "turn"]
    longer = [turn for turn in turns if len(turn) > 2]
    assert longer
    assert all(any(turn[:2] == other for other in turns) for turn in longer)
    assert all(ask.give_up_s for ask in asks if ask.kind == "abort")


def test_what_a_process_holds_is_read_from_the_kernel() -> None:
    series = Series(os.getpid())
    series.take(0.0)
    held = mmap.mmap(-1, 8 << 20)  # memory that nobody had before, unlike an allocator's
    held.write(bytes(8 << 20))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    series.take(1.0)
    for file in files:
        os.close(file)
    assert series.uss_bytes[1] - series.uss_bytes[0] > 0.9 * len(held)
    assert series.pss_bytes[1] >= series.uss_bytes[1]
    assert series.counts["fds"][1] - series.counts["fds"][0] == 5
    assert series.counts["threads"][0] >= 1
    held.close()


@contextmanager
def leaking() -> Iterator[int]:
    """A process that leaks; its pid."""
    process = subprocess.Popen([sys.executable, "-c", LEAK], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"leaks\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.timeout(450)
def test_a_leak_is_caught_and_named_in_a_run_of_a_whole_mesh(tmp_path: Path) -> None:
    with leaking() as pid:
        argv = ["--minutes", "0.2", "--capacity-s", "4", "--kind", "fake", "--json"]
        argv += ["--warm-requests", "0"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak", *argv, "--watch", f"leaky={pid}"],
            cwd=ROOT,
            env={**os.environ, "DEEPMESH_RESULTS": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    rows = {case["process"]: case for case in found["cases"] if "process" in case}
    services = {"gateway-0", "tokenizer-0", "tokenizer-1", "router-0", "scheduler-1", "kvstore-0"}
    assert services | {"executor-0-0", "executor-1-0", "supervisor", "redis", "leaky"} <= set(rows)
    assert rows["leaky"]["mb_per_h"] > 100
    first, last = rows["leaky"]["fds"]
    assert last > first + 50
    assert "leaky: memory grows" in done.stderr
    assert "leaky: fds grew" in done.stderr
    quiet = services - {"gateway-0"}  # it has its clients' connections, which come and go
    assert all(rows[name]["fds"][1] <= rows[name]["fds"][0] + 8 for name in quiet)
    load = found["cases"][-1]
    assert {"short", "turn"} <= set(load["done"]) <= set(KINDS) | {"given up"}
    assert load["requests_per_s"] == pytest.approx(0.8 * load["capacity_requests_per_s"], rel=0.02)
    assert set(load["errors"]) <= {"HTTP 400"}  # fake executors keep no output to a grammar
    assert "idle mesh still holds" not in done.stderr
    assert "was started again" not in done.stderr
