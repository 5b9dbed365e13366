"""Any order of take, share, keep and release leaves each block in exactly one class."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.core.block_pool import SHIELDED, BlockPool

TOTAL = 6


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: tables of holders, a set of cached blocks, and the last fence of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.tables: list[list[int]] = []
        self.cached: Counter[int] = Counter()
        self.fence: Counter[int] = Counter()
        self.step = 0

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.take(count)
        assert (blocks is None) == (count > free)
        if blocks:
            held = [b for table in self.tables for b in table]
            assert not set(blocks) & (set(held) | set(self.cached))
            assert all(self.fence[b] <= self.pool.gpu_done for b in blocks)
            self.tables.append(blocks)

    @precondition(lambda self: any(self.tables) or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = sorted({b for table in self.tables for b in table} | set(self.cached))
        block = data.draw(st.sampled_from(known))
        self.pool.share(block)
        self.tables.append([block])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), ahead=st.integers(-1, 2))
    def release(self, data: st.DataObject, ahead: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        fence = max(0, self.step + ahead)
        block = table.pop()
        self.pool.release(block, fence)
        self.fence[block] = max(self.fence[block], fence)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        self.pool.keep(block)
        self.cached[block] += 1

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.drop(block)
        self.cached[block] -= 1
        self.cached += Counter()

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), on=st.booleans())
    def shield(self, data: st.DataObject, on: bool) -> None:
        self.pool.shield(data.draw(st.sampled_from(sorted(self.cached))), on)

    @rule(count=st.integers(1, 2))
    def advance(self, count: int) -> None:
        self.step += count
        self.pool.advance(self.step)

    @invariant()
    def each_block_is_in_one_class(self) -> None:
        held = Counter(b for table in self.tables for b in table)
        assert {b: int(n) for b, n in enumerate(self.pool.held) if n} == dict(held)
        assert {b: int(n) for b, n in enumerate(self.pool.cached) if n} == dict(self.cached)
        idle = [b for b in range(TOTAL) if not held[b] and not self.cached[b]]
        fenced = [b for b in idle if self.fence[b] > self.pool.gpu_done]
        listed = [b for blocks in self.pool.fenced_blocks().values() for b in blocks]
        assert sorted(listed) == fenced
        assert sorted(self.pool.free_blocks()) == sorted(set(idle) - set(fenced))
        assert self.pool.num_evictable == sum(not held[b] for b in self.cached)
        assert self.pool.num_held == len(held)

    @invariant()
    def the_eviction_candidate_is_one_that_nobody_holds(self) -> None:
        block = self.pool.oldest_evictable()
        if block is not None:
            assert self.cached[block] > 0
            assert self.pool.held[block] == 0
            queue = self.pool.evictable_blocks()
            shielded = [bool(self.pool.shielded[at]) for at in queue]
            assert queue[0] == block
            assert shielded == sorted(shielded), "a shielded block leaves before another"
            assert sum(shielded) <= SHIELDED * TOTAL

    @invariant()
    def nothing_is_shielded_that_nobody_keeps(self) -> None:
        held = {b for table in self.tables for b in table}
        assert set(np.flatnonzero(self.pool.shielded).tolist()) <= held | set(self.cached)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
