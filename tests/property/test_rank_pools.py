"""Many blocks at once or one by one: the pools of all ranks come to the same."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.rank_pools import RankPools

TOTALS = (6, 9, 4)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["take", "share", "keep", "pin", "release", "drop", "unpin", "advance"]),
        st.randoms(use_true_random=False),
    ),
    max_size=30,
)


def state_of(pool: BlockPool) -> tuple[object, ...]:
    """All that can be seen of a pool; the order of free blocks does not matter."""
    fenced = {step: sorted(blocks) for step, blocks in pool.fenced_blocks().items()}
    columns = [column.tolist() for column in (pool.held, pool.cached, pool.pins, pool.fence)]
    free, kept = sorted(pool.free_blocks()), sorted(pool.evictable_blocks())
    return (columns, free, kept, fenced, pool.num_pinned)


@given(EVENTS, st.sampled_from([0, 4, 100]))
def test_a_pass_over_all_ranks_does_what_single_calls_do(
    events: list[tuple[str, Random]],
    few: int,
) -> None:
    single = [BlockPool(total) for total in TOTALS]
    pools = [BlockPool(total) for total in TOTALS]
    joined = RankPools(pools, few=few)
    for step, (kind, draw) in enumerate(events, 1):
        chosen = [
            (rank, block)
            for rank, pool in enumerate(single)
            for block in range(pool.total)
            if draw.random() < 0.5 and _allows(pool, kind, block)
        ]
        ranks = np.array([rank for rank, _ in chosen], np.intp)
        blocks = np.array([block for _, block in chosen], np.int64)
        fences = np.array([step + draw.randrange(3) for _ in chosen], np.int64)
        match kind:
            case "take":
                ranks = np.array([r for r in range(3) for _ in range(min(2, single[r].num_free))])
                taken = joined.take(ranks.astype(np.intp))
                for rank, block in zip(ranks.tolist(), taken.tolist(), strict=True):
                    _take(single[rank], block)
            case "release":
                joined.release(ranks, blocks, fences)
                for (rank, block), fence in zip(chosen, fences.tolist(), strict=True):
                    single[rank].release(block, fence)
            case "keep":
                joined.keep(ranks, blocks)
                for rank, block in chosen:
                    single[rank].keep(block)
            case "drop":
                joined.drop(ranks, blocks)
                for rank, block in chosen:
                    single[rank].drop(block)
            case "advance":
                for pool in (*single, *pools):
                    pool.advance(step - 1)
            case _:
                for rank, block in chosen:
                    for pool in (single[rank], pools[rank]):
                        getattr(pool, kind)(block)
        assert [state_of(pool) for pool in pools] == [state_of(pool) for pool in single]
        assert joined.num_free().tolist() == [pool.num_free for pool in single]


def _allows(pool: BlockPool, kind: str, block: int) -> bool:
    """Whether a call of this kind is right for the block."""
    held, cached = pool.held[block] > 0, pool.cached[block] > 0
    return bool(
        {
            "share": held or cached,
            "pin": held or cached,
            "keep": held,
            "release": held,
            "drop": cached,
            "unpin": pool.pins[block] > 0,
        }.get(kind, False)
    )


def _take(pool: BlockPool, block: int) -> None:
    """Take a certain block of those that are free."""
    free = pool.free_blocks()
    free.remove(block)
    free.append(block)
    assert pool.take(1) == [block]
