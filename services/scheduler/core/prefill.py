"""Chunks of known tokens: who gets how much of a step's prefill budget."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .admission import Admission
from .context_parts import ContextParts
from .pace import FINE_ALIGN, Pace
from .plan import Plan
from .policy import chunk_end
from .request import Phase, Request
from .residency import Residency

PASSED_STEPS = 3  # so often newcomers may take all of a rank's budget before an older prompt


@dataclass(slots=True)
class _Chunk:
    """A prompt (or a recompute) and what of it this step computes."""

    request: Request
    rank: int
    start: int
    end: int


class Prefill:
    """Splits the budget of each rank.

    The budget is `step_tokens` less the decode rows, but at least one grid chunk, so neither side
    waits for the other's end; beside decode rows `pace.py` may bound it, and then the grid is
    finer. Out of it everybody who has not begun, those still in the queue included, gets one grid
    chunk; what is left goes to the oldest in whole grid chunks. So a first chunk waits for the
    steps already submitted and, unless there is a bound, not for the prompts in front of it. Where
    newcomers took all of a rank's budget PASSED_STEPS steps in a row, its oldest prompt goes first
    for once: the oldest always moves on, so each becomes the oldest and ends.
    """

    def __init__(
        self,
        residency: Residency,
        admission: Admission,
        pace: Pace,
        parts: ContextParts,
        *,
        prefix_cache: bool,
    ) -> None:
        self._residency = residency
        self._table = residency.table
        self._geometry = residency.geometry
        self._admission = admission
        self._pace, self._parts = pace, parts
        self._grid = residency.geometry.chunk_align  # of the step being planned
        self._fine_grid = min(FINE_ALIGN, self._grid)
        self._prefix_cache = prefix_cache
        self._ranks = len(residency.memories)
        self._passed = np.zeros(self._ranks, np.int64)  # steps without a chunk of a begun prompt

    def choose(self, plan: Plan, step: int, now: int) -> None:
        """Add chunks of residents and of newly admitted requests to the plan, and lease what they
        will write."""
        plan.tried.add(Phase.PREFILL)
        table = self._table
        rows = np.flatnonzero((table.phase == Phase.PREFILL) & ~table.leaving)
        requests = sorted(map(table.request_at, rows.tolist()), key=lambda request: request.order)
        chunks = [self._chunk(request) for request in requests]
        begun = [c for c in chunks if not table.needs_init[c.request.slot]]
        budgets = self._budgets(plan, len(rows))
        self._let_oldest_pass(plan, begun, budgets)
        for chunk in chunks:
            if table.needs_init[chunk.request.slot]:
                self._extend(plan, chunk, budgets, most=self._geometry.chunk_align)
        for request in self._admission.admit(budgets, step, now, grid=self._grid):
            chunk = self._chunk(request)
            self._extend(plan, chunk, budgets, most=self._geometry.chunk_align)
            chunks.append(chunk)
        for chunk in sorted(chunks, key=lambda chunk: chunk.request.order):
            self._extend(plan, chunk, budgets, most=self._geometry.step_tokens)
        self._share(plan, chunks)
        self._add(plan, chunks)
        waits, moves = np.zeros(self._ranks, np.bool_), np.zeros(self._ranks, np.bool_)
        for chunk in begun:
            waits[chunk.rank] = True
            moves[chunk.rank] |= chunk.end > chunk.start
        self._passed = np.where(waits & ~moves, self._passed + 1, 0)

    def _let_oldest_pass(self, plan: Plan, begun: list[_Chunk], budgets: NDArray[np.int64]) -> None:
        due = self._passed >= PASSED_STEPS
        for chunk in begun:
            if due[chunk.rank]:
                due[chunk.rank] = False
                self._extend(plan, chunk, budgets, most=self._geometry.chunk_align)

    def _budgets(self, plan: Plan, prefilling: int) -> NDArray[np.int64]:
        """Prefill tokens by rank beside the decode rows."""
        geometry, slots, table = self._geometry, self._residency.slots, self._table
        decode = plan.tokens_by_rank(self._ranks, slots, geometry.decode_width)
        budgets = np.maximum(geometry.step_tokens - decode, geometry.chunk_align)
        free = max(0, geometry.max_rows * self._ranks - len(table.resident()))
        prompts = prefilling + min(free, self._admission.num_waiting)
        ranks = plan.decode // slots
        rows = np.bincount(ranks, minlength=self._ranks)
        context = np.zeros(self._ranks, np.int64)
        np.add.at(context, ranks, table.confirmed[plan.decode])
        most = self._pace.tokens(rows, context, prompts)
        self._grid = geometry.chunk_align if most is None else self._fine_grid
        return budgets if most is None else np.minimum(budgets, most)

    def _chunk(self, request: Request) -> _Chunk:
        table, index = self._table, request.slot
        start = int(table.confirmed_kv[index] + table.inflight_q[index])
        return _Chunk(request, index // self._residency.slots, start, start)

    def _extend(self, plan: Plan, chunk: _Chunk, budgets: NDArray[np.int64], *, most: int) -> None:
        """Let a chunk grow by at most `most` tokens of its rank's budget."""
        geometry, request, index = self._geometry, chunk.request, chunk.request.slot
        stops, grid = request.points, self._grid
        if not geometry.one_kernel_class:
            if chunk.start >= request.prompt_len:  # the decode kernels', in rows of any width
                grid = 1
            else:
                stops = [*stops, request.prompt_len]
        end = chunk_end(
            chunk.start,
            int(self._table.target[index]),
            geometry=geometry,
            budget=chunk.end - chunk.start + min(most, int(budgets[chunk.rank])),
            stops=stops,
            grid=grid,
        )
        if end <= chunk.end:
            return
        end = self._fit_window(index, chunk.end, end, grid)
        if end == chunk.start:
            plan.starved.add(chunk.rank)
        budgets[chunk.rank] -= end - chunk.end
        chunk.end = end

    def _share(self, plan: Plan, chunks: list[_Chunk]) -> None:
        """A chunk that has the step to itself may be computed by all ranks, and be longer then."""
        chunks = [chunk for chunk in chunks if chunk.end > chunk.start]
        if len(chunks) == 1 and not len(plan.decode) and self._parts.may_cut(chunks[0].request):
            (chunk,) = chunks
            end = self._parts.reach(chunk.request, chunk.start, self._grid)
            if end > chunk.end:
                end = self._fit_window(chunk.request.slot, chunk.end, end, self._grid)
            plan.share = self._parts.share(chunk.request, chunk.start, max(end, chunk.end))
            if plan.share is not None:
                chunk.end = plan.share.bounds[-1]

    def _fit_window(self, index: int, start: int, end: int, grid: int) -> int:
        """The longest chunk on the grid whose window rows can be leased now."""
        geometry = self._geometry
        memory = self._residency.memories[index // self._residency.slots]
        room = int(self._table.window_end[index]) + memory.windows.num_available
        if room < geometry.blocks_for(end):
            end = max(start, room * geometry.block_size // grid * grid)
        if end > start and not self._residency.grow_window(index, end):
            return start
        return end

    def _add(self, plan: Plan, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            if chunk.end == chunk.start:
                continue
            request, index = chunk.request, chunk.request.slot
            plan.prefill.append((index, chunk.start, chunk.end))
            is_point = chunk.end in request.points and self._prefix_cache
            if is_point and not plan.capture(self._residency, index, chunk.end):
                self._residency.reached(request, chunk.end)  # whoever waits for it waits in vain
