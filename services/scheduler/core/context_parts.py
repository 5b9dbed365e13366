"""Which chunks all ranks compute together, and where these are cut
(docs/decisions/0025-context-parallel-steps.md)."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from deepmesh.context_cut import cut
from deepmesh.wire.messages import Part, PromptWork, Split
from deepmesh.wire.packed import pack_ids

from .costs import Costs
from .guests import Share
from .pace import Pace
from .policy import chunk_end
from .request import Request
from .residency import Residency


class ContextParts:
    """Cuts the chunk of a prompt that has a step to itself, if every part is long enough to be
    worth its exchanges, and every rank has room for it."""

    def __init__(
        self,
        residency: Residency,
        costs: Costs,
        pace: Pace,
        work: PromptWork | None,
        *,
        least_tokens: int,
    ) -> None:
        """
        Args:
            work: None: the executors compute chunks alone.
            least_tokens: of a part; 0: chunks are not cut.
        """
        self._residency, self._geometry = residency, residency.geometry
        self._costs, self._pace = costs, pace
        self._ranks = len(residency.memories)
        self._least = max(least_tokens, residency.geometry.window)
        self._work = work if least_tokens and self._ranks > 1 else None
        self._wide = replace(
            residency.geometry, chunk_tokens=residency.geometry.chunk_tokens * self._ranks
        )

    def may_cut(self, request: Request) -> bool:
        """Whether its chunks may be cut. Prompt log-probabilities need every layer everywhere."""
        return self._work is not None and not request.lacks_prompt_probs

    def reach(self, request: Request, start: int, grid: int) -> int:
        """Where its chunk ends if all ranks compute it: each has as much to do as one alone."""
        return chunk_end(
            start,
            int(self._residency.table.target[request.slot]),
            geometry=self._wide,
            budget=self._geometry.step_tokens * self._ranks,
            stops=request.points,
            grid=grid,
        )

    def share(self, request: Request, start: int, end: int) -> Share | None:
        """Cut the chunk and lease what its parts need; None: its own rank had better do it."""
        if self._work is None or start % self._work.align:
            return None
        if end - start < self._least * self._ranks:
            return None
        positions = np.arange(start, end)
        work = np.interp(positions, self._work.positions, self._work.work)
        try:
            bounds = cut(work, start, self._ranks, least=self._least, align=self._work.align)
        except ValueError:  # no multiple of `align` leaves every part long enough
            return None
        index = request.slot
        home = index // self._residency.slots
        if not self._pays(home, bounds):
            return None
        share = self._residency.guests.lend(index, home, bounds, self._geometry.window)
        if share is not None:
            share.is_last = end == int(self._residency.table.target[index])
        return share

    def _pays(self, home: int, bounds: list[int]) -> bool:
        """Whether the longest part and its exchanges take less time than the whole alone. A part
        exchanges about as often beside its experts as for them, and what that costs in a step is
        learned from steps that decode."""
        token_ns = self._costs.prefill_token
        alone = float(token_ns[home]) * (bounds[-1] - bounds[0])
        parts = [
            float(token_ns[(home + 1 + part) % self._ranks]) * (end - start)
            for part, (start, end) in enumerate(pairwise(bounds))
        ]
        return max(parts) + self._pace.together_ns < alone

    def settle(self, share: Share | None) -> None:
        """A plan is complete: without a chunk that is cut nobody lends anything any more."""
        if share is None:
            self._residency.guests.release()


def split_of(share: Share, skip: int) -> Split:
    """What all ranks are to know of it. `skip`: of the chunk's row."""
    start = share.bounds[0]
    return Split(share.home, share.bounds, start + skip if skip else 0, share.shared)


def parts_of(share: Share, residency: Residency) -> list[Part]:
    """What each rank is to know of its own part."""
    table, geometry, index = residency.table, residency.geometry, share.index
    size, window, ranks = geometry.block_size, geometry.window, len(residency.memories)
    count = geometry.blocks_for(share.bounds[-1])
    parts: list[Part] = []
    for rank in range(ranks):
        start, end = share.bounds[(rank - share.home - 1) % ranks :][:2]
        ids = pack_ids(table.ids[index, max(0, start - window) : end])
        loan = share.loans.get(rank)
        if loan is not None:
            blocks, first, windows = residency.guests.blocks(rank), loan.first_window, loan.windows
            state = loan.state
        else:  # it also has the window rows before the chunk, for the first part
            first = max(0, share.bounds[0] - window + 1) // size
            blocks: list[int] = table.global_blocks[index, :count].tolist()
            windows: list[int] = table.window_blocks[index, first:count].tolist()
            state = int(table.state[index])
        parts.append(Part(ids, pack_ids(blocks[:count]), first, pack_ids(windows), state))
    return parts
