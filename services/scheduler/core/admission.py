"""Who enters next, and on which rank: the head of the queue, where there is room for all of it."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool

from .policy import least_alone
from .prefix_index import Hit, extend_chain
from .request import Phase, Request
from .residency import Residency
from .waiting import WaitingQueue
from .watermark import Watermark


class Admission:
    """Moves requests from the queue into slots. Nobody overtakes the head, unless that waits for
    a prefix that is being computed."""

    def __init__(
        self,
        residency: Residency,
        waiting: WaitingQueue,
        watermark: Watermark,
        *,
        prefix_cache: bool,
        max_unacked: int,
    ) -> None:
        self._residency = residency
        self._table = residency.table
        self._geometry = residency.geometry
        self._waiting = waiting
        self._watermark = watermark
        self._prefix_cache = prefix_cache
        self._max_unacked = max_unacked
        self.cached_tokens = 0

    def next(self, budgets: list[int], now: int) -> Request | None:
        """Admit one request; None when the queue is empty or its head finds no room.

        `budgets` are the prefill tokens left in this step, by rank.
        """
        passed: set[int] = set()
        while (request := self._waiting.head(passed)) is not None:
            if self._waits_for_prefix(request):
                passed.add(request.rid)
                continue
            if self._must_be_alone(request):
                return None
            rank, hit = self._place(request, budgets)
            if rank < 0:
                if min(budgets) < self._geometry.chunk_align or not self._park():
                    return None
                continue
            if not self._residency.enter(request, rank, hit):
                return None
            self._waiting.remove(request)
            if request.admitted_ns == 0:
                request.admitted_ns = now
            if request.cached_tokens < 0:
                request.cached_tokens = min(hit.position, request.prompt_len)
                self.cached_tokens += request.cached_tokens
            return request
        return None

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a resident is about to compute more of this prompt than is there: it began
        earlier, so waiting costs nothing and saves the same work done twice."""
        if not any(self._residency.expected):
            return False
        size = self._geometry.block_size
        for rank, expected in enumerate(self._residency.expected):
            hit = self._lookup(request, rank)
            beyond = request.chain[hit.position // size : (len(request.ids) - 1) // size]
            if any(key in expected for key in beyond):
                return True
        return False

    def _must_be_alone(self, request: Request) -> bool:
        """Whether a request may not join: after a device fault those that were in the step run one
        by one until each has brought a token, so that a second fault finds the culprit alone."""
        table = self._table
        here = table.resident()
        if request.suspect and len(request.ids) <= request.suspect_len:
            return len(here) > 0
        return bool((table.suspect_len[here] >= table.confirmed[here]).any())

    def _park(self) -> bool:
        """A request whose client takes no tokens gives its place to those that wait."""
        table = self._table
        stalled = np.flatnonzero(
            (table.phase == Phase.DECODE)
            & (table.inflight_rows == 0)
            & (table.confirmed - table.acked_len >= self._max_unacked)
        )
        if len(stalled) == 0:
            return False
        newest = max((table.request_at(i) for i in stalled.tolist()), key=lambda r: r.order)
        self._residency.leave(newest)
        newest.is_parked = True
        self._waiting.add(newest)
        return True

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
            need += int(self._watermark.growth(here)[Pool.GLOBAL].sum()) + reserve
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
