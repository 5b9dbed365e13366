"""Verify rows: what is reserved, what comes back, and where the verify capacity comes from."""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import RowMode
from services.scheduler.core.speculation import NUM_BINS, VerifyCapacity, expected_tokens
from tests.core.driver import CONFIG, Driver


def histogram(**counts: int) -> bytes:
    """Drafts by survival: low, middle, high."""
    bins = np.zeros(NUM_BINS, np.uint32)
    for name, at in (("low", 0), ("middle", NUM_BINS // 2), ("high", NUM_BINS - 1)):
        bins[at] = counts.get(name, 0)
    return bins.tobytes()


def test_a_verify_row_reserves_its_drafts_and_the_start_of_the_next_is_a_range() -> None:
    driver = Driver(draft_len=3)
    driver.ask(10, max_tokens=40)
    for _ in range(3):
        driver.step()
    driver.tick()
    newer = driver.rows()
    assert newer["mode"].tolist() == [RowMode.VERIFY]
    assert newer["q"].tolist() == [4]
    assert driver.core.engine is not None
    table = driver.core.engine.residency.table
    confirmed = int(table.confirmed_kv[0])
    assert newer["start_lo"].tolist() == [confirmed + 1]  # the row in flight accepts none, or all
    assert newer["start_hi"].tolist() == [confirmed + 4]
    assert int(table.num_global[0]) * 8 >= confirmed + 8
    descriptor = driver.all_steps[-1].descriptor
    assert (descriptor.n_draft_passes, descriptor.verify_capacity) == (3, 4)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("draft_len", [1, 5, 7])
def test_drafts_change_no_token_and_never_pass_the_limit(depth: int, draft_len: int) -> None:
    driver = Driver(replace(CONFIG, depth=depth), draft_len=draft_len)
    plain = Driver(replace(CONFIG, depth=depth))
    for length in (1, 7, 8, 9, 15, 16, 17, 31, 40):
        driver.ask(length, max_tokens=3 * length % 23 + 1)
        plain.ask(length, max_tokens=3 * length % 23 + 1)
    driver.run()
    plain.run()
    outputs = [request.output for request in driver.requests.values()]
    assert outputs == [request.output for request in plain.requests.values()]
    assert driver.device.rejected_drafts > 0
    assert len(driver.all_steps) < len(plain.all_steps)
    driver.assert_clean()


def test_tokens_behind_a_stop_in_the_same_row_are_thrown_away() -> None:
    plain = Driver()
    whole = plain.ask(10, max_tokens=60)
    plain.run()
    for at in range(2, 40):
        driver = Driver(draft_len=7)
        request = driver.ask(10, max_tokens=60, stop_at=at)
        while len(request.output) < at:
            driver.step()
        driver.stop_at(request, at)
        driver.run()
        assert request.output[:at] == whole.output[:at]
        driver.assert_clean()


def test_without_a_cost_table_or_data_every_draft_is_verified() -> None:
    assert VerifyCapacity(draft_len=5).choose(8) == 48
    trimmed = VerifyCapacity(draft_len=5, cost_by_tier={16: 1.0, 48: 9.0})
    assert trimmed.choose(8) == 48
    trimmed.observe(histogram(high=8, low=32))
    assert trimmed.choose(8) == 48  # one step's data is not two steps old
    trimmed.observe(histogram(high=40))
    assert trimmed.choose(8) == 16


def test_the_capacity_comes_from_data_two_steps_old() -> None:
    capacity = VerifyCapacity(draft_len=5, cost_by_tier={16: 1.0, 48: 2.0})
    capacity.observe(histogram(high=40))
    capacity.observe(histogram(high=8, low=32))
    assert capacity.choose(8) == 48  # from the first, where all drafts survived
    capacity.observe(histogram(high=8, low=32))
    assert capacity.choose(8) == 16
    capacity.observe(b"")
    assert capacity.choose(8) == 48


def test_expected_tokens_take_the_likeliest_drafts_first() -> None:
    counts = np.frombuffer(histogram(high=4, middle=4), np.uint32)
    high, middle = (NUM_BINS - 0.5) / NUM_BINS, (NUM_BINS // 2 + 0.5) / NUM_BINS
    assert expected_tokens(counts, rows=4, capacity=4) == 4
    assert expected_tokens(counts, rows=4, capacity=6) == 4 + 2 * high
    assert expected_tokens(counts, rows=4, capacity=10) == 4 + 4 * high + 2 * middle
    assert expected_tokens(counts, rows=4, capacity=99) == 4 + 4 * high + 4 * middle
