"""Chunks of one prompt that all ranks compute: who lends what, for how long."""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import Capacity, Pool, PromptWork, StepKind, SubmitStep
from deepmesh.wire.packed import ROW, unpack_ids
from services.scheduler.core.events import Tick
from tests.core.ranks import CONFIG, ROOMY, Ranks

SHARING = replace(ROOMY, prompt_work=PromptWork([0, 4095], [10, 2000], align=4))
PARTS = replace(CONFIG, context_parallel_tokens=32)  # chunks of 64 a rank


def plan(ranks: Ranks) -> list[SubmitStep]:
    """The next step of every rank, not answered yet."""
    ranks.feed(Tick())
    return ranks.waiting[0]


def ranks_of(count: int, capacity: Capacity = SHARING, *, prompt: int = 400) -> Ranks:
    ranks = Ranks([capacity] * count, PARTS)
    ranks.ask([1 + i % 90 for i in range(prompt)])
    return ranks


@pytest.mark.parametrize("count", [2, 4])
def test_a_prompt_alone_is_cut_by_work_and_home_has_its_tail(count: int) -> None:
    ranks = ranks_of(count)
    steps = plan(ranks)
    split = steps[0].descriptor.split
    assert split is not None
    assert {step.descriptor.kind for step in steps} == {StepKind.PREFILL}
    assert (split.bounds[0], len(split.bounds)) == (0, count + 1)
    assert split.bounds[-1] == min(64 * count, 384)  # 384: a point of the prompt
    assert np.diff(split.bounds)[0] > np.diff(split.bounds)[-1]  # later tokens cost more
    assert steps[0].descriptor.padded_tokens == np.diff(split.bounds).max()
    for rank, step in enumerate(steps):
        part = (rank - split.home - 1) % count
        assert step.part is not None
        assert len(unpack_ids(step.part.ids)) >= split.bounds[part + 1] - split.bounds[part]
        rows = np.frombuffer(step.rows, ROW)
        assert (int(rows["q"][0]) == split.bounds[-1]) == (rank == split.home)
    ranks.run()
    assert len(ranks.ended) == 1
    assert ranks.core.stats().shared_prompt_tokens == 384


def test_what_is_lent_for_a_step_is_fenced_by_it() -> None:
    ranks = ranks_of(2)
    steps = plan(ranks)
    split = steps[0].descriptor.split
    assert split is not None
    helper = 1 - split.home
    engine = ranks.core.engine
    assert engine is not None
    pools = engine.memories[helper].pools
    lent = steps[helper].part
    assert lent is not None
    windows, states = pools[Pool.WINDOW].fenced_blocks(), pools[Pool.STATE].fenced_blocks()
    assert sorted(windows[steps[0].step_id]) == sorted(unpack_ids(lent.window_blocks).tolist())
    assert states[steps[0].step_id] == [lent.state_block]
    assert pools[Pool.GLOBAL].num_held == len(unpack_ids(lent.global_blocks))
    ranks.run()
    assert pools[Pool.GLOBAL].num_held == 0


def test_helpers_keep_the_rows_of_chunks_that_follow_each_other() -> None:
    ranks = ranks_of(2)
    shared: list[tuple[int, int]] = []
    while (steps := plan(ranks)) and (split := steps[0].descriptor.split) is not None:
        shared.append((split.shared, split.bounds[0]))
        ranks.step()
    assert shared[0] == (0, 0)
    assert len(shared) == 3
    assert all(known == start for known, start in shared)


def test_a_chunk_behind_a_cached_prefix_is_shared_and_helpers_get_what_they_lack() -> None:
    ranks = ranks_of(2)
    ranks.run()
    ranks.ask([1 + i % 90 for i in range(390)] + [7] * 300)
    split = plan(ranks)[0].descriptor.split
    assert split is not None
    assert (split.shared, split.bounds[0]) == (0, 384)
    ranks.run()


def test_an_own_chunk_beside_decode_rows_or_other_prompts_is_not_cut() -> None:
    ranks = ranks_of(2)
    ranks.ask([3] * 300)
    while len(ranks.ended) < 2:
        assert all(step.part is None for step in plan(ranks))
        ranks.step()


@pytest.mark.parametrize(
    ("home", "helper", "prompt"),
    [
        (ROOMY, ROOMY, 400),  # they compute chunks alone
        (SHARING, replace(SHARING, num_window_blocks=5), 400),  # no room for a part of 32 tokens
        (replace(SHARING, window=40),) * 2 + (76,),  # of which each part must hold all
    ],
)
def test_without_room_or_length_its_own_rank_computes_it_alone(
    home: Capacity, helper: Capacity, prompt: int
) -> None:
    ranks = Ranks([home, helper], PARTS)
    ranks.ask([1 + i % 90 for i in range(prompt)])
    while not ranks.ended:
        assert all(step.part is None for step in plan(ranks))
        ranks.step()
