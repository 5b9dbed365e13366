"""Chunks that all ranks compute together: what each of them reads, writes and is given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepmesh.wire.messages import Part, Pool, Split, SubmitStep
from deepmesh.wire.packed import unpack_ids

from .device import INEXACT, Device
from .shadow import Cells, ShadowError, Table, Writer


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's part, and where its cells lie."""

    device: Device
    part: Part
    start: int
    end: int
    globals: Table
    windows: Table  # by position // block size; -1 where there is none


class ChunkExchange:
    """Waits for the last rank of a step, then runs the parts one behind the other: real ranks do so
    layer by layer, and no part reads what a later one writes."""

    def __init__(self, ranks: int) -> None:
        self.num_chunks = 0
        self._ranks = ranks
        self._step: tuple[int, int] = (0, 0)
        self._came: dict[int, tuple[Device, Part]] = {}

    def join(self, device: Device, step: SubmitStep, part: Part) -> None:
        """A rank has begun its part.

        Raises:
            ShadowError: a part reads what is not its prompt's, or the ranks' parts do not fit.
        """
        split, key = step.descriptor.split, (step.engine_epoch, step.step_id)
        if split is None:
            raise ShadowError(f"rank {device.rank} has a part of a chunk that nobody shares")
        if key != self._step:  # of the last one some ranks are gone, with its epoch
            self._step, self._came = key, {}
        self._came[device.rank] = device, part
        if len(self._came) == self._ranks:
            order = [(split.home + 1 + at) % self._ranks for at in range(self._ranks)]
            ranks = [_rank(split, at, *self._came[rank]) for at, rank in enumerate(order)]
            self.num_chunks += 1
            _run(split, ranks, Writer(0, step.group_step))


def _rank(split: Split, at: int, device: Device, part: Part) -> _Rank:
    start, end = split.bounds[at : at + 2]
    size = device.capacity.block_size
    if end - start < device.capacity.window:
        raise ShadowError(f"part {start}..{end} has not all of the window before the next one")
    if split.shared > split.bounds[0]:
        raise ShadowError(f"rows below {split.shared} are not all before {split.bounds[0]}")
    windows = np.full(-(-split.bounds[-1] // size), -1, np.int32)
    blocks = unpack_ids(part.window_blocks)
    windows[part.first_window : part.first_window + len(blocks)] = blocks
    return _Rank(device, part, start, end, unpack_ids(part.global_blocks), windows)


def _run(split: Split, ranks: Sequence[_Rank], who: Writer) -> None:
    home, begin, end = ranks[-1], split.bounds[0], split.bounds[-1]
    chunk, window = home.device.chunk, home.device.capacity.window
    if chunk is None:  # the row is dead: what its parts leave behind is nothing to be read
        for rank in ranks:
            noise = np.full(end - begin, INEXACT, np.int64)
            rank.device.kv.write(Pool.GLOBAL, rank.globals, begin, noise, who)
            own = noise[: rank.end - rank.start]
            rank.device.kv.write(Pool.WINDOW, rank.windows, rank.start, own, who)
        return
    for rank in ranks[:-1]:
        given = _cells(home, Pool.GLOBAL, split.shared, begin)
        rank.device.kv.write(Pool.GLOBAL, rank.globals, split.shared, given, who)
    for at, rank in enumerate(ranks):
        kv, start = rank.device.kv, rank.start
        ids = unpack_ids(rank.part.ids)[-(rank.end - start) :]
        if not np.array_equal(ids, chunk.ids[start : rank.end]):
            raise ShadowError(f"{who}: other ids of {start}..{rank.end}")
        halo = min(start, max(0, start - window + 1, split.tail))
        giver = ranks[at - 1]
        if giver is not rank:
            kv.write(Pool.WINDOW, rank.windows, halo, _cells(giver, Pool.WINDOW, halo, start), who)
        first = min(start, max(0, start - window + 1, chunk.exact))
        kv.verify(Pool.GLOBAL, rank.globals, 0, chunk.want[:start], who)
        kv.verify(Pool.WINDOW, rank.windows, first, chunk.want[first:start], who)
        upper = min(rank.end, max(start, split.tail))
        rows = chunk.window_rows(upper, rank.end)
        kv.write(Pool.WINDOW, rank.windows, upper, rows, who)
        rank.device.wrote(Pool.WINDOW, rank.windows, upper, rows, who)
        for other in ranks:  # as it has been computed here, to everybody
            values = chunk.want[start : rank.end]
            other.device.kv.write(Pool.GLOBAL, other.globals, start, values, who)
    for rank in ranks:
        rank.device.wrote(Pool.GLOBAL, rank.globals, 0, chunk.want[:end], who)


def _cells(rank: _Rank, pool: Pool, start: int, end: int) -> Cells:
    """What a rank has of some positions."""
    table = rank.globals if pool == Pool.GLOBAL else rank.windows
    return rank.device.kv.read(pool, table, start, end)
