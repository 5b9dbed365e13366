"""Prefill beside streams: sized by time, so that these hardly feel it."""

from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import RowMode, StepCosts
from services.scheduler.core.costs import Costs
from services.scheduler.core.engine import geometry_of
from services.scheduler.core.pace import FINE_ALIGN, Pace
from tests.core.driver import CAPACITY, CONFIG, Driver

COSTS = StepCosts(base_ns=1000, prefill_token_ns=20, decode_row_ns=100)
ALONE = replace(CONFIG, depth=1, prefix_cache=False)


def pace(share: float, *, ranks: int = 1, costs: StepCosts = COSTS, **geometry: bool) -> Pace:
    capacities = [replace(CAPACITY, costs=costs)] * ranks
    shape = replaced(geometry_of(CONFIG, capacities), **geometry)
    return Pace(Costs(capacities), shape, share=share)


def chunk(driver: Driver) -> int:
    """Prefill tokens of the latest step, all requests together."""
    rows = driver.rows(-1)
    return int(rows["q"][rows["mode"] == RowMode.PREFILL].sum())


def test_a_prompt_takes_its_share_of_the_time_or_what_is_fair() -> None:
    tenth = pace(0.1)
    # 20 rows take 3000 ns; a ninth of that, for a tenth of the whole, is 333 ns or 16 tokens
    assert tenth.tokens(rows=20, context=0, prompts=1) == 16
    assert tenth.tokens(rows=20, context=0, prompts=10) == 72  # half of 3000 ns: 75 tokens
    assert tenth.tokens(rows=2, context=0, prompts=2) == 56  # as much as 1200 ns: 60 tokens
    assert pace(0.5).tokens(rows=20, context=0, prompts=1) == 144


def test_a_step_never_lacks_room_for_the_finest_chunk() -> None:
    assert pace(0.0).tokens(rows=1000, context=0, prompts=1) == FINE_ALIGN


def test_longer_contexts_leave_more_time() -> None:
    costs = replace(COSTS, context_kilotoken_ns=1_000_000)
    short, long = (pace(0.1, costs=costs).tokens(20, context, 1) for context in (0, 10_000))
    assert short is not None
    assert long is not None
    assert long > short


@pytest.mark.parametrize(
    "free",
    [
        pace(1.0),
        pace(0.1, costs=StepCosts()),  # nobody has measured
        pace(0.1, ranks=2),  # they step together
        pace(0.1, one_kernel_class=False),  # a chunk off the grid would change bits
    ],
)
def test_it_binds_only_where_it_can_and_may(free: Pace) -> None:
    assert free.tokens(rows=20, context=0, prompts=1) is None


def test_nothing_binds_while_nobody_decodes() -> None:
    assert pace(0.1).tokens(rows=0, context=0, prompts=3) is None


def test_a_long_prompt_comes_in_small_chunks_beside_streams_and_ends() -> None:
    """4 rows take 1400 ns; a quarter of that, as much as one of them, is 350 ns or 17 tokens."""
    driver = Driver(replace(ALONE, prefill_share=0.1), costs=COSTS)  # type: ignore[arg-type]
    for _ in range(4):
        driver.ask(8, max_tokens=40)
    driver.step()
    driver.ask(150, max_tokens=2)
    sizes: list[int] = []
    while driver.core.stats().waiting_tokens:
        driver.step()
        sizes.append(chunk(driver))
    assert sizes == [16] * 9 + [6]
    driver.run()
    driver.assert_clean()  # the same tokens as alone, and the device met no chunk off its grid


def test_a_prompt_alone_comes_in_whole_chunks() -> None:
    driver = Driver(replace(ALONE, prefill_share=0.1), costs=COSTS)  # type: ignore[arg-type]
    driver.ask(150, max_tokens=2)
    driver.tick()
    assert chunk(driver) == CONFIG.chunk_tokens
    driver.run()
    driver.assert_clean()


def test_newcomers_enter_one_behind_the_other_when_there_is_little_time() -> None:
    costs = replace(COSTS, prefill_token_ns=2000)  # the finest chunk is all there is time for
    driver = Driver(replace(ALONE, prefill_share=0.1), costs=costs)  # type: ignore[arg-type]
    for _ in range(4):
        driver.ask(8, max_tokens=60)
    driver.step()
    for _ in range(3):
        driver.ask(20, max_tokens=2)
    talking = driver.core.stats().running
    driver.step()
    assert chunk(driver) == FINE_ALIGN
    assert driver.core.stats().running == talking + 1
    driver.run()
    driver.assert_clean()
