"""Who gets a step's prefill budget: first chunks before long prompts, and nobody starves."""

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import RowMode, RowSource
from services.scheduler.core.prefill import PASSED_STEPS
from tests.core.driver import CONFIG, Driver

NARROW = replace(CONFIG, depth=1, step_tokens=16, chunk_tokens=32, prefix_cache=False)


def chunks(driver: Driver, at: int) -> dict[int, int]:
    """Prefill tokens by the core's request number, in a submitted step."""
    rows = driver.rows(at)
    rows = rows[rows["mode"] == RowMode.PREFILL]
    return dict(zip(rows["rid"].tolist(), rows["q"].tolist(), strict=True))


def test_a_new_request_begins_in_the_next_step_however_long_the_prompts_before_it_are() -> None:
    driver = Driver(replace(CONFIG, step_tokens=32, prefix_cache=False))
    driver.ask(400, max_tokens=1)
    for _ in range(3):
        driver.step()
    driver.ask(100, max_tokens=1)
    driver.tick()
    assert chunks(driver, -1) == {1: 16, 2: 16}
    driver.run()
    driver.assert_clean()


def test_several_new_requests_share_a_step_and_the_oldest_takes_what_is_left() -> None:
    driver = Driver(replace(CONFIG, step_tokens=64, depth=1, prefix_cache=False))
    driver.ask(400, max_tokens=1)
    driver.step()
    for _ in range(2):
        driver.ask(40, max_tokens=1)
    driver.tick()
    assert chunks(driver, -1) == {1: 32, 2: 16, 3: 16}
    driver.run()
    driver.assert_clean()


def test_chunks_end_on_the_grid_whoever_takes_the_budget() -> None:
    driver = Driver(replace(CONFIG, step_tokens=40, depth=1, prefix_cache=False))
    driver.ask(203, max_tokens=1)
    for _ in range(4):
        driver.step()
        driver.ask(37, max_tokens=1)
    driver.run()
    driver.assert_clean()  # the device refuses a chunk off the grid


def test_newcomers_do_not_starve_an_old_prompt() -> None:
    """One grid chunk a step, and each step a new request that would take it."""
    driver = Driver(replace(NARROW, max_rows=12, max_waiting=100), num_slots=12)
    old = driver.ask(96, max_tokens=1)
    driver.step()
    steps = 0
    while not old.terminals:
        driver.ask(16, max_tokens=1)
        driver.step()
        steps += 1
        assert steps <= 5 * (PASSED_STEPS + 1) + 2
    gave = [at for at in range(len(driver.all_steps)) if 1 in chunks(driver, at)]
    assert max(b - a for a, b in pairwise(gave)) == PASSED_STEPS + 1
    driver.run()
    driver.assert_clean()


def test_an_old_prompt_does_not_starve_newcomers() -> None:
    driver = Driver(NARROW)
    driver.ask(400, max_tokens=1)
    driver.step()
    late = driver.ask(40, max_tokens=1)
    for _ in range(4):
        driver.step()
    first = next(at for at in range(len(driver.all_steps)) if 2 in chunks(driver, at))
    assert first == 1
    driver.run()
    assert late.terminals
    driver.assert_clean()


def test_decodes_go_on_beside_any_number_of_prompts() -> None:
    driver = Driver(replace(NARROW, max_rows=12), num_slots=12)
    talker = driver.ask(8, max_tokens=20)
    driver.step()
    for _ in range(8):
        driver.ask(60, max_tokens=1)
    for _ in range(19):
        before = len(talker.output)
        driver.step()
        assert len(talker.output) == before + 1
    driver.run()
    driver.assert_clean()


@pytest.mark.parametrize("draft_len", [0, 3])
def test_output_is_recomputed_by_the_decode_kernels_in_rows_of_any_width(draft_len: int) -> None:
    """Two kernel classes: from P on a recompute is VERIFY rows of known ids, off the grid."""
    driver = Driver(
        replace(CONFIG, prefix_cache=False, depth=1),
        num_global_blocks=16,
        one_kernel_class=False,
        draft_len=draft_len,
    )
    for _ in range(4):
        driver.ask(21, max_tokens=60)
    driver.run()
    assert driver.core.stats().preemptions > 0
    rows = np.concatenate([driver.rows(at) for at in range(len(driver.all_steps))])
    known = rows[rows["source"] == RowSource.HOST]
    wide, prefill = known[known["mode"] == RowMode.VERIFY], known[known["mode"] == RowMode.PREFILL]
    assert (prefill["start_lo"] + prefill["q"] <= 21).all()
    assert (wide["start_lo"] >= 21).all()
    again = wide[wide["start_lo"] == 21]  # the first such row begins exactly at P
    assert len(again) > 0
    assert again["q"].max() > 16
    driver.assert_clean()
