"""Blocks that ranks lend to a prompt of another rank, whose chunks all ranks compute together."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool

from .leases import RankMemory


@dataclass(slots=True)
class Loan:
    """What one rank lends to one step: behind it, it is free again."""

    first_window: int  # block that the first of `windows` is, by position // block size
    windows: list[int]
    state: int


@dataclass(slots=True)
class Share:
    """A chunk that all ranks compute together in the step being planned."""

    index: int  # of the request
    home: int  # its own rank
    bounds: list[int]  # of the parts; part i belongs to rank (home + 1 + i) % ranks
    shared: int  # the other ranks have the compressed rows below
    is_last: bool  # nothing known is left to compute behind it
    loans: dict[int, Loan] = field(default_factory=dict[int, Loan])  # of all ranks but home


def part_lengths(share: Share) -> NDArray[np.int64]:
    """Tokens that each rank computes, [ranks]."""
    lengths = np.diff(share.bounds)
    return np.roll(lengths, share.home + 1)


class Guests:
    """Owns the global blocks that one prompt has on ranks other than its own.

    They hold the compressed rows of the prompt so far, for as long as its chunks follow each other
    and are computed by all ranks; then they go back, fenced by the last step that used them.
    """

    def __init__(self, memories: list[RankMemory], block_size: int) -> None:
        self._memories, self._size = memories, block_size
        self.index = -1  # of the request; -1: there is none
        self._known = 0  # compressed rows below this position are there, or in flight
        self._fence = 0
        self._blocks: list[list[int]] = [[] for _ in memories]

    def blocks(self, rank: int) -> list[int]:
        """The prompt's global blocks on a rank, by position // block size."""
        return self._blocks[rank]

    def lend(self, index: int, home: int, bounds: list[int], window: int) -> Share | None:
        """Lease what a chunk needs on every rank but its own; None: a rank lacks room."""
        if index != self.index:
            self.release()
        share = Share(index, home, bounds, min(self._known, bounds[0]), is_last=False)
        ranks = len(self._memories)
        count = -(-bounds[-1] // self._size)
        for part in range(ranks - 1):
            rank = (home + 1 + part) % ranks
            if not self._lend(share, rank, bounds[part], bounds[part + 1], count, window):
                self._give_back(share, 0)
                if self.index < 0:
                    self.release()
                return None
        self.index = index
        return share

    def _lend(self, share: Share, rank: int, start: int, end: int, count: int, window: int) -> bool:
        memory = self._memories[rank]
        more = memory.take(Pool.GLOBAL, count - len(self._blocks[rank]))
        self._blocks[rank] += more or []
        first = max(0, start - window + 1) // self._size
        windows = memory.take(Pool.WINDOW, -(-end // self._size) - first)
        states = memory.take(Pool.STATE, 1)
        if more is not None and windows is not None and states is not None:
            share.loans[rank] = Loan(first, windows, states[0])
            return True
        for pool, blocks in ((Pool.WINDOW, windows), (Pool.STATE, states)):
            self._release(rank, pool, blocks or [], 0)
        return False

    def sent(self, share: Share, step_id: int) -> None:
        """The step is on its way: what was lent for it alone is free behind it."""
        self._give_back(share, step_id)
        self._known, self._fence = share.bounds[-1], step_id
        if share.is_last:
            self.release()

    def left(self, index: int) -> None:
        """A request leaves its slot: nobody goes on with its prompt."""
        if index == self.index:
            self.release()

    def release(self) -> None:
        """Give the global blocks back, fenced by the last step that used them."""
        for rank, blocks in enumerate(self._blocks):
            self._release(rank, Pool.GLOBAL, blocks[::-1], self._fence)
            self._blocks[rank] = []
        self.index, self._known, self._fence = -1, 0, 0

    def _give_back(self, share: Share, fence: int) -> None:
        for rank, loan in share.loans.items():
            self._release(rank, Pool.WINDOW, loan.windows[::-1], fence)
            self._release(rank, Pool.STATE, [loan.state], fence)

    def _release(self, rank: int, pool: Pool, blocks: list[int], fence: int) -> None:
        for block in blocks:
            self._memories[rank].pools[pool].release(block, fence)
