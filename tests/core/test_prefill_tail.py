"""Prompts leave out the upper layers where nothing depends on them: what is kept is exact.

The simulated device has window rows of one layer, which come out wrong for `HALO - W` positions
behind those that were left out: a hit, a sample or a store that meets one of them is an error.
"""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import StoreBlocks
from deepmesh.wire.packed import ROW
from services.scheduler.core.policy import Geometry, skipped
from tests.core.driver import CONFIG, Driver, words
from tests.core.store_driver import StoreDriver
from tests.core.test_prompt_logprobs import ask as ask_scored

HALO = 38  # with windows of 16, blocks of 8
LONG = 220


def chunks(driver: Driver) -> list[tuple[int, int, int]]:
    """Start, positions and skipped ones of each row of a prompt."""
    found: list[tuple[int, int, int]] = []
    for step in driver.all_steps:
        rows = np.frombuffer(step.rows, ROW)
        found += [(int(r["start_lo"]), int(r["q"]), int(r["skip"])) for r in rows if r["q"] > 1]
    return found


def geometry(halo: int = HALO) -> Geometry:
    return Geometry(
        block_size=8,
        chunk_align=16,
        chunk_tokens=32,
        step_tokens=64,
        window=16,
        max_model_len=512,
        depth=2,
        max_rows=8,
        prefill_halo=halo,
    )


@pytest.mark.parametrize(
    ("start", "end", "ends", "expected"),
    [
        (0, 32, [220], 32),
        (160, 192, [220], 16),  # 220 - 38 = 182, whole blocks: 176
        (176, 208, [220], 0),
        (0, 32, [48, 220], 8),  # a point at 48 needs all from 8 on
        (48, 80, [48, 220], 32),  # behind it, only the end counts
        (0, 30, [30], 0),
        (32, 64, [64], 0),
    ],
)
def test_what_a_chunk_may_skip(start: int, end: int, ends: list[int], expected: int) -> None:
    assert skipped(start, end, ends, geometry()) == expected
    assert skipped(start, end, ends, geometry(halo=0)) == 0


def test_a_long_prompt_runs_the_upper_layers_at_its_end_alone() -> None:
    driver = Driver(prefill_halo=HALO)
    driver.ask(LONG, max_tokens=20)
    driver.run()
    skips = sum(skip for _, _, skip in chunks(driver))
    assert skips == 168  # its point is at 208: everything from 208 - 38, whole blocks, on
    assert driver.core.stats().cache.skipped_tokens == skips
    driver.assert_clean()


def test_devices_without_a_halo_are_asked_for_every_layer() -> None:
    driver = Driver()
    driver.ask(LONG, max_tokens=2)
    driver.run()
    assert not any(skip for _, _, skip in chunks(driver))
    driver.assert_clean()


@pytest.mark.parametrize("one_kernel_class", [True, False])
def test_points_in_mid_prompt_can_be_resumed(one_kernel_class: bool) -> None:
    driver = Driver(prefill_halo=HALO, one_kernel_class=one_kernel_class)
    system = words(112)
    for turn in range(4):
        driver.ask(system + words(100, seed=turn + 1), max_tokens=2)
        driver.run()
    last = list(driver.requests.values())[-1]
    assert last.cached_tokens == 112  # kept by the second, which met the first one's blocks
    assert any(skip for _, _, skip in chunks(driver))
    driver.assert_clean()


def test_an_output_recomputed_after_a_loss_is_exact() -> None:
    for one_kernel_class in (True, False):
        driver = Driver(prefill_halo=HALO, one_kernel_class=one_kernel_class)
        request = driver.ask(LONG, max_tokens=60)
        for _ in range(40):
            driver.step()
        driver.lose_executor()
        driver.load()
        driver.run()
        assert len(request.output) == 60
        driver.assert_clean()


def test_last_chunks_that_miss_their_mask_come_again() -> None:
    driver = Driver(prefill_halo=HALO)
    requests = [driver.ask(LONG + at, max_tokens=10, grammar=True) for at in range(6)]
    driver.run()
    assert driver.device.missed_masks >= 0
    assert all(request.terminals for request in requests)
    driver.assert_clean()


def test_a_prompt_whose_logprobs_are_wanted_runs_every_layer() -> None:
    driver = Driver(prefill_halo=HALO)
    ask_scored(driver, words(LONG))
    driver.tick()
    assert [skip for _, _, skip in chunks(driver)] == [0] * len(chunks(driver))
    assert chunks(driver)


def test_stores_hold_exact_rows() -> None:
    driver = StoreDriver(replace(CONFIG, chunk_tokens=64), prefill_halo=HALO)
    driver.ask(LONG, max_tokens=2)
    driver.run()
    assert driver.messages(StoreBlocks)
    assert driver.core.stats().cache.skipped_tokens
    driver.assert_clean()
