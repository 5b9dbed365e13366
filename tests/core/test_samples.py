"""n > 1: children of one prompt share its blocks; each ends for itself."""

import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import FinishReason
from tests.core.driver import CONFIG, Driver, words
from tests.core.ranks import CONFIG as RANKS_CONFIG
from tests.core.ranks import ROOMY, Ranks

PROMPT = words(100, seed=3)
GRID = 96  # grid points of 16 below the prompt's last token


def prefill_tokens(driver: Driver) -> int:
    total = 0
    for at in range(len(driver.all_steps)):
        rows = driver.rows(at)
        total += int(rows["q"][rows["source"] == 0].sum())
    return total


def children(driver: Driver, count: int = 4, **fields: object) -> list:
    return [driver.ask(PROMPT, 12, sub_index=index, **fields) for index in range(count)]


def test_the_prompt_is_computed_once_and_each_child_has_its_own_tokens() -> None:
    driver = Driver()
    asked = children(driver)
    driver.run()
    assert prefill_tokens(driver) == 100 + 3 * (100 - GRID)
    driver.assert_clean()
    assert len({tuple(child.output) for child in asked}) == 4


def test_without_a_prefix_cache_each_child_computes_the_prompt() -> None:
    driver = Driver(replace(CONFIG, prefix_cache=False))
    children(driver)
    driver.run()
    assert prefill_tokens(driver) == 4 * 100
    driver.assert_clean()


def test_a_prompt_below_one_grid_chunk_is_not_waited_for() -> None:
    driver = Driver()
    for index in range(3):
        driver.ask(PROMPT[:14], 4, sub_index=index)
    driver.tick()
    assert len(driver.rows(0)) == 3
    driver.run()
    driver.assert_clean()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_the_computing_child_is_aborted_the_next_takes_over(steps: int) -> None:
    driver = Driver(replace(CONFIG, depth=1))
    first, *others = children(driver)
    driver.tick()
    for _ in range(steps):
        driver.step()
    driver.abort(first)
    driver.run()
    done = min(100, 32 * (1 + steps))
    assert prefill_tokens(driver) <= done + 100 + 2 * (100 - GRID)
    assert first.terminals[0].reason == FinishReason.ABORT  # type: ignore[union-attr]
    assert all(len(child.output) == 12 for child in others)
    driver.assert_clean()


def test_limits_stops_and_aborts_are_those_of_each_child() -> None:
    driver = Driver()
    short = driver.ask(PROMPT, 2, sub_index=0)
    stopped = driver.ask(PROMPT, 40, sub_index=1)
    stopped.stop_at = 5
    aborted = driver.ask(PROMPT, 40, sub_index=2)
    full = driver.ask(PROMPT, 20, sub_index=3)
    while len(aborted.output) < 3 or len(stopped.output) < 5:
        driver.step()
    driver.abort(aborted)
    driver.stop_at(stopped, 5)
    driver.run()
    ends = [child.terminals[0] for child in (short, stopped, full)]
    assert [end.final_pos for end in ends] == [2, 5, 20]
    reasons = [end.reason for end in ends]  # type: ignore[union-attr]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    driver.assert_clean()


def test_children_spread_over_ranks_where_computing_again_costs_less_than_crowding() -> None:
    """The same 4 children: a short prompt is computed again elsewhere, a long one is not."""
    spread: list[int] = []
    for length in (64, 2000):
        ranks = Ranks([ROOMY] * 4)
        for index in range(4):
            ranks.ask(words(length, seed=1), max_tokens=400, sub_index=index)
        for _ in range(60):
            ranks.step()
        assert len(ranks.places) == 4
        spread.append(len({places[0] for places in ranks.places.values()}))
        if length == 2000:
            assert sum(ranks.prefilled) <= 2000 + 3 * 16
    assert spread == [4, 1]


def test_who_waits_for_a_prefix_does_not_wait_for_ever() -> None:
    """The child that computes is held up: it is to be preempted, and a row of it never settles."""
    config = replace(RANKS_CONFIG, chunk_tokens=16, step_tokens=16)
    ranks = Ranks([ROOMY] * 2, config)
    first = ranks.ask(words(400, seed=1), max_tokens=4)
    ranks.step()
    engine = ranks.core.engine
    assert engine is not None
    request = next(iter(ranks.core.registry.live.values()))
    engine.residency.table.leaving[request.slot] = True  # it gets no more rows
    second = ranks.ask(words(400, seed=1), max_tokens=4)
    other = ranks.ask(words(30, seed=2), max_tokens=200)
    for _ in range(200):
        ranks.step()
    assert second in ranks.ended
    assert other in ranks.places
    assert first not in ranks.ended
