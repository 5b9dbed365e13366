"""Plans one numbered group step: preempt, choose rows, admit, lease what the rows will write."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool

from .policy import choose_victims, chunk_end, least_alone
from .prefix_index import Hit, extend_chain
from .request import Phase, Request
from .residency import Residency
from .waiting import WaitingQueue

NON_PREEMPTIBLE_AFTER = 3
SETTLE_TOKENS = 32  # output tokens after which such a request can be preempted again


@dataclass(slots=True)
class Plan:
    """Rows of all ranks for one step, by table index."""

    decode: NDArray[np.intp]  # ascending, so rank by rank
    prefill: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    captures: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    preempted: list[Request] = field(default_factory=list[Request])
    starved: bool = False  # a row could run but for blocks

    @property
    def empty(self) -> bool:
        """No rank has a row."""
        return len(self.decode) == 0 and not self.prefill


class Planner:
    """Chooses rows. Decode rows first, then prefill chunks oldest first, then new requests."""

    def __init__(
        self, residency: Residency, waiting: WaitingQueue, *, prefix_cache: bool, max_unacked: int
    ) -> None:
        self._residency = residency
        self._table = residency.table
        self._waiting = waiting
        self._prefix_cache = prefix_cache
        self._max_unacked = max_unacked
        self._ranks = len(residency.memories)
        self._geometry = residency.geometry
        self.preemptions = 0
        self.cached_tokens = 0

    def plan(self, now: int) -> Plan:
        """Rows for the next step, with everything that they will write leased."""
        plan = Plan(decode=np.empty(0, np.intp))
        self._keep_watermark(plan)
        self._choose_decode(plan)
        self._choose_prefill(plan)
        self._admit(plan, now)
        return plan

    def preempt(self, request: Request) -> None:
        """Give a settled request's blocks back and queue it for a recompute."""
        request.preemptions += 1
        self.preemptions += 1
        self._residency.leave(request)
        request.settled_len = 0
        if request.preemptions >= NON_PREEMPTIBLE_AFTER:
            request.settled_len = len(request.ids) + SETTLE_TOKENS
        self._waiting.add(request)

    def break_deadlock(self) -> bool:
        """Preempt the newest request: nothing runs, nothing is in flight, all need blocks."""
        residents = [self._table.request_at(i) for i in self._table.resident().tolist()]
        for rank in range(self._ranks):
            here = [r for r in residents if r.slot // self._residency.slots == rank]
            if len(here) > 1:
                victim = max(here, key=lambda request: request.order)
                self.preempt(victim)
                return True
        return False

    # ------------------------------------------------------------ watermark

    def _keep_watermark(self, plan: Plan) -> None:
        """Preempt before an allocation fails: room for all running rows for depth + 1 steps."""
        table = self._table
        running = np.flatnonzero((table.phase != Phase.NONE) & ~table.leaving)
        if len(running) < 2:
            return
        for pool, needs in self._growth(running).items():
            by_rank = np.bincount(
                running // self._residency.slots, weights=needs, minlength=self._ranks
            )
            for rank in np.flatnonzero(by_rank).tolist():
                blocks = self._residency.memories[rank].pools[pool]
                if by_rank[rank] > blocks.num_available:
                    short = int(by_rank[rank]) - blocks.num_available - blocks.num_fenced
                    self._pick_victims(plan, rank, pool, short)

    def _growth(self, running: NDArray[np.intp]) -> dict[Pool, NDArray[np.int64]]:
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

    def _pick_victims(self, plan: Plan, rank: int, pool: Pool, short: int) -> None:
        """Mark victims; those with nothing in flight go at once. Blocks on the way are counted."""
        table, slots = self._table, self._residency.slots
        here = rank * slots + np.flatnonzero(table.phase[rank * slots : (rank + 1) * slots])
        residents = [table.request_at(i) for i in here.tolist()]
        short -= sum(self._gain(r, pool) for r in residents if table.leaving[r.slot])
        oldest = min(residents, key=lambda request: request.order)
        candidates = [
            r
            for r in residents
            if r is not oldest
            and not table.leaving[r.slot]
            and table.confirmed[r.slot] >= r.settled_len
        ]
        gains = [self._gain(r, pool) for r in candidates]
        inflight = np.array([table.inflight_rows[r.slot] for r in candidates], np.int64)
        for victim in choose_victims(candidates, gains, inflight, short):
            if table.inflight_rows[victim.slot] == 0:
                self.preempt(victim)
                plan.preempted.append(victim)
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

    # ------------------------------------------------------------ rows

    def _choose_decode(self, plan: Plan) -> None:
        table, geometry = self._table, self._geometry
        rows = np.flatnonzero(
            (table.phase == Phase.DECODE)
            & ~table.leaving
            & (table.confirmed + table.inflight_tokens < table.max_len)
            & (table.confirmed - table.acked_len < self._max_unacked)
        )
        end = table.confirmed_kv[rows] + table.inflight_q[rows] + geometry.decode_width
        need = -(-(end + geometry.draft_reach) // geometry.block_size)
        grow = (need > table.num_global[rows]) | (need > table.window_end[rows])
        refused: list[int] = []
        for at in self._oldest_first(rows, np.flatnonzero(grow)):
            index, tokens = int(rows[at]), int(end[at]) + geometry.draft_reach
            grown = self._residency.grow_global(index, tokens)
            if not (grown and self._residency.grow_window(index, tokens)):
                refused.append(at)
        if refused:
            plan.starved = True
            rows, end = np.delete(rows, refused), np.delete(end, refused)
        plan.decode = rows
        if self._prefix_cache and geometry.one_kernel_class:
            crossing = end // geometry.chunk_align > (end - 1) // geometry.chunk_align
            for at in np.flatnonzero(crossing).tolist():
                position = int(end[at]) // geometry.chunk_align * geometry.chunk_align
                self._capture(plan, int(rows[at]), position)

    def _oldest_first(self, rows: NDArray[np.intp], at: NDArray[np.intp]) -> list[int]:
        order = sorted(at.tolist(), key=lambda i: self._table.request_at(int(rows[i])).order)
        return order

    def _choose_prefill(self, plan: Plan) -> None:
        table = self._table
        rows = np.flatnonzero((table.phase == Phase.PREFILL) & ~table.leaving)
        budgets = self._budgets(plan)
        requests = sorted(
            (table.request_at(i) for i in rows.tolist()), key=lambda request: request.order
        )
        for request in requests:
            self._add_chunk(plan, request, budgets)

    def _budgets(self, plan: Plan) -> list[int]:
        """Tokens left for prefill, by rank; one grid chunk always fits beside the decode rows."""
        geometry, slots = self._geometry, self._residency.slots
        rows = np.bincount(plan.decode // slots, minlength=self._ranks)
        taken = [0] * self._ranks
        for index, start, end in plan.prefill:
            taken[index // slots] += end - start
        return [
            max(
                geometry.step_tokens - int(rows[rank]) * geometry.decode_width, geometry.chunk_align
            )
            - taken[rank]
            for rank in range(self._ranks)
        ]

    def _add_chunk(self, plan: Plan, request: Request, budgets: list[int]) -> bool:
        table, index = self._table, request.slot
        rank = index // self._residency.slots
        start = int(table.confirmed_kv[index] + table.inflight_q[index])
        target = int(table.target[index])
        end = chunk_end(
            start,
            target,
            geometry=self._geometry,
            budget=budgets[rank],
            points=request.points,
        )
        if end > start:
            end = self._fit_window(index, start, end)
            plan.starved |= end == start
        if end == start:
            return False
        plan.prefill.append((index, start, end))
        budgets[rank] -= end - start
        if end in request.points and self._prefix_cache:
            self._capture(plan, index, end)
        return True

    def _fit_window(self, index: int, start: int, end: int) -> int:
        """The longest chunk on the grid whose window rows can be leased now."""
        geometry = self._geometry
        memory = self._residency.memories[index // self._residency.slots]
        room = int(self._table.window_end[index]) + memory.windows.num_available
        if room < geometry.blocks_for(end):
            align = geometry.chunk_align
            end = max(start, room * geometry.block_size // align * align)
        if end > start and not self._residency.grow_window(index, end):
            return start
        return end

    def _capture(self, plan: Plan, index: int, position: int) -> None:
        """Lease a state block for a resumable point; without one the point is not kept."""
        memory = self._residency.memories[index // self._residency.slots]
        block = memory.take(Pool.STATE, 1)
        if block is not None:
            plan.captures.append((index, position, block[0]))

    # ------------------------------------------------------------ admission

    def _admit(self, plan: Plan, now: int) -> None:
        """Admit from the head of the queue while rank, slot, blocks and step have room."""
        budgets = self._budgets(plan)
        while (request := self._waiting.head()) is not None:
            rank, hit = self._place(request, budgets)
            if rank < 0 or not self._residency.enter(request, rank, hit):
                return
            self._waiting.remove(request)
            if request.admitted_ns == 0:
                request.admitted_ns = now
            if request.cached_tokens < 0:
                request.cached_tokens = min(hit.position, request.prompt_len)
                self.cached_tokens += request.cached_tokens
            self._add_chunk(plan, request, budgets)

    def _place(self, request: Request, budgets: list[int]) -> tuple[int, Hit]:
        """The rank with the longest hit, then the fewest residents; -1 if none has room."""
        best: tuple[int, int, int] | None = None
        choice, choice_hit = -1, Hit()
        for rank, memory in enumerate(self._residency.memories):
            resident = self._residency.num_resident(rank)
            if budgets[rank] < self._geometry.chunk_align or memory.num_free_slots == 0:
                continue
            if resident >= self._geometry.max_rows:
                continue
            hit = self._lookup(request, rank)
            if not self._has_room(request, rank, hit, resident):
                if resident or not self._has_room(request, rank, Hit(), resident):
                    continue
                hit = Hit()
            score = (-hit.position, resident, rank)
            if best is None or score < best:
                best, choice, choice_hit = score, rank, hit
        return choice, choice_hit

    def _lookup(self, request: Request, rank: int) -> Hit:
        if not self._prefix_cache:
            return Hit()
        size, limit = self._geometry.block_size, len(request.ids) - 1
        extend_chain(request.chain, request.root, request.ids, size, limit)
        return self._residency.memories[rank].index.lookup(request.chain, limit)

    def _has_room(self, request: Request, rank: int, hit: Hit, resident: int) -> bool:
        """Blocks for T and the growth of what runs already; a hit's own blocks stop being spare."""
        geometry, memory, table = self._geometry, self._residency.memories[rank], self._table
        shared = len(hit.global_blocks)
        pinned = sum(memory.globals.held[block] == 0 for block in hit.global_blocks)
        need = geometry.blocks_for(len(request.ids)) - shared
        ahead = len(request.ids) + (geometry.depth + 1) * geometry.decode_width
        reserve = geometry.blocks_for(min(ahead, request.max_len) + geometry.draft_reach)
        floor = least_alone(geometry, request.max_len)[1]
        windows, window_reserve = floor, 0
        if hit.point is not None:
            windows += sum(memory.windows.held[b] == 0 for b in hit.point.window_blocks)
            windows -= len(hit.point.window_blocks)
        if resident:
            first = rank * self._residency.slots
            here = first + np.flatnonzero(table.phase[first : first + self._residency.slots])
            need += int(self._growth(here)[Pool.GLOBAL].sum()) + reserve
            need -= geometry.blocks_for(len(request.ids))
            held = table.window_end[here] - table.window_start[here]
            window_reserve = int(np.maximum(0, self._floors(here) - held).sum())
        states = 1 + (hit.point is not None and memory.states.held[hit.point.state_block] == 0)
        return (
            memory.globals.num_available >= need + pinned
            and memory.windows.num_available >= windows + window_reserve
            and memory.states.num_available >= states
        )

    def _floors(self, here: NDArray[np.intp]) -> NDArray[np.int64]:
        """Window blocks without which each resident request cannot go on."""
        geometry, table = self._geometry, self._table
        rows = np.where(
            table.phase[here] == Phase.PREFILL,
            geometry.chunk_align,
            geometry.decode_width + geometry.draft_reach,
        )
        span = (geometry.window + rows + geometry.block_size - 2) // geometry.block_size + 1
        return np.minimum(span, -(-table.max_len[here] // geometry.block_size))
