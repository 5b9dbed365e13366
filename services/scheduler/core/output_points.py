"""The last resumable point in the output of each request that runs: kept, and not yet published."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepmesh.prefix_hash import extend_chain
from deepmesh.wire.messages import Pool

from .leases import RankMemory
from .policy import Geometry
from .prefix_index import Point
from .rank_pools import RankPools
from .request import Request, RequestTable


class OutputPoints:
    """Nobody looks for the output of a request that runs, so to publish each of its points would
    only cost hashes. Until it leaves, its last one is in the index under a key that no prefix
    has, and is evicted like any other."""

    def __init__(
        self,
        memories: list[RankMemory],
        pools: Sequence[RankPools],
        table: RequestTable,
        geometry: Geometry,
    ) -> None:
        self._memories = memories
        self._pools = pools
        self._table = table
        self._geometry = geometry

    def keep(
        self,
        indices: NDArray[np.intp],
        positions: NDArray[np.int64],
        states: NDArray[np.int64],
        fence: int,
    ) -> None:
        """Keep points at or below C, each in the place of its request's last one, and end the
        leases on their state blocks."""
        table, size = self._table, self._geometry.block_size
        if len(indices) == 0:
            return
        assert (positions <= table.confirmed_kv[indices]).all(), "a point above C"
        starts = np.maximum(0, positions - self._geometry.window) // size
        counts = positions // size - starts
        ends = np.cumsum(counts)
        rows = np.repeat(indices, counts)
        at = np.arange(len(rows)) + np.repeat(starts - ends + counts, counts)
        windows, ranks = table.window_blocks[rows, at], indices // table.slots
        self._pools[Pool.WINDOW].keep(rows // table.slots, windows)
        self._pools[Pool.STATE].keep(ranks, states)
        blocks: list[int] = windows.tolist()
        columns: tuple[list[int], ...] = tuple(
            column.tolist() for column in (indices, ranks, positions, starts, ends - counts, ends)
        )
        old: list[tuple[int, Point]] = []
        i: int
        rank: int
        for i, rank, position, start, first, end, state in zip(
            *columns, list[int](states.tolist()), strict=True
        ):
            request, memory = table.request_at(i), self._memories[rank]
            last = memory.index.points.get(request.output_point)
            if last is not None and memory.states.held[last.state_block] == 0:
                old.append((rank, memory.index.remove(last.key)))
            request.output_point = _key(request)
            point = Point(request.output_point, position, start, tuple(blocks[first:end]), state)
            memory.index.enter(point)
        self._drop(old)
        self._pools[Pool.STATE].release(ranks, states, np.full(len(ranks), fence))

    def publish(self, request: Request) -> None:
        """The request leaves: others find its last point from here on, if it is still there."""
        table, size = self._table, self._geometry.block_size
        index = self._memories[request.slot // table.slots].index
        point = index.points.get(_key(request))
        if point is None:
            return
        count, ids = point.position // size, table.ids[request.slot]
        extend_chain(request.chain, request.root, ids, size, point.position)
        blocks = table.global_blocks[request.slot, :count]
        request.output_point = index.reveal(point.key, request.chain[:count], blocks)

    def _drop(self, points: list[tuple[int, Point]]) -> None:
        """Let go of what points kept, as (rank, point)."""
        if not points:
            return
        ranks = np.array([rank for rank, _ in points])
        counts = [len(point.window_blocks) for _, point in points]
        windows = [block for _, point in points for block in point.window_blocks]
        states = [point.state_block for _, point in points]
        self._pools[Pool.WINDOW].drop(np.repeat(ranks, counts), np.array(windows))
        self._pools[Pool.STATE].drop(ranks, np.array(states))


def _key(request: Request) -> bytes:
    """Shorter than any hash."""
    return b"output" + request.rid.to_bytes(8, "big")
