"""Who gives way when memory runs short: before an allocation fails, and never more than needed."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool

from .policy import choose_victims
from .request import Phase, Request
from .residency import Residency
from .waiting import WaitingQueue

NON_PREEMPTIBLE_AFTER = 3
SETTLE_TOKENS = 32  # output tokens after which such a request can be preempted again


class Watermark:
    """Chooses victims. A row in flight is left to settle: preempting it at once gains nothing."""

    def __init__(self, residency: Residency, waiting: WaitingQueue) -> None:
        self._residency = residency
        self._table = residency.table
        self._geometry = residency.geometry
        self._waiting = waiting
        self._ranks = len(residency.memories)
        geometry = residency.geometry
        ahead = (geometry.depth + 1) * geometry.decode_width + geometry.draft_reach
        most = ahead, max(ahead, geometry.chunk_align)
        self._most = (geometry.blocks_for(most[0]), geometry.blocks_for(most[1]))
        self.preemptions = 0

    def keep(self) -> None:
        """Preempt before an allocation fails: room for all running rows for depth + 1 steps."""
        table = self._table
        running = np.flatnonzero((table.phase != Phase.NONE) & ~table.leaving)
        running = running[self._may_be_short(running)]
        running = running[~table.retiring(running)]
        if len(running) < 2:
            return
        for pool, needs in self.growth(running).items():
            # who gave way for another pool wants nothing of this one any more
            stays = (table.phase[running] != Phase.NONE) & ~table.leaving[running]
            wants = np.zeros_like(table.num_global)
            wants[running] = needs * stays
            by_rank = wants.reshape(self._ranks, -1).sum(axis=1)
            for rank in np.flatnonzero(by_rank).tolist():
                blocks = self._residency.memories[rank].pools[pool]
                if by_rank[rank] > blocks.num_available:
                    returning = self._residency.ops.num_returning(rank, pool)
                    short = int(by_rank[rank]) - blocks.num_available - returning
                    self._pick_victims(rank, pool, short, wants)

    def _may_be_short(self, running: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Rows on ranks that lack blocks if each row takes as many as any row can."""
        ranks = running // self._residency.slots
        rows = np.bincount(ranks, minlength=self._ranks)
        short = np.zeros(self._ranks, np.bool_)
        for pool, most in zip(self._residency.pools, self._most, strict=False):
            short |= rows * most > pool.num_available()
        return short[ranks]

    def preempt(self, request: Request) -> None:
        """Give a settled request's blocks back and queue it for a recompute."""
        request.preemptions += 1
        self.preemptions += 1
        self._residency.leave(request)
        request.settled_len = 0
        if request.preemptions >= NON_PREEMPTIBLE_AFTER:
            request.settled_len = len(request.ids) + SETTLE_TOKENS
        self._waiting.add(request)

    def break_deadlock(self, rank: int) -> bool:
        """Preempt the newest request of a rank where nothing runs, nothing is in flight, and all
        need blocks; False if there is none but the oldest."""
        here = self._table.resident()
        here = here[here // self._residency.slots == rank]
        here = here[self._table.phase[here] != Phase.LOADING]  # an op keeps its blocks anyway
        if len(here) < 2:
            return False
        residents = [self._table.request_at(i) for i in here.tolist()]
        self.preempt(max(residents, key=lambda request: request.order))
        return True

    def growth(self, running: NDArray[np.intp]) -> dict[Pool, NDArray[np.int64]]:
        """Blocks that each running row may need within depth + 1 steps."""
        table, geometry = self._table, self._geometry
        ahead = (geometry.depth + 1) * geometry.decode_width + geometry.draft_reach
        end = table.confirmed_kv[running] + table.inflight_q[running] + ahead
        end = np.minimum(end, table.max_len[running] + geometry.draft_reach)
        chunk = np.minimum(
            table.confirmed_kv[running] + table.inflight_q[running] + geometry.chunk_align,
            table.target[running],
        )
        blocks = -(-end // geometry.block_size)
        window_end = np.where(table.phase[running] == Phase.PREFILL, chunk, end)
        windows = -(-window_end // geometry.block_size)
        return {
            Pool.GLOBAL: np.maximum(0, blocks - table.num_global[running]),
            Pool.WINDOW: np.maximum(0, windows - table.window_end[running]),
        }

    def _pick_victims(self, rank: int, pool: Pool, short: int, wants: NDArray[np.int64]) -> None:
        """Mark victims; those with nothing in flight go at once. Blocks on the way are counted,
        and so is what a victim `wants` (by its slot) and will not take."""
        table, slots = self._table, self._residency.slots
        here = rank * slots + np.flatnonzero(table.phase[rank * slots : (rank + 1) * slots])
        gone = table.leaving[here] | table.retiring(here)
        short -= sum(self._gain(table.request_at(i), pool) for i in here[gone].tolist())
        residents = [table.request_at(i) for i in here[~gone].tolist()]
        oldest = min(residents, key=lambda request: request.order)
        candidates = [
            r
            for r in residents
            if r is not oldest
            and table.phase[r.slot] != Phase.LOADING
            and table.confirmed[r.slot] >= r.settled_len
        ]
        gains = [self._gain(r, pool) for r in candidates]
        inflight = np.array([table.inflight_rows[r.slot] for r in candidates], np.int64)
        spared: list[int] = wants[[r.slot for r in candidates]].tolist()
        for victim in choose_victims(candidates, gains, spared, inflight, short):
            if table.inflight_rows[victim.slot] == 0:
                self.preempt(victim)
            else:
                table.leaving[victim.slot] = True

    def _gain(self, request: Request, pool: Pool) -> int:
        """Blocks that nobody holds any more once this request has left."""
        table, index = self._table, request.slot
        if pool == Pool.GLOBAL:
            blocks = table.global_blocks[index, : table.num_global[index]]
        else:
            blocks = table.window_blocks[index, table.window_start[index] : table.window_end[index]]
        held = self._residency.memories[index // self._residency.slots].pools[pool].held
        return int(np.count_nonzero(held[blocks] == 1))
