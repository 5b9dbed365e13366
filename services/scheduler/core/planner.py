"""Plans one numbered group step: preempt, choose rows, admit, lease what the rows will write."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import StepKind

from .admission import Admission
from .alignment import Alignment
from .plan import Plan
from .policy import chunk_end
from .request import Phase, Request
from .residency import Residency
from .watermark import Watermark

NON_PREEMPTIBLE_AFTER = 3
SETTLE_TOKENS = 32  # output tokens after which such a request can be preempted again


class Planner:
    """Chooses rows. Decode rows first, then prefill chunks oldest first, then new requests."""

    def __init__(
        self,
        residency: Residency,
        watermark: Watermark,
        admission: Admission,
        alignment: Alignment,
        *,
        prefix_cache: bool,
        max_unacked: int,
    ) -> None:
        self._residency = residency
        self._table = residency.table
        self._watermark = watermark
        self._admission = admission
        self._alignment = alignment
        self._prefix_cache = prefix_cache
        self._max_unacked = max_unacked
        self._ranks = len(residency.memories)
        self._geometry = residency.geometry

    def plan(self, now: int) -> Plan:
        """Rows for the next step, with everything that they will write leased."""
        plan = Plan(decode=np.empty(0, np.intp))
        self._watermark.keep()
        kind = self._alignment.choose()
        if kind != StepKind.PREFILL:
            self._choose_decode(plan)
        if kind != StepKind.DECODE or plan.empty:
            self._choose_prefill(plan)
            self._admit(plan, now)
        if kind == StepKind.PREFILL and plan.empty:
            self._choose_decode(plan)  # no prefill found room: the step is not wasted
        if not plan.empty:
            self._alignment.ran(plan)
        return plan

    def _admit(self, plan: Plan, now: int) -> None:
        budgets = self._budgets(plan)
        while (request := self._admission.next(budgets, now)) is not None:
            self._add_chunk(plan, request, budgets)

    def _choose_decode(self, plan: Plan) -> None:
        table, geometry = self._table, self._geometry
        rows = np.flatnonzero(
            (table.phase == Phase.DECODE)
            & ~table.leaving
            & (table.confirmed + table.inflight_tokens < table.max_len)
            & (table.confirmed - table.acked_len < self._max_unacked)
        )
        end = table.confirmed_kv[rows] + table.inflight_q[rows] + geometry.decode_width
        reach = np.minimum(end, table.max_len[rows]) + geometry.draft_reach  # the device clamps
        need = -(-reach // geometry.block_size)
        grow = (need > table.num_global[rows]) | (need > table.window_end[rows])
        refused: list[int] = []
        for at in self._oldest_first(rows, np.flatnonzero(grow)):
            index, tokens = int(rows[at]), int(reach[at])
            grown = self._residency.grow_global(index, tokens)
            if not (grown and self._residency.grow_window(index, tokens)):
                refused.append(at)
        if refused:
            plan.starved = True
            rows, end = np.delete(rows, refused), np.delete(end, refused)
        plan.decode = rows
        if self._prefix_cache and geometry.one_kernel_class:
            # The row may end anywhere behind its least start: on a grid point if it is lucky.
            least = table.confirmed_kv[rows] + table.inflight_min[rows]
            crossing = end // geometry.chunk_align > least // geometry.chunk_align
            for at in np.flatnonzero(crossing).tolist():
                position = int(end[at]) // geometry.chunk_align * geometry.chunk_align
                plan.capture(self._residency, int(rows[at]), position)

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
        stops = request.points
        if not self._geometry.one_kernel_class:  # positions from P on are the decode kernels'
            stops = [*stops, request.prompt_len]
        end = chunk_end(
            start,
            target,
            geometry=self._geometry,
            budget=budgets[rank],
            stops=stops,
        )
        if end > start:
            end = self._fit_window(index, start, end)
            plan.starved |= end == start
        if end == start:
            return False
        plan.prefill.append((index, start, end))
        budgets[rank] -= end - start
        is_point = end in request.points and self._prefix_cache
        if is_point and not plan.capture(self._residency, index, end):
            self._residency.reached(request, end)  # whoever waits for it waits in vain
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
