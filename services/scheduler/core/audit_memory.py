"""Invariants of the memory of one rank: I7, I10 and I16."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool

from .block_pool import BlockPool
from .engine import Engine
from .group import StepRecord


class AuditError(AssertionError):
    """An invariant does not hold; the text begins with its number."""


def require(holds: bool | np.bool_, text: str) -> None:
    """An invariant of a text that begins with its number.

    Raises:
        AuditError: it does not hold.
    """
    if not holds:
        raise AuditError(text)


def audit_memory(engine: Engine, steps: list[StepRecord], rank: int) -> None:
    """I7, I10, I16: every block and slot is in one class, held as often as tables and pins say."""
    residency, memory = engine.residency, engine.memories[rank]
    table, first = residency.table, rank * residency.slots
    here = first + np.flatnonzero(table.phase[first : first + residency.slots])
    held: list[list[NDArray[np.int32]]] = [[], [], [table.state[here].astype(np.int32)]]
    for i in here.tolist():
        held[0].append(table.global_blocks[i, : table.num_global[i]])
        held[1].append(table.window_blocks[i, table.window_start[i] : table.window_end[i]])
    held[0].append(np.array(residency.guests.blocks(rank), np.int32))
    pins = [table.request_at(i).deferred_state for i in here.tolist()]
    for step in steps:
        if rank in step.pending:
            pins += step.captures_of(rank).state_block.tolist()
    held[2].append(np.array([pin for pin in pins if pin >= 0], np.int32))
    points = memory.index.points.values()
    cached = (
        list(memory.index.block_of.values()),
        [block for point in points for block in point.window_blocks],
        [point.state_block for point in points],
    )
    pinned: list[list[int]] = [[], [], []]
    for op in residency.ops.of_rank(rank):
        for pool, block in op.blocks():
            pinned[pool].append(block)
    for pool, name in zip(Pool, ("global", "window", "state"), strict=True):
        blocks = memory.pools[pool]
        tables = np.concatenate([*held[pool], np.empty(0, np.int32)])
        _pool(blocks, tables, cached[pool], pinned[pool], name, memory.gpu_done)
    slots = [*(here - first).tolist(), *memory.spare_slots()]
    require(sorted(slots) == list(range(memory.num_slots)), "I16 slots leak, or have two owners")
    fence = memory.first_slot_fence
    require(fence is None or fence > memory.gpu_done, "I10 slot fence")
    known = engine.group.gpu_done[rank]
    require(memory.gpu_done in (0, known), "I10 the watermark of the pools")


def _pool(
    pool: BlockPool,
    tables: NDArray[np.int32],
    cached: list[int],
    pinned: list[int],
    name: str,
    gpu_done: int,
) -> None:
    """I7: free + evictable + held + fenced + pinned_by_op == total, each block in one class."""
    held_count = np.bincount(tables, minlength=pool.total)
    cached_count = np.bincount(np.array(cached, np.int64), minlength=pool.total)
    require(bool((pool.held == held_count).all()), f"I7 {name} blocks held wrongly")
    require(bool((pool.cached == cached_count).all()), f"I7 {name} blocks cached wrongly")
    pins = np.bincount(np.array(pinned, np.int64), minlength=pool.total)
    require(bool((pool.pins == pins).all()), f"I10 {name} blocks pinned by no open op, or not")
    only_pinned = int(np.count_nonzero((pins > 0) & (held_count == 0)))
    require(pool.num_pinned == only_pinned, f"I7 pinned {name} blocks")
    spare = pool.free_blocks() + [b for group in pool.fenced_blocks().values() for b in group]
    seen = np.bincount(np.array(spare, np.int64), minlength=pool.total)
    used = (held_count > 0) | (cached_count > 0) | (pins > 0)
    require(bool((seen <= 1).all()), f"I7 a {name} block is free twice")
    require(bool((used != (seen > 0)).all()), f"I7 {name} blocks leak, or are used and free")
    idle = np.flatnonzero((cached_count > 0) & (held_count == 0) & (pins == 0))
    require(idle.tolist() == sorted(pool.evictable_blocks()), f"I7 evictable {name} blocks")
    stray = pool.shielded & (pool.cached == 0) & (pool.held == 0) & (pool.pins == 0)
    require(not stray.any(), f"I7 shielded {name} blocks that nothing keeps")
    require(all(step > gpu_done for step in pool.fenced_blocks()), f"I10 {name} fence")
    require(pool.gpu_done == gpu_done, f"I10 {name} watermark")
    require(pool.num_fenced == len(spare) - pool.num_free, f"I7 fenced {name} blocks")
