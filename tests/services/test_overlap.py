"""`bench overlap`: its figures on paper, and a short run of the real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from bench.rig.cases import Case, choose
from bench.rig.metrics import full_steps, repeatable, window
from deepmesh.wire.messages import (
    Descriptor,
    StepKind,
    StepResult,
    StepStatus,
    StepTimes,
    SubmitStep,
)
from deepmesh.wire.packed import ROW, pack_ids

ROOT = Path(__file__).parents[2]
MS = 1_000_000


def submit(group_step: int, rids: Sequence[int], cancel: bytes = b"") -> SubmitStep:
    rows = np.zeros(len(rids), ROW)
    rows["rid"] = rids
    descriptor = Descriptor(StepKind.DECODE, len(rids), len(rids))
    return SubmitStep(1, 100 + group_step, group_step, 1, descriptor, rows.tobytes(), cancel=cancel)


def result(group_step: int, enqueued_ms: float, begin_ms: float, end_ms: float) -> StepResult:
    times = StepTimes(
        enqueued_ns=round(enqueued_ms * MS),
        begin_ns=round(begin_ms * MS),
        end_ns=round(end_ms * MS),
    )
    tokens = pack_ids([1, 2])
    return StepResult(1, 100 + group_step, 0, StepStatus.OK, b"", tokens=tokens, times=times)


def test_gap_lead_and_busy_are_those_of_the_device_clock() -> None:
    submits = [submit(n, [1, 2]) for n in range(1, 5)]
    results = [
        result(1, 0, 0, 4),  # its tail ends at 5
        result(2, 2, 5, 9),  # was there 3 ms before
        result(3, 12, 12, 16),  # came 2 ms late
        result(4, 13, 17, 21),
    ]
    found = window(submits, results, 1, 5, tail_ns=MS)
    assert (found.gaps / MS).tolist() == [0, 2, 0]
    assert (found.leads / MS).tolist() == [3, -2, 4]
    assert (found.busy / MS).tolist() == [5, 5, 5, 5]
    assert (found.span / MS, found.tokens) == (22, 8)
    inner = window(submits, results, 2, 4, tail_ns=MS)
    assert ((inner.gaps / MS).tolist(), inner.span / MS) == ([2], 12)


def test_a_gap_counts_only_where_the_next_step_was_runnable() -> None:
    submits = [submit(1, [1]), submit(2, [2]), submit(3, [2, 3]), submit(4, [3])]
    results = [result(n, 10 * n, 10 * n, 10 * n + 5) for n in range(1, 5)]
    found = window(submits, results, 1, 5, tail_ns=0)
    assert found.runnable.tolist() == [False, True, True]
    assert len(found.gaps) == 2


def test_what_is_repeated_takes_no_row_back_and_stops_in_time() -> None:
    submits = [submit(1, [1]), submit(2, [1], cancel=b"x" * 16), submit(3, [1])]
    repeated = repeatable(submits, 3)
    assert [step.group_step for step in repeated] == [1, 2]
    assert {step.cancel for step in repeated} == {b""}


def test_steps_of_a_mesh_are_measured_while_it_is_full() -> None:
    counts = [1, 3, 4, 4, 1, 3, 4, 2, 1]
    submits = [submit(n, list(range(count))) for n, count in enumerate(counts, 1)]
    assert full_steps(submits, 4) == (2, 8)


def test_the_matrix_has_every_case_once() -> None:
    both = [False, True]
    cases = choose(
        rows=[1, 64, 256],
        step_ms=[5.0, 20.0],
        depths=[1, 2],
        speculation=both,
        grammar=both,
        works=[0.3, 1.5],
        with_mesh=True,
    )
    assert len(cases) == len(set(cases)) == 3 * 2 * 2 * 2 * 2 + 2 + 1
    assert Case(256, 5.0, 2, work=0.3) in cases


# ---------------------------------------------------------------- the real processes


def run_bench(folder: Path, *options: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "bench.overlap", "--json", "--no-store", "--runs", "1", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["command"] == "bench overlap"
    assert list(folder.iterdir()) == []
    running = [str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in running if str(folder) in line]
    return found


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("o")  # short: sockets lie below it


@pytest.mark.alone
def test_a_short_run_hides_the_host_behind_the_device(folder: Path) -> None:
    """Depth 2 hides what depth 1 shows; limits are wide where other work takes the cores."""
    plain = ["--rows", "8", "--step-ms", "20", "--steps", "20", "--no-mesh", "--work"]
    found = run_bench(folder, *plain, "--speculation", "off", "--grammar", "off")
    alone, ahead = found["cases"]
    assert (alone["depth"], ahead["depth"]) == (1, 2)
    assert ahead["bubble_ratio"] < (0.05 if ahead["valid"] else 0.5)
    assert alone["gpu_gap_us_p50"] > 0 >= alone["lead_ms_p50"]
    assert ahead["lead_ms_p50"] > alone["lead_ms_p50"]
    assert ahead["ideal_ratio"] > (0.95 if ahead["valid"] else 0.4)
    assert ahead["busy_ms_mean"] >= 20
    assert all(case["replay_same_tokens"] for case in found["cases"])


@pytest.mark.alone
def test_drafts_and_masks_run_through_the_real_processes(folder: Path) -> None:
    plain = ["--rows", "8", "--step-ms", "10", "--depth", "2", "--steps", "15", "--no-mesh"]
    found = run_bench(folder, *plain, "--speculation", "on", "--grammar", "on", "--work")
    (case,) = found["cases"]
    assert (case["speculation"], case["grammar"]) == (True, True)
    assert case["tokens_per_step"] > 1.2 * 8, "no draft was accepted"
    assert case["replay_same_tokens"]


@pytest.mark.alone
def test_work_that_fits_no_step_slows_the_run_down(folder: Path) -> None:
    plain = ["--rows", "4", "--step-ms", "10", "--depth", "2", "--steps", "15", "--no-mesh"]
    found = run_bench(folder, *plain, "--speculation", "off", "--grammar", "off", "--work", "2")
    slowed = found["cases"][-1]
    assert slowed["work"] == 2
    assert slowed["throughput_to_no_work"] < (0.6 if slowed["valid"] else 0.9)
    assert slowed["bubble_ratio"] > 0.4


@pytest.mark.alone
def test_the_whole_mesh_is_measured_with_clients_over_http(folder: Path) -> None:
    found = run_bench(folder, "--rows", "--steps", "30")
    (mesh,) = found["cases"]
    assert (mesh["scope"], mesh["rows"]) == ("mesh", 32)
    assert mesh["bubble_ratio"] < 0.5
    assert mesh["replay_same_tokens"]
