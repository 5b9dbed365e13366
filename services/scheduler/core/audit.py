"""All invariants of the core in one function; tests call it after every event."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Pool

from .audit_handovers import audit_handovers
from .audit_memory import AuditError, audit_memory, require
from .engine import Engine
from .group import Group, StepRecord, StepState
from .op_fences import LoadOp, PrefetchOp
from .policy import least_alone
from .request import Phase, Request

if TYPE_CHECKING:
    from .scheduler import Scheduler


def audit(core: Scheduler) -> None:
    """Check every invariant that can be read off the state.

    Raises:
        AuditError: the core is wrong, whatever the input was.
    """
    engine = core.engine
    residents = engine.residents() if engine else []
    _requests(core, residents)
    audit_handovers(core)
    if engine is None:
        require(not core.group.unresolved, "I13 steps in flight without an engine")
        return
    require(core.group.ready, "I13 an engine without all of its ranks")
    steps = list(core.group.unresolved)
    if residents:
        _counters(engine, residents)
        _tables(engine, residents)
    _loads(engine, residents)
    _guests(engine)
    _expected(engine, residents)
    _fits(core, engine)
    _grammars(engine)
    _pipeline(core.group)
    _inflight(engine, steps, core.config.depth)
    for rank in range(len(engine.memories)):
        audit_memory(engine, steps, rank)
    _quiescence(core, engine)


def _requests(core: Scheduler, residents: list[Request]) -> None:
    """I19 bookkeeping: a request is live in exactly one place, or ended, never both."""
    live, waiting = core.registry.live, list(core.waiting)
    ids = [request.rid for request in (*waiting, *residents)]
    require(len(set(ids)) == len(ids), "I19 a request is in two places")
    require({r.rid for r in live.values()} == set(ids), "I19 live requests are misplaced")
    require(not live.keys() & core.registry.ended.keys(), "I19 a request is live and ended")
    order = [request.order for request in waiting]
    require(order == sorted(order), "I25 the queue is out of order")
    total = sum(len(request.ids) for request in waiting)
    require(core.waiting.num_tokens == total, "I28 waiting tokens are miscounted")
    leased = any(request.slot >= 0 or request.deferred_state >= 0 for request in waiting)
    require(not leased, "I16 a waiting request has leases")


def _counters(engine: Engine, residents: list[Request]) -> None:
    """I1-I4, I11, I16 for all residents at once."""
    table, geometry = engine.residency.table, engine.geometry
    here = np.array([request.slot for request in residents])

    def holds(truth: NDArray[np.bool_], text: str) -> None:
        if not truth.all():
            i = int(here[np.flatnonzero(~truth)[0]])
            raise AuditError(
                f"{text}: request {table.rid[i]} has C={table.confirmed_kv[i]} "
                f"K={table.confirmed[i]} T={table.target[i]} Σq={table.inflight_q[i]} "
                f"F={table.inflight_rows[i]} phase={table.phase[i]}"
            )

    c, k, t = table.confirmed_kv[here], table.confirmed[here], table.target[here]
    reach, rows, limit = c + table.inflight_q[here], table.inflight_rows[here], table.max_len[here]
    decode, size = table.phase[here] == Phase.DECODE, geometry.block_size
    holds((c >= 0) & (c < k) & (k <= limit) & (limit <= geometry.max_model_len), "I1 C, K")
    holds((table.prompt_len[here] <= t) & (t <= k), "I2 T")
    holds(~decode | (rows > 0) | (k == c + 1), "I2 decodes with F empty")
    holds(decode | (reach < t), "I2 prefills")
    # The device clamps what drafts would write beyond the limit; a row begins below it.
    holds(reach < limit + geometry.depth * geometry.decode_width, "I3 H beyond the limit")
    need = np.minimum(reach, limit) + np.where(decode, geometry.draft_reach, 0)
    holds(table.num_global[here] * size >= need, "I3 H beyond the global blocks")
    holds(table.window_end[here] * size >= need, "I3 H beyond the window blocks")
    first = np.maximum(0, c - geometry.window) // size
    loading = table.phase[here] == Phase.LOADING
    holds(loading | (table.window_start[here] <= first), "I11 window pruned beyond C - W")
    holds(table.window_start[here] <= table.window_end[here], "I11 window")
    sent = (table.sent_global[here], table.sent_window[here])
    holds(sent[0] <= table.num_global[here], "I3 more global blocks sent than held")
    holds(sent[1] <= table.window_end[here], "I3 more window blocks sent than held")
    holds(~loading | ((c == 0) & (rows == 0) & ~table.leaving[here]), "I24 loads and takes part")
    holds(rows <= geometry.depth, "I4 rows in flight")
    rids = np.array([request.rid for request in residents], np.uint64)
    epochs = np.array([request.epoch for request in residents], np.uint32)
    holds((table.rid[here] == rids) & (table.epoch[here] == epochs), "I16 slot")
    homes = [table.tokenizers[int(table.tokenizer[i])] for i in here]
    holds(np.array([r.reply_to == h for r, h in zip(residents, homes, strict=True)]), "I18 home")


def _grammars(engine: Engine) -> None:
    """I29: whoever waits for a grammar waits for somebody's answer, and none is known for longer
    than the executors keep it."""
    grammars, ranks = engine.grammars, set(range(len(engine.memories)))
    require(grammars.num_known <= grammars.kept, "I29 more grammars than the executors keep")
    require(2 * grammars.num_open <= grammars.kept + 1, "I29 orders push out each other's grammars")
    for pending in grammars.pending():
        require(bool(pending) and pending <= ranks, "I29 a grammar is waited for in vain")


def _tables(engine: Engine, residents: list[Request]) -> None:
    """I8, I9: what may still be written has one holder and is not published."""
    table, size = engine.residency.table, engine.geometry.block_size
    for rank, memory in enumerate(engine.memories):
        open_blocks: list[list[NDArray[np.int32]]] = [[], [], []]
        for i in (r.slot for r in residents if r.slot // engine.residency.slots == rank):
            if table.phase[i] == Phase.LOADING:
                continue  # what the op fills is looked at in `_loads`
            first = int(table.confirmed_kv[i]) // size
            open_blocks[0].append(table.global_blocks[i, first : table.num_global[i]])
            low = max(first, int(table.window_start[i]))
            open_blocks[1].append(table.window_blocks[i, low : table.window_end[i]])
            open_blocks[2].append(table.state[i : i + 1].astype(np.int32))
        for pool, parts in zip(Pool, open_blocks, strict=True):
            blocks = np.concatenate([*parts, np.empty(0, np.int32)])
            ledger = memory.pools[pool]
            alone = (ledger.held[blocks] == 1) & (ledger.cached[blocks] == 0)
            text = f"I8 a {pool.name} block at or above C is shared or published"
            require(bool(alone.all()), text)


def _loads(engine: Engine, residents: list[Request]) -> None:
    """I8, I24: a request that loads has one open op, which fills blocks that are its own."""
    table = engine.residency.table
    filling: dict[int, LoadOp] = {}
    for op in engine.residency.ops:
        if isinstance(op, LoadOp) and table.gen[op.index] == op.gen:
            require(op.index not in filling, "I24 two loads fill one slot")
            filling[op.index] = op
    loading = {r.slot for r in residents if table.phase[r.slot] == Phase.LOADING}
    require(filling.keys() == loading, f"I24 ops fill {set(filling)}, slots load {loading}")
    for index, op in filling.items():
        require(not op.is_overdue, "I24 a request waits for a load over its deadline")
        require(table.request_at(index) is op.request, "I16 a load for another request")
        own = {(Pool.GLOBAL, int(b)) for b in table.global_blocks[index, : table.num_global[index]]}
        start, end = int(table.window_start[index]), int(table.window_end[index])
        own |= {(Pool.WINDOW, int(b)) for b in table.window_blocks[index, start:end]}
        own.add((Pool.STATE, op.request.deferred_state))
        for pool, block in op.blocks():
            ledger = engine.memories[op.rank].pools[pool]
            require((pool, block) in own, f"I8 a load fills {pool.name} {block} of another")
            alone = ledger.held[block] == 1 and ledger.cached[block] == 0
            require(alone and ledger.pins[block] == 1, f"I8 a load fills shared {pool.name} blocks")


def _guests(engine: Engine) -> None:
    """I30: ranks lend blocks to a prompt that goes on elsewhere, and to nobody else."""
    table, guests = engine.residency.table, engine.residency.guests
    lent = [bool(guests.blocks(rank)) for rank in range(len(engine.memories))]
    if guests.index < 0:
        require(not any(lent), "I30 blocks are lent to nobody")
        return
    home = guests.index // engine.residency.slots
    require(table.phase[guests.index] == Phase.PREFILL, "I30 blocks are lent to no prompt")
    require(not lent[home], "I30 a rank lends blocks to its own request")


def _expected(engine: Engine, residents: list[Request]) -> None:
    """I25: others wait for exactly the prefixes that residents are about to compute or load."""
    size, slots = engine.geometry.block_size, engine.residency.slots
    wanted: list[Counter[bytes]] = [Counter() for _ in engine.memories]
    for request in residents:
        for point in request.points:
            if point // size <= len(request.chain):
                wanted[request.slot // slots][request.chain[point // size - 1]] += 1
    for op in engine.residency.ops:
        if isinstance(op, PrefetchOp) and not op.is_overdue:
            wanted[op.rank][op.point.key] += 1
    require(wanted == engine.residency.expected, "I25 prefixes are expected of nobody, or not")


def _fits(core: Scheduler, engine: Engine) -> None:
    """I27: every live request can finish if it has a rank to itself."""
    longest = max((request.max_len for request in core.registry.live.values()), default=0)
    require(longest <= engine.geometry.max_model_len, "I27 a request beyond the context")
    need = least_alone(engine.geometry, longest) if longest else (0, 0, 0)
    fits = all(blocks <= total for blocks, total in zip(need, engine.totals, strict=True))
    require(fits, f"I27 a request needs {need} blocks of {engine.totals}")


def _pipeline(group: Group) -> None:
    """I13: results come in step order on each rank, and watermarks never lead."""
    steps = [*group.retiring, *group.unresolved]
    ids = [step.step_id for step in steps]
    require(ids == sorted(set(ids)), "I13 steps out of order")
    require(all(step.pending for step in group.unresolved), "I13 a step of nobody is unresolved")
    require(not any(step.pending for step in group.retiring), "I13 retired without a result")
    states = {StepState.SUBMITTED, StepState.TOKENS_READY}
    require({step.state for step in group.unresolved} <= states, "I13 state of a step in flight")
    for rank, (applied, done) in enumerate(zip(group.applied, group.gpu_done, strict=True)):
        owed = [step.step_id for step in group.unresolved if rank in step.pending]
        require(ids[len(ids) - len(owed) :] == owed, f"I13 rank {rank} left a step out")
        require(not owed or applied < owed[0], f"I13 rank {rank} applied before its turn")
        require(done <= group.last_step_id, f"I10 rank {rank} is done with what was not sent")


def _inflight(engine: Engine, steps: list[StepRecord], depth: int) -> None:
    """I4, I5, I14, I15: the columns are the sum of the unresolved rows, no more and no less."""
    table = engine.residency.table
    require(len(steps) <= depth, f"I4 {len(steps)} steps in flight")
    q, least, rows, tokens = (np.zeros_like(table.inflight_q) for _ in range(4))
    zombies: Counter[tuple[int, int]] = Counter()
    latest: dict[int, int] = {}
    for step in steps:
        for rank in step.pending:
            part = step.part(rank)
            alive = table.gen[part.index] == part.gen
            np.add.at(q, part.index[alive], part.q[alive])
            np.add.at(least, part.index[alive], part.least[alive])
            np.add.at(rows, part.index[alive], 1)
            np.add.at(tokens, part.index[alive], part.sampled[alive])
            latest.update((int(i), step.step_id) for i in part.index[alive])
            for row in np.flatnonzero(~alive).tolist():
                zombies[int(part.rid[row]), int(part.epoch[row])] += 1
    here = table.resident()
    require(bool((q[here] == table.inflight_q[here]).all()), "I5 Σq differs from the rows")
    require(bool((least[here] == table.inflight_min[here]).all()), "I5 sure positions")
    require(bool((rows[here] == table.inflight_rows[here]).all()), "I5 rows in flight")
    require(bool((tokens[here] == table.inflight_tokens[here]).all()), "I5 sure output tokens")
    for i, step_id in latest.items():
        require(table.producer[i] == step_id, "I15 the producer is not the latest row")
    open_tokens = sum(step.pending_tokens for step in steps)
    require(engine.group.inflight_tokens == open_tokens, "I5 total_inflight_tokens")
    counted = {key: zombie.rows for key, zombie in engine.residency.zombies.items()}
    require(counted == dict(zombies), f"I14 zombies {counted}, rows say {dict(zombies)}")


def _quiescence(core: Scheduler, engine: Engine) -> None:
    """I12: nothing is left behind when nothing is there."""
    if core.registry.live or core.group.unresolved:
        return
    ahead = any(isinstance(op, PrefetchOp) for op in engine.residency.ops)
    require(ahead or not any(engine.residency.expected), "I12 prefixes are expected of nobody")
    require(not engine.residency.zombies, "I12 zombies without steps")
    for memory in engine.memories:
        for pool in memory.pools:
            require(pool.num_held == 0, "I12 blocks are held by nobody")
