"""All invariants of the core in one function; tests call it after every event."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from deepmesh.wire.messages import Pool

from .engine import Engine
from .group import StepRecord
from .request import Phase, Request

if TYPE_CHECKING:
    from .scheduler import Scheduler


class AuditError(AssertionError):
    """An invariant does not hold; the text begins with its number."""


def audit(core: Scheduler) -> None:
    """Check every invariant that can be read off the state.

    Raises:
        AuditError: the core is wrong, whatever the input was.
    """
    _requests(core)
    engine = core.engine
    if engine is None:
        _require(not core.group.unresolved, "I13 steps in flight without an engine")
        return
    for request in engine.residents():
        _counters(engine, request)
        _tables(engine, request)
    _inflight(engine, list(core.group.unresolved), core.config.depth)
    for rank in range(len(engine.memories)):
        _memory(engine, list(core.group.unresolved), rank)
    _quiescence(core, engine)


def _require(holds: bool | np.bool_, text: str) -> None:
    if not holds:
        raise AuditError(text)


def _requests(core: Scheduler) -> None:
    """I19 bookkeeping: a request is live in exactly one place, or ended, never both."""
    live = core.registry.live
    waiting = list(core.waiting)
    residents = core.engine.residents() if core.engine else []
    ids = Counter(request.rid for request in [*waiting, *residents])
    _require(all(count == 1 for count in ids.values()), "I19 a request is in two places")
    _require(
        {request.rid for request in live.values()} == set(ids), "I19 live requests are misplaced"
    )
    _require(not live.keys() & core.registry.ended.keys(), "I19 a request is live and ended")
    _require(waiting == sorted(waiting, key=lambda r: r.order), "I25 the queue is out of order")
    total = sum(len(request.ids) for request in waiting)
    _require(core.waiting.num_tokens == total, "I28 waiting tokens are miscounted")
    for request in waiting:
        _require(
            request.slot < 0 and request.deferred_state < 0, "I16 a waiting request has leases"
        )


def _counters(engine: Engine, request: Request) -> None:
    table, geometry, i = engine.residency.table, engine.geometry, request.slot
    c, k, t = (int(a[i]) for a in (table.confirmed_kv, table.confirmed, table.target))
    q, rows = int(table.inflight_q[i]), int(table.inflight_rows[i])
    who = f"request {request.rid}:"
    _require(0 <= c <= k <= request.max_len <= geometry.max_model_len, f"I1 {who} C={c} K={k}")
    _require(c < k, f"I1 {who} C={c} is not below K={k}")
    _require(request.prompt_len <= t <= k, f"I2 {who} T={t} K={k}")
    if table.phase[i] == Phase.DECODE and rows == 0:
        _require(k == c + 1, f"I2 {who} decodes with C={c} K={k}")
    if table.phase[i] == Phase.PREFILL:
        _require(c + q < t, f"I2 {who} prefills with H={c + q} T={t}")
    reach = c + q
    _require(reach <= request.max_len + geometry.decode_width - 1, f"I3 {who} H={reach}")
    _require(int(table.num_global[i]) * geometry.block_size >= reach, f"I3 {who} H={reach} global")
    _require(int(table.window_end[i]) * geometry.block_size >= reach, f"I3 {who} H={reach} window")
    first = max(0, c - geometry.window) // geometry.block_size
    _require(int(table.window_start[i]) <= first, f"I11 {who} window pruned beyond C - W")
    _require(rows <= geometry.depth, f"I4 {who} {rows} rows in flight")
    _require(table.rid[i] == request.rid and table.epoch[i] == request.epoch, f"I16 {who} slot")


def _tables(engine: Engine, request: Request) -> None:
    """I8, I9: what may still be written has one holder and is not published."""
    table, size, i = engine.residency.table, engine.geometry.block_size, request.slot
    memory = engine.memories[i // engine.residency.slots]
    c = int(table.confirmed_kv[i])
    for pool, blocks, first in (
        (memory.globals, table.global_blocks[i, c // size : table.num_global[i]], "global"),
        (
            memory.windows,
            table.window_blocks[
                i, max(c // size, int(table.window_start[i])) : table.window_end[i]
            ],
            "window",
        ),
        (memory.states, table.state[i : i + 1], "state"),
    ):
        _require(
            bool((pool.held[blocks] == 1).all() and (pool.cached[blocks] == 0).all()),
            f"I8 request {request.rid}: a {first} block at or above C={c} is shared",
        )
    for at in range(c // size, int(table.num_global[i])):
        block = int(table.global_blocks[i, at])
        _require(memory.index.hash_of(block) is None, f"I9 block {block} is published above C")


def _inflight(engine: Engine, steps: list[StepRecord], depth: int) -> None:
    """I4, I5, I13, I15: the columns are the sum of the unresolved rows, no more and no less."""
    table = engine.residency.table
    _require(len(steps) <= depth, f"I4 {len(steps)} steps in flight")
    ids = [step.step_id for step in steps]
    _require(ids == sorted(set(ids)), "I13 steps out of order")
    q, rows, tokens = (np.zeros_like(table.inflight_q) for _ in range(3))
    zombies: Counter[tuple[int, int]] = Counter()
    latest: dict[int, int] = {}
    for step in steps:
        for rank in step.pending:
            part = step.ranks[rank]
            alive = table.gen[part.index] == part.gen
            np.add.at(q, part.index[alive], part.q[alive])
            np.add.at(rows, part.index[alive], 1)
            np.add.at(tokens, part.index[alive], part.sampled[alive])
            latest.update((int(i), step.step_id) for i in part.index[alive])
            for row in np.flatnonzero(~alive).tolist():
                zombies[int(part.rid[row]), int(part.epoch[row])] += 1
    here = table.resident()
    _require(bool((q[here] == table.inflight_q[here]).all()), "I5 Σq differs from the rows")
    _require(bool((rows[here] == table.inflight_rows[here]).all()), "I5 rows in flight")
    _require(bool((tokens[here] == table.inflight_tokens[here]).all()), "I5 sure output tokens")
    for i, step_id in latest.items():
        _require(table.producer[i] == step_id, "I15 the producer is not the latest row")
    counted = {key: zombie.rows for key, zombie in engine.residency.zombies.items()}
    _require(counted == dict(zombies), f"I14 zombies {counted}, rows say {dict(zombies)}")


def _memory(engine: Engine, steps: list[StepRecord], rank: int) -> None:
    """I7, I10, I16: every block and slot is in one class, held as often as tables and pins say."""
    residency, memory = engine.residency, engine.memories[rank]
    table = residency.table
    held = [Counter[int]() for _ in Pool]
    cached = [Counter[int]() for _ in Pool]
    slots: list[int] = []
    for request in engine.residents():
        i = request.slot
        if i // residency.slots != rank:
            continue
        slots.append(i % residency.slots)
        held[0].update(table.global_blocks[i, : table.num_global[i]].tolist())
        held[1].update(table.window_blocks[i, table.window_start[i] : table.window_end[i]].tolist())
        held[2][int(table.state[i])] += 1
        if request.deferred_state >= 0:
            held[2][request.deferred_state] += 1
    for step in steps:
        if rank in step.pending:
            held[2].update(capture.state_block for capture in step.ranks[rank].captures)
    cached[0].update(memory.index.block_of.values())
    for point in memory.index.points.values():
        cached[1].update(point.window_blocks)
        cached[2][point.state_block] += 1
    for pool, name in zip(Pool, ("global", "window", "state"), strict=True):
        blocks = memory.pools[pool]
        fenced = [b for group in blocks.fenced_blocks().values() for b in group]
        spare = blocks.free_blocks() + fenced
        _require(len(set(spare)) == len(spare), f"I7 a {name} block is free twice")
        for b in range(blocks.total):
            _require(blocks.held[b] == held[pool][b], f"I7 {name} block {b} held wrongly")
            _require(blocks.cached[b] == cached[pool][b], f"I7 {name} block {b} cached wrongly")
        used = set(held[pool]) | set(cached[pool])
        _require(not used & set(spare), f"I7 a {name} block is used and free")
        _require(len(used) + len(spare) == blocks.total, f"I7 {name} blocks leak")
        idle = {b for b in cached[pool] if not held[pool][b]}
        _require(idle == set(blocks.evictable_blocks()), f"I7 evictable {name} blocks")
        _require(
            all(step > memory.gpu_done for step in blocks.fenced_blocks()), f"I10 {name} fence"
        )
        _require(blocks.gpu_done == memory.gpu_done, f"I10 {name} watermark")
    free = memory.num_free_slots + memory.num_fenced_slots
    _require(len(slots) + free == memory.num_slots, "I16 slots leak")


def _quiescence(core: Scheduler, engine: Engine) -> None:
    """I12: nothing is left behind when nothing is there."""
    if core.registry.live or core.group.unresolved:
        return
    _require(not engine.residency.zombies, "I12 zombies without steps")
    for memory in engine.memories:
        for pool in memory.pools:
            _require(pool.num_held == 0, "I12 blocks are held by nobody")
