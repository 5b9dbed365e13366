"""Sizes and choices as pure functions: one width function, one victim order, one room check."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .request import Request

Tokens = TypeVar("Tokens", int, NDArray[np.int64])  # of one row, or of many


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that the executors declared and the config bounded; the same on all ranks."""

    block_size: int
    chunk_align: int
    chunk_tokens: int  # whole multiples of chunk_align
    step_tokens: int
    window: int
    max_model_len: int
    depth: int
    max_rows: int
    decode_width: int = 1  # 1 + draft tokens
    draft_reach: int = 0  # L: positions that draft layers may write beyond H
    one_kernel_class: bool = True
    vocab_size: int = 1 << 30
    prefill_halo: int = 0  # as Capacity.prefill_halo

    def blocks_for(self, tokens: Tokens) -> Tokens:
        """Blocks that cover positions below `tokens`."""
        return -(-tokens // self.block_size)

    def window_span(self, rows: int) -> int:
        """Most blocks that any run of `rows` positions can touch."""
        return (rows + self.block_size - 2) // self.block_size + 1 if rows > 0 else 0


def chunk_end(
    start: int,
    target: int,
    *,
    geometry: Geometry,
    budget: int,
    stops: Iterable[int] = (),
    grid: int = 0,
) -> int:
    """Where the prefill chunk from `start` ends; `start` itself if none fits the budget.

    A chunk ends on the grid or at the target, and at every stop: a point whose state is kept. The
    budget packs whole grid chunks and never cuts one, so that hit and miss run the same shapes.
    The grid is the prefill kernels'; others, which give the same bits for any width, have `grid`.
    """
    grid = grid or geometry.chunk_align
    limit = start + min(geometry.chunk_tokens, budget)
    end = target if target <= limit else limit // grid * grid
    for stop in stops:
        if start < stop < end:
            end = stop
    return max(end, start)


def points_to_keep(
    *,
    prompt_len: int,
    target: int,
    resumed: int,
    matched: int,
    geometry: Geometry,
    marks: Sequence[int] = (),
) -> list[int]:
    """Grid points of a prefill whose state is kept, ascending.

    The end of the prompt; the end of a recomputed output; the end of a beginning that its
    tokenizer says is shared; and the end of a prefix that somebody else shares, which shows by
    global blocks that match beyond the last resumable point.
    """
    align = geometry.chunk_align
    ends = {at // align * align for at in (prompt_len - 1, matched, *marks)}
    if geometry.one_kernel_class:
        ends.add((target - 1) // align * align)
    return sorted(end for end in ends if resumed < end < target)


def skipped(start: int, end: int, ends: Iterable[int], geometry: Geometry) -> int:
    """First positions of the prefill chunk start..end that may leave out the upper layers.

    Args:
        ends: positions below which the last window rows must be exact; one is at or beyond `end`.
    """
    if not geometry.prefill_halo:
        return 0
    exact = min(at for at in ends if at >= end)
    size = geometry.block_size
    tail = max(0, exact - geometry.prefill_halo) // size * size
    return max(0, min(tail, end) - start)


def least_alone(geometry: Geometry, max_len: int) -> tuple[int, int, int]:
    """Blocks by class without which a request cannot finish even if it has the rank to itself."""
    reach = min(max_len + geometry.draft_reach, geometry.max_model_len + geometry.draft_reach)
    chunk = min(geometry.chunk_align, max_len)
    rows = geometry.window + max(chunk, geometry.decode_width + geometry.draft_reach)
    window = min(geometry.window_span(rows), geometry.blocks_for(reach))
    return geometry.blocks_for(reach), window, 1


OUTPUT_SHARE = 512  # output tokens that count in advance; how many come is not known


class FairShare:
    """Start-time fair queueing: tenants share what there is, however many requests each sends.

    Every request gets a place on one line of virtual time when it arrives, counted in tokens:
    behind all that its tenant asked for before, and never before what is being admitted now. So a
    thousand requests of one tenant do not delay the first one of another, and who asked for
    nothing saves nothing up. With one tenant the places are in the order of arrival.
    """

    def __init__(self) -> None:
        self._now = 0  # place of the latest admission
        self._ends: dict[bytes, int] = {}  # of what each tenant has asked for; past ones are gone

    def place(self, tenant: bytes, tokens: int) -> int:
        """Where a new request stands that asks for so many tokens."""
        start = max(self._now, self._ends.get(tenant, 0))
        self._ends[tenant] = start + max(1, tokens)
        return start

    def admitted(self, place: int) -> None:
        """A request enters; virtual time goes on to its place."""
        if place <= self._now:
            return
        self._now = place
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > place}


def choose_victims(
    candidates: Sequence[Request],
    gains: Sequence[int],
    wants: Sequence[int],
    inflight: NDArray[np.int64],
    need: int,
) -> list[Request]:
    """As few requests as cover `need` blocks: least important and newest first, settled ones first
    among equals; those in `candidates` may all be preempted. One that leaves gives `gains` back,
    and what it `wants`, as a part of `need`, nobody has to find any more."""
    order = sorted(
        range(len(candidates)),
        key=lambda i: (candidates[i].order, -int(inflight[i])),
        reverse=True,
    )
    victims: list[Request] = []
    for i in order:
        if need <= 0:
            break
        if gains[i] > 0:
            victims.append(candidates[i])
            need -= gains[i] + wants[i]
    return victims
