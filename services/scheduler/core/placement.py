"""What every rank has to do and has room for: by it a new request is placed."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool

from .costs import Costs
from .policy import least_alone
from .prefix_index import Hit
from .request import Phase, Request
from .residency import Residency
from .watermark import Watermark

HORIZON_STEPS = 64  # for so many steps a request is counted as a row beside the others


class RankLoads:
    """Columns over ranks, for one pass over the queue; `enter` keeps them up to date.

    The ranks step together, so a row on the busiest rank costs everybody time in every step for
    as long as it runs, and a cached prefix saves its prefill once. Both are counted as time.
    """

    def __init__(self, residency: Residency, watermark: Watermark, costs: Costs) -> None:
        self._residency = residency
        self._table = residency.table
        self._geometry = residency.geometry
        self._watermark = watermark
        self._costs = costs
        table, slots, ranks = residency.table, residency.slots, len(residency.memories)
        here = table.resident()
        rank = here // slots
        runs = ~table.retiring(here)
        self.occupied = np.bincount(rank, minlength=ranks)
        self.rows = np.bincount(rank[runs], minlength=ranks)  # RETIRING ones are as good as gone
        self._context = np.bincount(rank, weights=table.confirmed[here], minlength=ranks)
        left = table.target[here] - table.confirmed_kv[here] - table.inflight_q[here]
        left = np.where(table.phase[here] == Phase.PREFILL, left, 0)
        self._pending = np.bincount(rank, weights=left, minlength=ranks)
        growth, floors = self._needs(here[runs])
        self._growth = np.bincount(rank[runs], weights=growth, minlength=ranks)
        self._floors = np.bincount(rank[runs], weights=floors, minlength=ranks)

    def times(self, request: Request) -> NDArray[np.float64]:
        """Predicted time by rank, [ranks]: until its first token without any cached prefix, and
        what the rank's rows and their context take in the steps that it would share with them."""
        costs = self._costs
        tokens = len(request.ids)
        steps = min(HORIZON_STEPS, request.max_len - tokens)
        first = costs.prefill_token * (self._pending + tokens)
        step = costs.decode_row * self.rows + costs.context_token * self._context
        return first + steps * step

    def saved(self, rank: int, hit: Hit) -> float:
        """Time that a hit saves on its rank."""
        return float(self._costs.prefill_token[rank]) * hit.position

    def has_room(self, request: Request, rank: int, hit: Hit) -> bool:
        """Blocks for T and the growth of what runs already; a hit's own blocks stop being spare."""
        geometry, memory = self._geometry, self._residency.memories[rank]
        pinned = sum(memory.globals.held[block] == 0 for block in hit.global_blocks)
        need = geometry.blocks_for(len(request.ids))
        windows = least_alone(geometry, request.max_len)[1]
        if hit.point is not None:
            windows += sum(memory.windows.held[b] == 0 for b in hit.point.window_blocks)
            windows -= len(hit.point.window_blocks)
        if self.occupied[rank]:
            ahead = len(request.ids) + (geometry.depth + 1) * geometry.decode_width
            need = geometry.blocks_for(min(ahead, request.max_len) + geometry.draft_reach)
            need += int(self._growth[rank])
            windows += int(self._floors[rank])
        states = 1 + (hit.point is not None and memory.states.held[hit.point.state_block] == 0)
        return (
            memory.globals.num_available >= need - len(hit.global_blocks) + pinned
            and memory.windows.num_available >= windows
            and memory.states.num_available >= states
        )

    def enter(self, request: Request, hit: Hit) -> None:
        """A request has become resident."""
        index = request.slot
        rank = index // self._residency.slots
        self.occupied[rank] += 1
        self.rows[rank] += 1
        self._context[rank] += len(request.ids)
        self._pending[rank] += len(request.ids) - hit.position
        growth, floors = self._needs(np.array([index]))
        self._growth[rank] += growth[0]
        self._floors[rank] += floors[0]

    def _needs(self, here: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Global blocks that each resident may yet take, and window blocks without which it
        cannot go on."""
        geometry, table = self._geometry, self._table
        rows = np.where(
            table.phase[here] == Phase.DECODE,
            geometry.decode_width + geometry.draft_reach,
            geometry.chunk_align,
        )
        span = (geometry.window + rows + geometry.block_size - 2) // geometry.block_size + 1
        floors = np.minimum(span, -(-table.max_len[here] // geometry.block_size))
        held = table.window_end[here] - table.window_start[here]
        return self._watermark.growth(here)[Pool.GLOBAL], np.maximum(0, floors - held)
