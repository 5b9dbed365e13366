"""Who is resident: requests enter and leave slots, and their block tables grow and shrink."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deepmesh.prefix_hash import extend_chain
from deepmesh.wire.messages import PointEnd, PointSource, Pool

from .cache_counts import CacheCounts
from .group import group_step_of
from .guests import Guests
from .leases import RankMemory
from .op_fences import OpFences
from .output_points import OutputPoints
from .policy import Geometry, points_to_keep
from .prefix_index import HASH_BYTES, Hit, Point
from .rank_pools import RankPools
from .request import Phase, Request, RequestTable, Zombie


class Residency:
    """Owns the request table and every rank's memory; the one place where leases begin and end."""

    def __init__(self, memories: list[RankMemory], geometry: Geometry) -> None:
        self.memories = memories
        self.pools = tuple(RankPools([memory.pools[pool] for memory in memories]) for pool in Pool)
        self.geometry = geometry
        self.slots = max(memory.num_slots for memory in memories)
        self.table = RequestTable(
            ranks=len(memories),
            slots=self.slots,
            max_len=geometry.max_model_len,
            block_size=geometry.block_size,
        )
        self._outputs = OutputPoints(memories, self.pools, self.table, geometry)
        self.zombies: dict[tuple[int, int], Zombie] = {}
        # keys of points that residents are about to compute, by rank
        self.expected: list[Counter[bytes]] = [Counter() for _ in memories]
        self.closes: list[list[tuple[int, int]]] = [[] for _ in memories]  # (slot, gen), unsent
        self.cancels: list[list[tuple[int, int, int]]] = [[] for _ in memories]
        self.ops = OpFences(memories)
        self.cache = CacheCounts()
        self._per_grid = geometry.chunk_align // geometry.block_size
        self.guests = Guests(memories, geometry.block_size)
        # told of every point, which is published at once then: its rank, and the chain up to it
        self.on_point: Callable[[int, list[bytes], Point], None] | None = None

    def count_in(self, cache: CacheCounts) -> None:
        """What the caches do from here on."""
        self.cache = cache
        for memory in self.memories:
            memory.index.counts = cache

    def grid_keys(self, request: Request) -> list[bytes]:
        """Hashes of its prefixes on the chunk grid, as far as they are known."""
        return request.chain[self._per_grid - 1 :: self._per_grid]

    def enter(self, request: Request, rank: int, hit: Hit) -> bool:
        """Give a request a slot, its blocks up to T and the shared prefix; False: no room now."""
        memory, table = self.memories[rank], self.table
        target = len(request.ids)
        pinned = self._pin(memory, hit)
        own = self.geometry.blocks_for(target) - len(hit.global_blocks)
        taken = self._take(memory, own, 0, 1)
        if taken is None:
            for pool, blocks in pinned:
                self._release(memory, pool, blocks, 0)
            return False
        slot, own, _, state = taken
        index = rank * self.slots + slot
        request.slot = index
        request.deferred_state = hit.point.state_block if hit.point else -1
        request.points = self._points(request, hit)
        self._expect(request, rank, 1)
        self._write_columns(request, index, hit, [*hit.global_blocks, *own], state[0])
        if hit.point is not None:
            self._resume(request, memory, hit.point, hit.global_blocks)
            start, blocks = hit.point.window_start, hit.point.window_blocks
            table.window_start[index] = start
            table.window_end[index] = start + len(blocks)
            table.window_blocks[index, start : start + len(blocks)] = blocks
        return True

    def enter_loading(
        self, request: Request, rank: int, shared: list[int], position: int
    ) -> Point | None:
        """Give a request its slot and blocks, those of a point at `position` included, which a
        load is to fill; None: no room now. `shared` are global blocks that are there already."""
        memory, table, size = self.memories[rank], self.table, self.geometry.block_size
        for block in reversed(shared):
            memory.globals.share(block)
        count, start = position // size, max(0, position - self.geometry.window) // size
        own = self.geometry.blocks_for(len(request.ids)) - len(shared)
        taken = self._take(memory, own, count - start, 2)
        if taken is None:
            self._release(memory, Pool.GLOBAL, shared[::-1], 0)
            return None
        slot, own, windows, (state, point_state) = taken
        index = rank * self.slots + slot
        request.slot, request.deferred_state = index, point_state
        request.points = [position]  # others with this prefix wait for it
        self._expect(request, rank, 1)
        self._write_columns(request, index, Hit(), [*shared, *own], state)
        table.phase[index] = Phase.LOADING
        table.window_start[index], table.window_end[index] = start, count
        table.window_blocks[index, start:count] = windows
        return Point(request.chain[count - 1], position, start, tuple(windows), point_state)

    def loaded(self, request: Request, point: Point, now: int) -> None:
        """The load is complete: from here on it is as if it had hit the point."""
        index, table = request.slot, self.table
        memory, count = self._memory(index), point.position // self.geometry.block_size
        blocks = table.global_blocks[index, :count]
        memory.index.publish(request.chain[:count], blocks, point, PointSource.LOADED)
        if point.key in memory.index.points:
            self._resume(request, memory, memory.index.points[point.key], blocks.tolist())
        table.phase[index] = Phase.PREFILL
        table.confirmed_kv[index] = point.position
        table.progress_ns[index] = now
        self.reached(request, point.position)
        request.points = self._points(request, Hit(point.position, matched=point.position))
        self._expect(request, index // self.slots, 1)

    def leave(self, request: Request, *, publishes: bool = True) -> None:
        """Take a request out of its slot; its blocks and slot stay fenced by its last step. Others
        find the last point in its output from here on, unless nobody is to find anything."""
        index, table = request.slot, self.table
        rank, slot = divmod(index, self.slots)
        memory = self.memories[rank]
        fence = int(table.producer[index])
        request.ids = table.ids[index, : table.confirmed[index]].copy()
        request.last_step = group_step_of(fence) or request.last_step
        request.progress_ns = int(table.progress_ns[index])
        self.guests.left(index)
        if publishes:
            self._outputs.publish(request)
            if request.output_point:
                self._follow(request, memory, request.output_point)
        self.cache.seen.add(self.grid_keys(request))
        held = table.global_blocks[index, : table.num_global[index]]
        self._release(memory, Pool.GLOBAL, held[::-1].tolist(), fence)
        start, end = int(table.window_start[index]), int(table.window_end[index])
        windows = table.window_blocks[index, start:end]
        self._release(memory, Pool.WINDOW, windows[::-1].tolist(), fence)
        self._release(memory, Pool.STATE, [int(table.state[index])], fence)
        if request.deferred_state >= 0:
            self._release(memory, Pool.STATE, [request.deferred_state], 0)
            request.deferred_state = -1
        self._expect(request, rank, -1)
        memory.release_slot(slot, fence)
        if not table.needs_init[index]:
            self.closes[rank].append((slot, int(table.gen[index])))
        if table.inflight_rows[index] > 0:
            key = (request.rid, request.epoch)
            self.zombies[key] = Zombie(*key, rows=int(table.inflight_rows[index]))
            self.cancels[rank].append((request.rid, request.epoch, slot))
        table.phase[index] = Phase.NONE
        table.gen[index] += 1
        table.requests[index] = None
        request.slot = -1
        request.epoch += 1

    def grow_global(self, index: int, tokens: int) -> bool:
        """Lease global blocks so that positions below `tokens` are covered."""
        table = self.table
        have, need = int(table.num_global[index]), self.geometry.blocks_for(tokens)
        if need <= have:
            return True
        blocks = self.memories[index // self.slots].take(Pool.GLOBAL, need - have)
        if blocks is None:
            return False
        table.global_blocks[index, have:need] = blocks
        table.num_global[index] = need
        return True

    def grow_window(self, index: int, tokens: int) -> bool:
        """Lease window blocks so that rows below `tokens` are covered."""
        table = self.table
        have, need = int(table.window_end[index]), self.geometry.blocks_for(tokens)
        if need <= have:
            return True
        blocks = self.memories[index // self.slots].take(Pool.WINDOW, need - have)
        if blocks is None:
            return False
        table.window_blocks[index, have:need] = blocks
        table.window_end[index] = need
        return True

    def grow_rows(self, rows: NDArray[np.intp], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Lease blocks for many rows in one pass, so that positions below their `tokens` are
        covered; for which rows. Left out are those that need several blocks of a class, and ranks
        without enough free ones: they go one by one, by age, and may have to evict."""
        table, need = self.table, self.geometry.blocks_for(tokens)
        ranks = rows // self.slots
        columns = (table.num_global, table.window_end)
        blocks = (table.global_blocks, table.window_blocks)
        lacks = [need - have[rows] for have in columns]
        fits = np.ones(len(rows), np.bool_)
        for pool, lack in zip(self.pools, lacks, strict=False):
            counts = np.bincount(ranks[lack > 0], minlength=len(self.memories))
            fits &= (lack <= 1) & (counts <= pool.num_free())[ranks]
        for pool, lack, have, of in zip(self.pools, lacks, columns, blocks, strict=False):
            grown = fits & (lack > 0)
            at = rows[grown]
            of[at, have[at]] = pool.take(ranks[grown])
            have[at] += 1
        return fits

    def prune_windows(self, indices: NDArray[np.intp]) -> None:
        """Release window blocks below C - W. Never H: a step in flight may start at C."""
        table, size = self.table, self.geometry.block_size
        first = (table.confirmed_kv[indices] - self.geometry.window) // size
        stale = first > table.window_start[indices]
        if not stale.any():
            return
        rows, ends = indices[stale], first[stale]
        counts = ends - table.window_start[rows]
        at = np.repeat(ends - np.cumsum(counts), counts) + np.arange(int(counts.sum()))
        table.window_start[rows] = ends
        rows = np.repeat(rows, counts)
        blocks = table.window_blocks[rows, at]
        self.pools[Pool.WINDOW].release(rows // self.slots, blocks, table.producer[rows])

    def keep_point(self, request: Request, position: int, state_block: int, fence: int) -> None:
        """Publish the resumable point that a step left at C, and end the lease on its state."""
        index, table = request.slot, self.table
        memory = self.memories[index // self.slots]
        assert position <= table.confirmed_kv[index], "a point above C"
        count = position // self.geometry.block_size
        ids = table.ids[index, : table.confirmed[index]]
        extend_chain(request.chain, request.root, ids, self.geometry.block_size, position)
        start = max(0, position - self.geometry.window) // self.geometry.block_size
        windows = table.window_blocks[index, start:count].tolist()
        key = request.chain[count - 1]
        point = Point(key, position, start, tuple(windows), state_block)
        blocks = table.global_blocks[index, :count]
        source = self._source(request, position)
        if memory.index.publish(request.chain[:count], blocks, point, source):
            self._supersede(memory, request, point)
            self._follow(request, memory, point.key)
            if self.on_point is not None:
                self.on_point(index // self.slots, request.chain[:count], point)
        self._release(memory, Pool.STATE, [state_block], fence)

    def keep_outputs(
        self,
        indices: NDArray[np.intp],
        positions: NDArray[np.int64],
        blocks: NDArray[np.int64],
        fence: int,
    ) -> None:
        """Keep the points that outputs have reached, each in the place of the one before. They are
        published when their requests leave, or at once if a kvstore is to have them."""
        if self.on_point is None:
            self._outputs.keep(indices, positions, blocks, fence)
            return
        columns: tuple[list[int], ...] = (indices.tolist(), positions.tolist(), blocks.tolist())
        for index, position, block in zip(*columns, strict=True):
            self.keep_point(self.table.request_at(index), position, block, fence)

    def forget_beyond(self, request: Request, length: int) -> None:
        """What lies beyond the request's end is not published (unless somebody resumes there)."""
        memory = self.memories[request.slot // self.slots]
        point = memory.index.points.get(request.output_point)
        if point and point.position > length and memory.states.held[point.state_block] == 0:
            memory.index.drop_point(point.key, PointEnd.SUPERSEDED)

    def take_states(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """A state block for each row; -1 where none can be had now."""
        ranks, pool = rows // self.slots, self.pools[Pool.STATE]
        counts = np.bincount(ranks, minlength=len(self.memories))
        fits = (counts <= pool.num_free())[ranks]
        blocks = np.full(len(rows), -1, np.int64)
        blocks[fits] = pool.take(ranks[fits])
        for at in np.flatnonzero(~fits).tolist():
            taken = self._memory(int(rows[at])).take(Pool.STATE, 1)
            blocks[at] = taken[0] if taken else -1
        return blocks

    def release_states(
        self, indices: NDArray[np.intp], blocks: NDArray[np.int64], fence: int
    ) -> None:
        """Points of these rows did not come about: their state blocks go back."""
        if len(blocks):
            fences = np.full(len(blocks), fence)
            self.pools[Pool.STATE].release(indices // self.slots, blocks, fences)

    def release_capture(self, rank: int, state_block: int, fence: int) -> None:
        """A point's state has been copied: its block goes back."""
        self._release(self.memories[rank], Pool.STATE, [state_block], fence)

    def settle_zombie(self, rid: int, epoch: int) -> None:
        """One unresolved row of a request that left has been resolved."""
        zombie = self.zombies[rid, epoch]
        zombie.rows -= 1
        if zombie.rows == 0:
            del self.zombies[rid, epoch]

    def _source(self, request: Request, position: int) -> PointSource:
        """Why the request keeps a point there."""
        align = self.geometry.chunk_align
        if position > request.prompt_len:
            return PointSource.OUTPUT
        if position == (request.prompt_len - 1) // align * align:
            return PointSource.PROMPT
        is_mark = any(mark // align * align == position for mark in request.marks)
        return PointSource.MARK if is_mark else PointSource.SHARED

    def _resume(
        self, request: Request, memory: RankMemory, point: Point, blocks: Sequence[int]
    ) -> None:
        """The first to resume at a point takes its shield along to where it ends."""
        is_first = memory.index.resume(point, blocks)
        request.follows = point.key if is_first else b""

    def _follow(self, request: Request, memory: RankMemory, key: bytes) -> None:
        if not request.follows or len(key) > HASH_BYTES or key == request.follows:
            return
        keys = request.chain[: request.chain.index(key) + 1] if key in request.chain else []
        block_of = memory.index.block_of
        blocks = [block_of[key] for key in keys if key in block_of]
        memory.index.follow(request.follows, key, blocks)
        request.follows = key

    def _supersede(self, memory: RankMemory, request: Request, point: Point) -> None:
        """Of the points in a request's output only the last is worth its blocks."""
        if point.position <= request.prompt_len:
            return
        old = memory.index.points.get(request.output_point)
        if old is not None and memory.states.held[old.state_block] == 0:
            memory.index.drop_point(old.key, PointEnd.SUPERSEDED)
        request.output_point = point.key

    def reached(self, request: Request, position: int) -> None:
        """A prefill has passed one of its points: nobody needs to wait for it any more."""
        if position in request.points:
            self._expect(request, request.slot // self.slots, -1, position)
            request.points = [point for point in request.points if point != position]

    def _expect(self, request: Request, rank: int, change: int, only: int = 0) -> None:
        expected, size = self.expected[rank], self.geometry.block_size
        for point in request.points if not only else [only]:
            if point // size <= len(request.chain):
                key = request.chain[point // size - 1]
                expected[key] += change
                if expected[key] <= 0:
                    del expected[key]

    def _points(self, request: Request, hit: Hit) -> list[int]:
        return points_to_keep(
            prompt_len=request.prompt_len,
            target=len(request.ids),
            resumed=hit.position,
            matched=hit.matched,
            marks=request.marks,
            geometry=self.geometry,
        )

    def _memory(self, index: int) -> RankMemory:
        return self.memories[index // self.slots]

    def _take(
        self, memory: RankMemory, num_global: int, num_window: int, num_state: int
    ) -> tuple[int, list[int], list[int], list[int]] | None:
        """A slot and blocks of each class; all of them or none."""
        own = memory.take(Pool.GLOBAL, num_global)
        windows = memory.take(Pool.WINDOW, num_window)
        states = memory.take(Pool.STATE, num_state)
        slot = memory.take_slot()
        if own is not None and windows is not None and states is not None and slot is not None:
            return slot, own, windows, states
        for pool, blocks in zip(Pool, (own, windows, states), strict=True):
            self._release(memory, pool, blocks or [], 0)
        if slot is not None:
            memory.release_slot(slot, 0)
        return None

    def _pin(self, memory: RankMemory, hit: Hit) -> list[tuple[Pool, list[int]]]:
        """Hold a hit's blocks in the event that looked it up."""
        if hit.point is None:
            return []
        pins = [
            (Pool.GLOBAL, list(reversed(hit.global_blocks))),
            (Pool.WINDOW, list(reversed(hit.point.window_blocks))),
            (Pool.STATE, [hit.point.state_block]),
        ]
        for pool, blocks in pins:
            for block in blocks:
                memory.pools[pool].share(block)
        return pins

    def _release(self, memory: RankMemory, pool: Pool, blocks: list[int], fence: int) -> None:
        for block in blocks:
            memory.pools[pool].release(block, fence)

    def _write_columns(
        self, request: Request, index: int, hit: Hit, blocks: list[int], state: int
    ) -> None:
        table, target = self.table, len(request.ids)
        table.requests[index] = request
        rid = request.generate.rid
        table.is_odd[index] = len(rid) != table.wire_rid.itemsize
        if not table.is_odd[index]:
            table.wire_rid[index] = rid
        table.home(index, request.reply_to)
        table.rid[index] = request.rid
        table.epoch[index] = request.epoch
        table.phase[index] = Phase.PREFILL
        table.leaving[index] = False
        table.prompt_len[index] = request.prompt_len
        table.target[index] = target
        table.confirmed[index] = target
        table.confirmed_kv[index] = hit.position
        table.inflight_q[index] = table.inflight_min[index] = 0
        table.inflight_rows[index] = table.inflight_tokens[index] = 0
        table.max_len[index] = request.max_len
        table.acked_len[index] = request.prompt_len + request.acked
        table.progress_ns[index] = request.progress_ns
        table.producer[index] = 0
        table.suspect_len[index] = request.suspect_len if request.suspect else 0
        table.num_logprobs[index] = request.generate.n_logprobs
        table.grammar[index] = request.generate.grammar is not None
        table.num_global[index] = len(blocks)
        table.global_blocks[index, : len(blocks)] = blocks
        table.sent_global[index] = table.sent_window[index] = 0
        table.window_start[index] = table.window_end[index] = 0
        table.state[index] = state
        table.needs_init[index] = True
        table.ids[index, :target] = request.ids
