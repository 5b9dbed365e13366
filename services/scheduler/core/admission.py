"""Who enters next, and on which rank: the head of the queue, where it costs least time."""

from collections.abc import Iterator, Set
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from deepmesh.prefix_hash import extend_chain

from .costs import Costs
from .grammars import Grammars
from .placement import RankLoads
from .prefetch import MAX_AHEAD
from .prefix_index import Hit
from .request import Phase, Request
from .residency import Residency
from .transfers import Transfers
from .waiting import WaitingQueue
from .watermark import Watermark

AWAIT_STEPS = 8  # beyond what its own prefill takes twice, a request awaits an equal prefix


class Admission:
    """Moves requests from the queue into slots. Nobody overtakes the head, unless that waits for
    a prefix that is being computed, or for its grammar."""

    def __init__(
        self,
        residency: Residency,
        waiting: WaitingQueue,
        watermark: Watermark,
        *,
        transfers: Transfers,
        costs: Costs,
        grammars: Grammars,
        prefix_cache: bool,
        max_unacked: int,
    ) -> None:
        self._residency = residency
        self._table = residency.table
        self._geometry = residency.geometry
        self._waiting = waiting
        self._watermark = watermark
        self._loads, self._writes = transfers.loads, transfers.writes
        self._prefetch = transfers.prefetch
        self._costs, self._grammars = costs, grammars
        self._prefix_cache = prefix_cache
        self._max_unacked = max_unacked
        self._expected: set[bytes] = set()  # points that are being computed, and nowhere there yet
        self.cached_tokens = 0
        self.is_blocked = False  # the head of the queue finds no room

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def admit(
        self, budgets: NDArray[np.int64], step: int, now: int, *, grid: int
    ) -> Iterator[Request]:
        """Admit requests one by one, as `_admit`; then, where one finds no room, see what of those
        that wait can be loaded meanwhile."""
        yield from self._admit(budgets, step, now, grid=grid)
        if self.is_blocked and self._prefix_cache and self._prefetch.is_due(now):
            self._look_ahead(now)

    def _look_ahead(self, now: int) -> None:
        loads = RankLoads(self._residency, self._watermark, self._costs)
        for request in list(islice(self._waiting, MAX_AHEAD)):
            if request.is_parked or request.generate.prefill_at:
                continue  # nobody knows when it comes, or another group sends it its prefix
            if self._awaits_store(request, now) or request.found is None:
                continue
            hits = self._hits(request)
            ranks = range(len(self._residency.memories))
            for rank in sorted(ranks, key=lambda rank: -hits.get(rank, Hit()).position):
                hit = hits.get(rank, Hit())
                plan = self._loads.plan(request, rank, hit, self._limit(request))
                if plan is None or not self._prefetch.has_room(rank):
                    continue
                if not loads.has_room(request, rank, Hit(global_blocks=tuple(plan.shared))):
                    continue
                if self._prefetch.begin(request, rank, plan, now):
                    break

    def _admit(
        self, budgets: NDArray[np.int64], step: int, now: int, *, grid: int
    ) -> Iterator[Request]:
        """Admit requests one by one, until the queue is empty or its head finds no room.

        Args:
            budgets: the prefill tokens left in this step, by rank: whoever iterates takes those
                of a request's first chunk away before the next request is looked at.
            grid: the least that a chunk may have, unless the prompt is shorter.
        """
        self.is_blocked = False
        if not self._waiting:
            return
        self._expected = self._absent(set[bytes]().union(*self._residency.expected))
        loads = RankLoads(self._residency, self._watermark, self._costs)
        for request in list(self._waiting):
            if request.is_parked or self._grammars.awaits(request, now):
                continue
            if self._awaits_prefix(request, step) or self._awaits_store(request, now):
                continue
            if self._must_be_alone(request):
                return
            while (place := self._place(request, loads, budgets, grid)) is None:
                if budgets.min() < grid or not self._park():
                    self.is_blocked = True
                    return
                loads = RankLoads(self._residency, self._watermark, self._costs)
            rank, hit = place
            is_loading, hit = self._load(request, rank, hit, loads, now)
            if not is_loading and not self._residency.enter(request, rank, hit):
                self.is_blocked = True
                return
            self._waiting.admit(request)
            self._expected |= self._absent(self._residency.expected[rank].keys())
            loads.enter(request, hit)
            if request.admitted_ns == 0:
                request.admitted_ns = now
                self._count_possible(request)
            if is_loading:
                continue  # it takes part in steps once its blocks are filled
            if hit.point is not None:
                count = hit.position // self._geometry.block_size
                self._writes.offer(rank, request.chain[:count], hit.point)
            if request.cached_tokens < 0:
                request.cached_tokens = min(hit.position, request.prompt_len)
                self.cached_tokens += request.cached_tokens
                tier = self._prefetch.tier_of(hit)
                self._residency.cache.hits[tier] += request.cached_tokens
            yield request

    def _awaits_prefix(self, request: Request, step: int) -> bool:
        """Whether a resident is about to compute more of this prompt than is there: it began
        earlier, so waiting costs nothing and saves the same work done twice. Not for ever: who
        computes it may be held up."""
        if request.awaited in self._expected:
            return step < request.awaited_until
        request.awaited = b""
        if not self._expected or not self._prefix_cache:
            return False
        self._extend(request)
        if self._expected.isdisjoint(request.chain):
            return False
        size = self._geometry.block_size
        best = max((hit.position for hit in self._hits(request).values()), default=0)
        beyond = request.chain[best // size : self._limit(request) // size]
        awaited = next((key for key in reversed(beyond) if key in self._expected), None)
        if awaited is None:
            return False
        alone = -(-len(request.ids) // self._geometry.chunk_tokens)
        request.awaited, request.awaited_until = awaited, step + 2 * alone + AWAIT_STEPS
        return True

    def _awaits_store(self, request: Request, now: int) -> bool:
        """Whether a kvstore is being asked for this prompt; only the first time costs a look-up."""
        limit = self._limit(request)
        if not self._prefix_cache or not self._loads.may_ask(request, limit):
            return self._loads.is_asking(request)
        local = max((hit.position for hit in self._hits(request).values()), default=0)
        return self._loads.ask(request, local, limit, now)

    def _load(
        self, request: Request, rank: int, hit: Hit, loads: RankLoads, now: int
    ) -> tuple[bool, Hit]:
        """Let a kvstore fill what the device lacks, where that is worth it and leaves enough room
        for what runs already to come to its end.

        Returns:
            whether it does, and what the rank has of the prompt now: to look for room evicts.
        """
        plan = self._loads.plan(request, rank, hit, self._limit(request))
        if plan is None or self._residency.memories[rank].states.num_available < 2:
            return False, hit
        if not loads.has_room(request, rank, Hit(global_blocks=tuple(plan.shared))):
            return False, hit
        if self._loads.begin(request, rank, plan, now):
            return True, hit
        return False, self._hits(request).get(rank, Hit())

    def _count_possible(self, request: Request) -> None:
        """What a cache that forgets nothing would hit."""
        if not self._prefix_cache or request.lacks_prompt_probs:
            return
        cache, keys = self._residency.cache, self._residency.grid_keys(request)
        most = min(self._limit(request), request.prompt_len - 1) // self._geometry.chunk_align
        cache.possible_tokens += cache.seen.count(keys[:most]) * self._geometry.chunk_align
        cache.seen.add(keys)

    def _absent(self, keys: Set[bytes]) -> set[bytes]:
        """Keys of points that no rank has."""
        indices = [memory.index.points for memory in self._residency.memories]
        return {key for key in keys if not any(key in points for points in indices)}

    def _must_be_alone(self, request: Request) -> bool:
        """Whether a request may not join: after a device fault those that were in the step run one
        by one until each has brought a token, so that a second fault finds the culprit alone."""
        table = self._table
        here = table.resident()
        if request.suspect and len(request.ids) <= request.suspect_len:
            return len(here) > 0
        return bool((table.suspect_len[here] >= table.confirmed[here]).any())

    def _park(self) -> bool:
        """A request whose client takes no tokens gives its place to those that wait; the next one
        only where the blocks of the last do not help."""
        table = self._table
        if any(pool.num_fenced for memory in self._residency.memories for pool in memory.pools):
            return False
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

    def _place(
        self, request: Request, loads: RankLoads, budgets: NDArray[np.int64], grid: int
    ) -> tuple[int, Hit] | None:
        """The rank with room on which it costs least time, ties to the lower; a cached prefix is
        worth the time that it saves there and no more, so hot ones do not fill up one rank."""
        hits = self._hits(request)
        times = loads.times(request)
        for rank, hit in hits.items():
            times[rank] -= loads.saved(rank, hit)
        least = min(len(request.ids), grid)
        is_open = (budgets >= least) & (loads.rows < self._geometry.max_rows)
        ranks = np.flatnonzero(is_open)
        cheapest: list[int] = ranks[np.argsort(times[ranks], kind="stable")].tolist()
        for rank in cheapest:
            if self._residency.memories[rank].num_free_slots == 0:
                continue
            hit = hits.get(rank, Hit())
            if loads.has_room(request, rank, hit):
                return rank, hit
            if hit.point and not loads.occupied[rank] and loads.has_room(request, rank, Hit()):
                return rank, Hit()
        return None

    def _hits(self, request: Request) -> dict[int, Hit]:
        """What of its prompt each rank has; only ranks that have any."""
        limit = self._limit(request)
        if not self._prefix_cache or limit < self._geometry.block_size:
            return {}
        self._extend(request)
        return {
            rank: memory.index.lookup(request.chain, limit)
            for rank, memory in enumerate(self._residency.memories)
            if request.chain[0] in memory.index.block_of
        }

    def _extend(self, request: Request) -> None:
        size, limit = self._geometry.block_size, self._limit(request)
        extend_chain(request.chain, request.root, request.ids, size, limit)

    def _limit(self, request: Request) -> int:
        """Where it may resume at most: a hit never covers the last token; where kernels differ
        by class, what others computed as their prompt is not its output; and what a cache has of
        a prompt lacks its log-probabilities."""
        if request.lacks_prompt_probs:
            return 0
        last = len(request.ids) - 1
        return last if self._geometry.one_kernel_class else min(last, request.prompt_len)
