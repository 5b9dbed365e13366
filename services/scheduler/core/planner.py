"""Plans one numbered group step: preempt, choose rows, admit, lease what the rows will write."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import StepKind

from .admission import Admission
from .alignment import Alignment
from .context_parts import ContextParts
from .pace import Pace
from .plan import Plan
from .prefill import Prefill
from .readers import Readers
from .request import Phase
from .residency import Residency
from .watermark import Watermark


class Planner:
    """Chooses rows: decode rows first, prefill in what is left of the budget (`prefill.py`)."""

    def __init__(
        self,
        residency: Residency,
        watermark: Watermark,
        admission: Admission,
        alignment: Alignment,
        pace: Pace,
        parts: ContextParts,
        readers: Readers,
        *,
        prefix_cache: bool,
        max_unacked: int,
    ) -> None:
        self._residency = residency
        self._table = residency.table
        self._watermark = watermark
        self._prefill = Prefill(residency, admission, pace, parts, prefix_cache=prefix_cache)
        self._alignment, self._parts = alignment, parts
        self._readers = readers
        self._prefix_cache = prefix_cache
        self._max_unacked = max_unacked
        self._geometry = residency.geometry
        self._steps = 0

    def plan(self, now: int) -> Plan:
        """Rows for the next step, with everything that they will write leased."""
        plan = Plan(decode=np.empty(0, np.intp))
        self._watermark.keep()
        kind = self._alignment.choose()
        if kind != StepKind.PREFILL:
            self._choose_decode(plan)
        if kind != StepKind.DECODE or plan.empty:
            self._prefill.choose(plan, self._steps, now)
        if kind == StepKind.PREFILL and plan.empty:
            self._choose_decode(plan)  # no prefill found room: the step is not wasted
        self._parts.settle(plan.share)
        if not plan.empty:
            self._steps += 1
            self._alignment.ran(plan)
        return plan

    def _choose_decode(self, plan: Plan) -> None:
        plan.tried.add(Phase.DECODE)
        table, geometry = self._table, self._geometry
        rows = np.flatnonzero(
            (table.phase == Phase.DECODE)
            & ~table.leaving
            & (table.confirmed + table.inflight_tokens < table.max_len)
            & (table.confirmed - table.acked_len < self._max_unacked)
        )
        if self._readers.behind:
            behind = [name in self._readers.behind for name in table.tokenizers]
            held = np.array(behind, np.bool_)[table.tokenizer[rows]]
            plan.held = bool(held.any())
            rows = rows[~held]
        if not geometry.one_kernel_class:
            # A last chunk that misses its mask leaves its last position to be computed again, and
            # not by the decode kernels: whoever could miss one waits until it has settled.
            least = table.confirmed_kv[rows] + table.inflight_min[rows]
            rows = rows[least >= table.prompt_len[rows]]
        end = table.confirmed_kv[rows] + table.inflight_q[rows] + geometry.decode_width
        reach = np.minimum(end, table.max_len[rows]) + geometry.draft_reach  # the device clamps
        need = -(-reach // geometry.block_size)
        grow = (need > table.num_global[rows]) | (need > table.window_end[rows])
        refused = self._lease(rows, reach, np.flatnonzero(grow))
        if refused:
            plan.starved.update((rows[refused] // self._residency.slots).tolist())
            rows, end = np.delete(rows, refused), np.delete(end, refused)
        plan.decode = rows
        if self._prefix_cache and geometry.one_kernel_class:
            # The row may end anywhere behind its least start: on a grid point if it is lucky.
            least = table.confirmed_kv[rows] + table.inflight_min[rows]
            crossing = end // geometry.chunk_align > least // geometry.chunk_align
            positions = end[crossing] // geometry.chunk_align * geometry.chunk_align
            plan.capture_rows(self._residency, rows[crossing], positions)

    def _lease(
        self, rows: NDArray[np.intp], reach: NDArray[np.int64], at: NDArray[np.intp]
    ) -> list[int]:
        """Cover positions below `reach` of the rows at `at`, the oldest first where blocks are
        short; which of them found no room."""
        residency = self._residency
        if len(at) == 0:
            return []
        order: list[int] = at[~residency.grow_rows(rows[at], reach[at])].tolist()
        order.sort(key=lambda i: self._table.request_at(int(rows[i])).order)
        refused: list[int] = []
        for i in order:
            index, tokens = int(rows[i]), int(reach[i])
            grown = residency.grow_global(index, tokens)
            if not (grown and residency.grow_window(index, tokens)):
                refused.append(i)
        return refused
