"""Prefill beside streams: sized by time, so that these hardly feel it."""

from dataclasses import replace as replaced

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import RowMode, StepCosts, StepKind
from services.scheduler.core.costs import Costs
from services.scheduler.core.engine import geometry_of
from services.scheduler.core.group import StepRecord, StepRows
from services.scheduler.core.pace import FINE_ALIGN, Pace
from tests.core.driver import CAPACITY, CONFIG, Driver

COSTS = StepCosts(base_ns=1000, prefill_token_ns=20, decode_row_ns=100)
ALONE = replace(CONFIG, depth=1, prefix_cache=False)


def pace(share: float, *, ranks: int = 1, costs: StepCosts = COSTS, **geometry: bool) -> Pace:
    capacities = [replace(CAPACITY, costs=costs)] * ranks
    shape = replaced(geometry_of(CONFIG, capacities), **geometry)
    return Pace(Costs(capacities), shape, share=share)


def most(paced: Pace, rows: int, context: int, prompts: int) -> int | None:
    """Of a rank alone."""
    found = paced.tokens(np.array([rows]), np.array([context]), prompts)
    return None if found is None else int(found[0])


def chunk(driver: Driver) -> int:
    """Prefill tokens of the latest step, all requests together."""
    rows = driver.rows(-1)
    return int(rows["q"][rows["mode"] == RowMode.PREFILL].sum())


def test_a_prompt_takes_its_share_of_the_time_or_what_is_fair() -> None:
    tenth = pace(0.1)
    # 20 rows take 3000 ns; a ninth of that, for a tenth of the whole, is 333 ns or 16 tokens
    assert most(tenth, rows=20, context=0, prompts=1) == 16
    assert most(tenth, rows=20, context=0, prompts=10) == 72  # half of 3000 ns: 75 tokens
    assert most(tenth, rows=2, context=0, prompts=2) == 56  # as much as 1200 ns: 60 tokens
    assert most(pace(0.5), rows=20, context=0, prompts=1) == 144


def test_a_step_never_lacks_room_for_the_finest_chunk() -> None:
    assert most(pace(0.0), rows=1000, context=0, prompts=1) == FINE_ALIGN


def test_longer_contexts_leave_more_time() -> None:
    costs = replace(COSTS, context_kilotoken_ns=1_000_000)
    short, long = (most(pace(0.1, costs=costs), 20, context, 1) for context in (0, 10_000))
    assert short is not None
    assert long is not None
    assert long > short


@pytest.mark.parametrize(
    "free",
    [
        pace(1.0),
        pace(0.1, costs=StepCosts()),  # nobody has measured
        pace(0.1, one_kernel_class=False),  # a chunk off the grid would change bits
    ],
)
def test_it_binds_only_where_it_can_and_may(free: Pace) -> None:
    assert most(free, rows=20, context=0, prompts=1) is None
    assert not free.binds


def test_nothing_binds_while_nobody_decodes() -> None:
    assert most(pace(0.1), rows=0, context=0, prompts=3) is None


def test_ranks_that_step_together_prefill_until_the_slowest_one_has_ended() -> None:
    """20 and 5 rows take 3000 and 1500 ns, a tenth more than 3000 is 333 ns."""
    both = pace(0.1, ranks=2)
    assert both.binds
    found = both.tokens(np.array([20, 5]), np.array([0, 0]), prompts=1)
    assert found is not None
    assert found.tolist() == [16, 88]  # 333 and 1833 ns
    idle = both.tokens(np.array([20, 0]), np.array([0, 0]), prompts=1)
    assert idle is not None
    assert idle.tolist() == [16, 112]  # a rank without rows: 3333 - 1000 ns
    fair = both.tokens(np.array([4, 4]), np.array([0, 0]), prompts=4)
    assert fair is not None
    assert fair.tolist() == [32, 32]  # half as many prompts as rows: 700 of 1400 ns


def ran(kind: StepKind, decodes: tuple[int, int], prefill: int, took_ns: int) -> StepRecord:
    """A step of two ranks, the first of which prefills."""
    counts = [decodes[0] + (prefill > 0), decodes[1]]
    rows = StepRows(*(np.zeros(sum(counts), kind) for kind in "qQIIqqq?q"))  # type: ignore[arg-type]
    if prefill:
        rows.is_prefill[0], rows.q[0] = True, prefill
    bounds = [0, counts[0], sum(counts)]
    return StepRecord(1, kind, rows, bounds, set(), 0, begin_ns=50, end_ns=50 + took_ns)


def by_rank(paced: Pace) -> list[int]:
    """Prefill beside 20 and 5 rows."""
    rows = np.array([20, 5])
    found = paced.tokens(rows, 0 * rows, prompts=1)
    assert found is not None
    return found.tolist()


def test_what_ranks_lose_by_stepping_together_is_time_that_prefill_may_add_to() -> None:
    """Steps of 20 and 5 rows take 12000 ns where the ranks alone need 3000 and 1500."""
    both = pace(0.1, ranks=2)
    assert by_rank(both) == [16, 88]
    for _ in range(200):
        both.saw(ran(StepKind.DECODE, (20, 5), 0, 12_000))
    assert by_rank(both) == [64, 136]  # a ninth of 12000 is 1333 ns or 66 tokens


def test_prefill_that_takes_longer_than_measured_gets_fewer_tokens() -> None:
    """On a busy machine all of a step takes four times as long: its shares stay as they are."""
    both = pace(0.1, ranks=2)
    for _ in range(200):
        both.saw(ran(StepKind.DECODE, (20, 5), 0, 12_000))
        both.saw(ran(StepKind.MIXED, (20, 5), 50, 12_000 + 4 * 1_000))
    assert by_rank(both) == [16, 32]  # 1333 and 2833 ns, of 80 ns a token
    for _ in range(400):
        both.saw(ran(StepKind.DECODE, (20, 5), 0, 3_000))
        both.saw(ran(StepKind.MIXED, (20, 5), 50, 4_000))
    assert by_rank(both) == [16, 88]


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
