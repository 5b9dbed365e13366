"""How rows are chosen and cut: chunks on the grid, decode rows riding along, depth."""

from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import RowMode, RowSource, StepKind
from deepmesh.wire.packed import BLOCK
from tests.core.driver import CONFIG, Driver


@dataclass
class Spans:
    """First positions and widths of the rows of a step."""

    starts: list[int]
    widths: list[int]


def spans(driver: Driver, at: int = -1) -> Spans:
    rows = driver.rows(at)
    return Spans(rows["start_hi"].tolist(), rows["q"].tolist())


def test_a_request_runs_to_its_length_with_the_oracles_tokens() -> None:
    driver = Driver()
    request = driver.ask(40, max_tokens=9)
    driver.run()
    assert len(request.output) == 9
    assert driver.last(type(request.terminals[0])).prompt_tokens == 40
    driver.assert_clean()


def test_prefill_chunks_end_on_the_grid_or_at_the_end_of_the_prompt() -> None:
    driver = Driver()
    driver.ask(75, max_tokens=1)
    driver.run()
    widths = [int(rows["q"][0]) for rows in map(driver.rows, range(len(driver.all_steps)))]
    assert widths == [32, 32, 11]  # the last grid point, 64, ends a chunk anyway


def test_a_chunk_ends_where_a_resumable_point_is_kept() -> None:
    driver = Driver(replace(CONFIG, chunk_tokens=64))
    driver.ask(60, max_tokens=1)
    driver.run()
    assert spans(driver, 0) == Spans([0], [48])
    assert spans(driver, 1) == Spans([48], [12])


def test_the_budget_packs_whole_grid_chunks_and_never_cuts_one() -> None:
    driver = Driver(replace(CONFIG, step_tokens=40))
    first, second = driver.ask(30, max_tokens=1), driver.ask(30, max_tokens=1)
    driver.tick()
    assert spans(driver, 0) == Spans([0, 0], [16, 16])  # 24 left: one grid chunk of 16
    driver.run()
    assert first.terminals
    assert second.terminals
    driver.assert_clean()


def test_decode_rows_ride_along_with_a_prefill_chunk() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=20)
    driver.step()
    driver.step()
    driver.ask(100, max_tokens=2)
    driver.step()
    step = driver.all_steps[-1]
    assert step.descriptor.kind == StepKind.MIXED
    assert driver.rows()["mode"].tolist() == [RowMode.DECODE, RowMode.PREFILL]
    driver.run()
    driver.assert_clean()


def test_who_has_not_begun_gets_one_grid_chunk_and_the_oldest_gets_what_is_left() -> None:
    driver = Driver(replace(CONFIG, step_tokens=32))
    driver.ask(96, max_tokens=1)
    driver.ask(8, max_tokens=1)
    driver.run()
    assert [spans(driver, at).widths for at in range(4)] == [[16, 8], [32], [32], [16]]
    driver.assert_clean()


def test_a_prefill_goes_on_beside_more_decode_rows_than_the_step_has_tokens() -> None:
    driver = Driver(replace(CONFIG, step_tokens=16, chunk_tokens=16, max_rows=8))
    for _ in range(7):
        driver.ask(4, max_tokens=60)
    for _ in range(6):
        driver.step()
    late = driver.ask(40, max_tokens=2)
    for _ in range(12):
        driver.step()
    assert late.terminals, "the decode rows starved it"
    driver.run()
    driver.assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_more_steps_are_in_flight_than_depth_says(depth: int) -> None:
    driver = Driver(replace(CONFIG, depth=depth))
    driver.ask(10, max_tokens=30)
    driver.tick()
    driver.tick()
    assert len(driver.steps) == depth
    driver.run()
    driver.assert_clean()


def test_the_second_step_takes_its_token_from_the_first_on_the_device() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=5)
    driver.tick()
    prefill, decode = driver.rows(0), driver.rows(1)
    assert prefill["source"].tolist() == [RowSource.HOST]
    assert decode["source"].tolist() == [RowSource.DEVICE]
    assert decode["producer_step"].tolist() == [driver.all_steps[0].step_id]
    assert decode["start_lo"].tolist() == decode["start_hi"].tolist() == [10]


def test_nothing_is_scheduled_beyond_max_tokens() -> None:
    driver = Driver(replace(CONFIG, depth=3))
    driver.ask(10, max_tokens=2)
    driver.run()
    assert len(driver.all_steps) == 2  # prefill brings the first token, one decode the second


def test_slot_data_is_sent_once_and_blocks_only_when_they_are_new() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=30)
    driver.run()
    assert [len(step.init) for step in driver.all_steps] == [1] + [0] * 29
    sent = [np.frombuffer(step.blocks, BLOCK) for step in driver.all_steps]
    pairs = [(int(b["pool"]), int(b["index"])) for rows in sent for b in rows]
    assert len(set(pairs)) == len(pairs) == 2 * 5  # 39 positions are 5 blocks of 8, two classes
    assert sum(len(rows) > 0 for rows in sent) == 4


def test_steps_are_numbered_without_gaps_and_never_anew() -> None:
    driver = Driver()
    driver.ask(10, max_tokens=3)
    driver.run()
    driver.ask(10, max_tokens=3)
    driver.run()
    ids = [step.step_id for step in driver.all_steps]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    assert all(step.step_id >> 32 == step.engine_epoch for step in driver.all_steps)


def test_priorities_are_admitted_first() -> None:
    driver = Driver(replace(CONFIG, max_rows=1))
    driver.ask(10, max_tokens=4)
    driver.tick()
    low, high = driver.ask(10, max_tokens=1), driver.ask(10, max_tokens=1, priority=5)
    driver.run()
    assert high.first_token_ns < low.first_token_ns
    driver.assert_clean()


def test_every_step_is_reported_with_its_rows_and_tokens() -> None:
    driver = Driver()
    driver.ask(20, max_tokens=3)
    driver.run()
    reports = driver.steps_ended()
    assert [report.num_tokens for report in reports] == [16, 4, 1, 1]
    assert {report.num_rows for report in reports} == {1}
    assert reports[0].kind == StepKind.PREFILL
