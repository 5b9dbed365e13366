"""Answers of a device that cannot be right end the engine epoch, never the process."""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import (
    DoneReason,
    GpuDone,
    Pool,
    Reset,
    Shutdown,
    StepResult,
    StepStatus,
)
from deepmesh.wire.packed import RESULT, ROW
from tests.core.driver import CONFIG, EXECUTOR, Driver

NULL = DoneReason.NULL


def submit(driver: Driver) -> StepResult:
    """The result of the oldest step, before anybody has seen it."""
    driver.tick()
    step = driver.steps.popleft()
    driver.tails.append(step)
    return driver.device.body(step)


@pytest.mark.parametrize("rank", [-1, 1, 1 << 40])
def test_a_watermark_of_an_unknown_rank_is_ignored(rank: int) -> None:
    driver = Driver()
    driver.ask(10)
    driver.mail(GpuDone(1, rank, 1 << 32, []), EXECUTOR)
    driver.run()
    driver.assert_clean()


def test_a_watermark_ahead_of_all_steps_frees_nothing_and_ends_the_epoch() -> None:
    driver = Driver(replace(CONFIG, prefix_cache=False))
    request = driver.ask(20, max_tokens=1)
    result = submit(driver)
    driver.mail(GpuDone(1, 0, result.step_id + 99, []), EXECUTOR)
    assert driver.last(Reset).engine_epoch == 2
    driver.run()
    assert not driver.core.registry.live
    assert driver.requests[request.rid].terminals
    driver.assert_clean()


def test_a_result_whose_watermark_is_ahead_of_all_steps_ends_the_epoch() -> None:
    driver = Driver()
    driver.ask(20)
    driver.mail(replace(result := submit(driver), gpu_done=result.step_id + 99), EXECUTOR)
    assert driver.last(Reset).engine_epoch == 2
    driver.run()
    driver.assert_clean()


@pytest.mark.parametrize(
    ("length", "fields"),
    [
        (10, {"num_tokens": 0}),  # all positions, and no token
        (10, {"num_tokens": 0, "done_reason": NULL}),  # nothing left to compute the token from
        (10, {"num_tokens": 0, "kv_len": 4}),
        (40, {"kv_len": 16}),  # half of a chunk that is not the last
    ],
)
def test_a_chunk_is_whole_or_null(length: int, fields: dict[str, int]) -> None:
    driver = Driver()
    driver.ask(length)
    result = submit(driver)
    rows = np.frombuffer(result.rows, RESULT).copy()
    for name, value in fields.items():
        rows[name] = value
    tokens = b"" if "num_tokens" in fields else result.tokens
    driver.mail(replace(result, rows=rows.tobytes(), tokens=tokens), EXECUTOR)
    assert driver.last(Reset).engine_epoch == 2
    driver.run()
    driver.assert_clean()


@pytest.mark.parametrize("length", [10, 80])
def test_behind_a_chunk_that_was_skipped_the_request_begins_anew(length: int) -> None:
    """What was in flight behind it lacks its KV: those rows settle as null rows first."""
    driver = Driver(replace(CONFIG, depth=3, prefix_cache=False))
    request = driver.ask(length, max_tokens=6)
    driver.tick()
    assert len(driver.steps) == 3
    for status in (StepStatus.SKIPPED, StepStatus.OK, StepStatus.OK):
        step = driver.steps.popleft()
        rows = np.frombuffer(step.rows, ROW)
        found = np.zeros(len(rows), RESULT)
        driver.tails.append(step)
        result = driver.device.body(replace(step, rows=b""))
        for name in ("rid", "epoch", "slot", "gen"):
            found[name] = rows[name]
        found["done_reason"] = NULL
        driver.mail(replace(result, status=status, rows=found.tobytes()), EXECUTOR)
        driver.tail()
    driver.tick()
    assert len(driver.steps[0].init) == 1
    driver.run()
    assert request.terminals
    assert driver.blocks(Pool.GLOBAL)[3] == 0
    driver.assert_clean()


def test_a_watermark_that_stands_still_is_no_progress() -> None:
    driver = Driver()
    driver.ask(10)
    driver.tick()
    for _ in range(13):
        driver.mail(GpuDone(1, 0, 0, []), EXECUTOR)
        driver.tick(seconds=10)
    assert driver.messages(Shutdown), "the device has brought nothing for 130 s"
