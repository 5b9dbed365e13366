"""Refuses rows that the slots cannot serve: checks over all rows that name the first bad one."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool, RowSource
from services.executor.interface import LiveRows

if TYPE_CHECKING:
    from services.executor.slots import SlotTable


def check_owners(table: "SlotTable", rows: NDArray[np.void], index: NDArray[np.int64]) -> None:
    """Every row (packed.ROW) at `index` names a slot that holds its request, and its own one."""
    slots = rows["slot"][index].astype(np.int64)
    held = slots < len(table.rid)
    held[held] &= table.is_open[slots[held]]
    for field, column in (("rid", table.rid), ("epoch", table.epoch), ("gen", table.gen)):
        held[held] &= column[slots[held]] == rows[field][index[held]]
    for i in index[~held].tolist():
        row = rows[i]
        raise AssertionError(
            f"row {i}: slot {row['slot']} does not hold rid {row['rid']}, epoch {row['epoch']}, "
            f"generation {row['gen']}"
        )
    assert np.bincount(slots, minlength=1).max() <= 1, "two rows of a step share a slot"


def check_rows(table: "SlotTable", rows: NDArray[np.void], live: LiveRows) -> None:
    """Sources, positions, ids and blocks of the live rows are there."""
    given, slots = rows[live.rows], live.slots
    starts, ends = live.starts, live.starts + live.counts
    known = table.total_len[slots]
    is_host = given["source"] == RowSource.HOST
    made = table.producer_step[slots] == given["producer_step"]
    bounded = (given["start_lo"] <= starts) & (starts <= given["start_hi"])
    reach = np.maximum(0, starts - table.capacity.window + 1)
    needed = np.where(live.drafted, starts + 1, ends)
    most = 1 + table.capacity.draft_len
    skips = given["skip"].astype(np.int64)
    problems = (
        (skips > np.where(live.samples, live.counts - 1, live.counts), "leaves out too much"),
        ((skips > 0) & (table.capacity.prefill_halo == 0), "layers are left out by nobody here"),
        (live.drafted & ((most == 1) | (given["q"] > most)), "so many drafts are not known here"),
        ((given["grammar"] != 0) & (not table.capacity.has_masks), "grammars are not known here"),
        ((live.counts < 1) | (needed > known), "not so many ids are known"),
        ((live.samples | live.drafted) & (needed != known), "samples before its last id"),
        (live.drafted & ~live.samples, "has drafts, and samples nothing"),
        (is_host & (given["start_lo"] != starts), "the row starts elsewhere"),
        (~is_host & ~made, "its input is not of the producer step"),
        (~is_host & ~bounded, "the position is not within the row's bounds"),
    )
    for wrong, text in problems:
        _refuse(live, wrong, text)
    size = table.block_size
    last = -(-ends // size)
    for pool, first in ((Pool.GLOBAL, table.checked_blocks[slots]), (Pool.WINDOW, reach // size)):
        missing = _any_unwritten(table.tables[pool], slots, np.minimum(first, last), last)
        _refuse(live, missing, f"lacks a {pool.name} block")
    table.checked_blocks[slots] = np.maximum(table.checked_blocks[slots], last)
    _refuse(live, _any_unwritten(table.tokens, slots, starts, needed), "reads an unwritten id")


def _refuse(live: LiveRows, wrong: NDArray[np.bool_], text: str) -> None:
    for i in np.flatnonzero(wrong).tolist():
        start, end = int(live.starts[i]), int(live.starts[i] + live.counts[i])
        raise AssertionError(
            f"row {live.rows[i]} (slot {live.slots[i]}, positions {start} to {end}): {text}"
        )


def _any_unwritten(
    table: NDArray[np.int32],
    slots: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Whether an entry of table[slot, start:end] is negative, by row."""
    counts = ends - starts
    owner = np.repeat(np.arange(len(slots)), counts)
    offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    bad = table[slots[owner], starts[owner] + offsets] < 0
    result = np.zeros(len(slots), bool)
    result[owner[bad]] = True
    return result
