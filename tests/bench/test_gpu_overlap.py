"""`bench overlap --device cuda`: which steps count, and the whole of it with a host for the GPU."""

import argparse
from typing import Any

import numpy as np
import pytest

from bench.gpu import overlap
from bench.gpu.mesh_run import phase_of
from bench.rig.executor import Launch, Notes
from bench.rig.metrics import num_prompt_rows, steady_steps
from bench.rig.recorder import Recording
from bench.rig.run import RunError
from deepmesh.wire.messages import (
    Descriptor,
    RowMode,
    StepKind,
    StepResult,
    StepStatus,
    StepTimes,
    SubmitStep,
)
from deepmesh.wire.packed import ROW, pack_ids

US = 1000


def submit(group_step: int, decode: int, prompts: int = 0) -> SubmitStep:
    rows = np.zeros(decode + prompts, ROW)
    rows["rid"] = np.arange(1, decode + prompts + 1)
    rows["mode"] = RowMode.DECODE
    rows["mode"][decode:] = RowMode.PREFILL
    kind = Descriptor(StepKind.MIXED, len(rows), len(rows))
    return SubmitStep(1, 100 + group_step, group_step, 1, kind, rows.tobytes())


def result(step: SubmitStep, begin_us: int, end_us: int) -> StepResult:
    times = StepTimes(enqueued_ns=(begin_us - 50) * US, begin_ns=begin_us * US, end_ns=end_us * US)
    ids = pack_ids([1, 2])
    return StepResult(1, step.step_id, 0, StepStatus.OK, b"", tokens=ids, times=times)


def recorded(*rows: tuple[int, int]) -> tuple[Recording, Notes]:
    """Steps of 90 us, 10 us apart, launched 30 to 20 us before they begin."""
    submits = [submit(n, *own) for n, own in enumerate(rows, 1)]
    results = [result(step, 100 * n, 100 * n + 90) for n, step in enumerate(submits, 1)]
    launches = [
        Launch(step.step_id, (100 * n - 30) * US, (100 * n - 20) * US)
        for n, step in enumerate(submits, 1)
    ]
    return Recording(submits, results), Notes(launches=launches)


def test_steady_steps_are_the_longest_run_without_a_prompt_and_full() -> None:
    rows = [(1, 9), (10, 0), (10, 0), (9, 1), (10, 0), (9, 0), (10, 0), (3, 0), (10, 0)]
    submits = [submit(n, *own) for n, own in enumerate(rows, 1)]
    assert [num_prompt_rows(step) for step in submits[:4]] == [9, 0, 0, 1]
    assert steady_steps(submits, 10) == (5, 8)
    assert steady_steps(submits[:1], 10) == (0, 0)


def test_a_phase_of_one_length_decodes_alone_and_one_of_many_holds_prompts() -> None:
    recording, notes = recorded((2, 8), (10, 0), (10, 0), (10, 0), (5, 0), (9, 1), (10, 0), (8, 2))
    steady = phase_of(recording, notes, "500", (0, 540 * US), 10)
    assert [step.group_step for step in steady.steps] == [2, 3, 4]
    assert not steady.num_prompt_rows.any()
    mixed = phase_of(recording, notes, "20:40", (540 * US, 10_000 * US), 10)
    assert [step.group_step for step in mixed.steps] == [6, 7, 8]
    assert mixed.num_prompt_rows.tolist() == [1, 0, 2]
    with pytest.raises(RunError, match="500 tokens: no steps were full"):
        phase_of(recording, notes, "500", (540 * US, 640 * US), 10)


def test_figures_are_those_of_the_device_clock_and_the_launching_thread() -> None:
    recording, notes = recorded(*[(4, 0)] * 6)
    found: Any = overlap.phase_figures([phase_of(recording, notes, "9", (0, 1 << 62), 4)])
    assert found["steps"] == 6
    assert (found["gpu_gap_us_p50"], found["gpu_gap_us_max"]) == (10, 10)
    assert found["bubble_ratio"] == pytest.approx(50 / (50 + 6 * 90), abs=1e-5)
    assert found["launch_ms_p50"] == 0.01
    assert found["lead_ms_p50"] == 0.01  # launched 20 us before it begins, 10 before its turn
    assert found["busy_ms_with_prompts"] is None


@pytest.mark.alone
def test_a_slice_whose_weights_are_made_is_measured_in_both_phases() -> None:
    asked = argparse.Namespace(
        device="host",
        preset="v41-nano",
        layers=4,
        rows=[4],
        depth=[2],
        ranks=1,
        runs=1,
        max_len=256,
        chats=["150", "8:16"],
        seconds=1.0,
    )
    found: Any = overlap.run(asked)["cases"]  # parsed, so to speak
    steady, mixed = found
    assert (steady["chats"], mixed["chats"]) == ("150", "8:16")
    assert steady["prompts_per_step"] == 0 < mixed["prompts_per_step"]
    assert steady["steps"] > 10
    assert steady["sync_calls"] == 0
    assert steady["launch_ms_p50"] > 0
    assert len(steady["worst"]) == overlap.NUM_WORST
