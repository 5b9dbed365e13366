"""Whatever is published and evicted: a hit is the longest prefix that can be resumed, and its
blocks are those that were computed for exactly these tokens."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deepmesh.prefix_hash import extend_chain, root_hash
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.prefix_index import Point, PrefixIndex

SIZE, ALIGN, WINDOW = 2, 4, 4
ROOT = root_hash(b"", "weights")
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=17)


def chain_of(ids: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, ROOT, np.array(ids, np.int32), SIZE, len(ids))
    return chain


class PrefixIndexMachine(RuleBasedStateMachine):
    """The model: for each global block the tokens that it holds, for each point its prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = (BlockPool(12), BlockPool(8), BlockPool(4))
        self.index = PrefixIndex(self.pools, SIZE)
        self.written: dict[int, tuple[int, ...]] = {}

    @rule(ids=prompts)
    def compute_and_publish(self, ids: list[int]) -> None:
        end = (len(ids) - 1) // ALIGN * ALIGN
        if end == 0:
            return
        chain = chain_of(ids)[: end // SIZE]
        hit = self.index.lookup(chain, end)
        shared = list(hit.global_blocks)
        for block in shared:
            self.pools[0].share(block)
        own = self._take(0, end // SIZE - len(shared))
        windows = self._take(1, WINDOW // SIZE) if own is not None else None
        state = self._take(2, 1) if windows is not None else None
        if own is not None and windows is not None and state is not None:
            blocks = shared + own
            for at in range(len(shared), len(blocks)):
                self.written[blocks[at]] = tuple(ids[: (at + 1) * SIZE])
            point = Point(chain[-1], end, (end - WINDOW) // SIZE, tuple(windows), state[0])
            known = chain[-1] in self.index.points
            assert self.index.publish(chain, np.array(blocks, np.int32), point) != known
        for pool, held in ((0, own), (1, windows), (2, state), (0, shared[::-1])):
            for block in held or []:
                self.pools[pool].release(block, 0)

    def _take(self, pool: int, count: int) -> list[int] | None:
        self.index.make_room(self.pools[pool], count)
        return self.pools[pool].take(count)

    @rule(pool=st.integers(0, 2), count=st.integers(1, 6))
    def press(self, pool: int, count: int) -> None:
        blocks = self._take(pool, count)
        for block in blocks or []:
            self.pools[pool].release(block, 0)

    @rule(ids=prompts)
    def look_up(self, ids: list[int]) -> None:
        hit = self.index.lookup(chain_of(ids), len(ids) - 1)
        assert hit.position <= hit.matched <= len(ids) - 1
        assert len(hit.global_blocks) * SIZE == hit.position
        for at, block in enumerate(hit.global_blocks):
            assert self.written[block] == tuple(ids[: (at + 1) * SIZE])
        longer = chain_of(ids)[len(hit.global_blocks) : hit.matched // SIZE]
        assert not any(key in self.index.points for key in longer)

    @invariant()
    def everything_kept_is_cached_and_everything_cached_is_kept(self) -> None:
        points = list(self.index.points.values())
        counts = [
            np.bincount(list(self.index.block_of.values()) or [0], minlength=12),
            np.bincount([b for p in points for b in p.window_blocks] or [0], minlength=8),
            np.bincount([p.state_block for p in points] or [0], minlength=4),
        ]
        for pool, count, empty in zip(
            self.pools, counts, (not self.index.block_of, not points, not points), strict=True
        ):
            assert pool.cached.tolist() == (count * (not empty)).tolist()
            assert pool.num_held == 0
            assert pool.num_free + pool.num_evictable == pool.total


def test_chains_differ_by_salt_and_weights_and_every_token() -> None:
    ids = np.arange(8, dtype=np.int32)
    other = ids.copy()
    other[0] = 9
    ends = set()
    for root, tokens in (
        (root_hash(b"", "a"), ids),
        (root_hash(b"", "b"), ids),
        (root_hash(b"s", "a"), ids),
        (root_hash(b"", "a"), other),
    ):
        chain: list[bytes] = []
        extend_chain(chain, root, tokens, 4, 8)
        ends.add(chain[-1])
    assert len(ends) == 4


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
