"""Loads ahead of admission: what a kvstore has of a prompt comes while that waits for a place."""

import numpy as np

from deepmesh.wire.messages import KvStatus, KvTier, LoadBlocks, OpDone, Pool
from deepmesh.wire.messages import PointSource as Source

from .cache_counts import DEVICE
from .group import Group
from .kv_stores import KvStores
from .op_fences import PrefetchOp
from .outbox import Outbox
from .prefix_index import Hit, Point
from .request import Request
from .residency import Residency
from .store_loads import LoadPlan, moves_into

MAX_AHEAD = 8  # requests at the head of the queue that are looked at
MAX_OPS = 2  # in flight, per rank
MAX_KNOWN = 1024  # points loaded ahead whose tier is remembered
PERIOD_NS = 4_000_000  # from one look at the queue to the next


class Prefetch:
    """Plans and ends such loads for one engine epoch.

    Nobody holds the blocks: the op pins them, and when it ends they are in the prefix index, or
    free. So a request that leaves meanwhile leaves nothing behind, and one that enters finds them
    there, or waits for them as for any prefix that is being computed.
    """

    def __init__(
        self,
        residency: Residency,
        group: Group,
        stores: KvStores,
        outbox: Outbox,
        *,
        load_ns: int,
    ) -> None:
        self._residency = residency
        self._group = group
        self._stores = stores
        self._outbox = outbox
        self._load_ns = load_ns
        self._next_look_ns = 0
        self._tiers: dict[bytes, KvTier] = {}  # of points nobody has hit yet

    def is_due(self, now: int) -> bool:
        """Whether to look at the queue; there is nothing to be found without a kvstore."""
        if not self._stores.any_up or now < self._next_look_ns:
            return False
        self._next_look_ns = now + PERIOD_NS
        return True

    def has_room(self, rank: int) -> bool:
        """Whether the rank may load one more."""
        return len(self._residency.ops.of_rank(rank, PrefetchOp)) < MAX_OPS

    def tier_of(self, hit: Hit) -> int:
        """Where a hit came from: the first one at a point that was loaded ahead is its tier's."""
        return int(self._tiers.pop(hit.point.key, DEVICE)) if hit.point else DEVICE

    def begin(self, request: Request, rank: int, plan: LoadPlan, now: int) -> bool:
        """Order what the rank lacks of the prompt up to a point; False: that would take blocks
        from something that is worth more."""
        found, memory = request.found, self._residency.memories[rank]
        assert found is not None
        size, position, shared = self._residency.geometry.block_size, plan.position, plan.shared
        count = position // size
        start = max(0, position - self._residency.geometry.window) // size
        key = request.chain[count - 1]
        needs = (count - len(shared), count - start, 1)
        if key in self._residency.expected[rank]:
            return False
        if any(pool.num_spare < need for pool, need in zip(memory.pools, needs, strict=True)):
            return False
        taken: list[list[int]] = []
        for pool, need in zip(Pool, needs, strict=True):
            blocks = memory.take(pool, need)
            if blocks is None:  # evicted, and still fenced
                break
            taken.append(blocks)
        keys = request.chain[:count]
        is_whole = len(taken) == len(Pool) and all(
            memory.index.block_of.get(key) == block
            for key, block in zip(keys, shared, strict=False)
        )
        if is_whole:
            own, windows, (state,) = taken
            point = Point(key, position, start, tuple(windows), state)
            self._order(request, rank, plan, point, [*shared, *own], now)
        for pool, blocks in zip(Pool, taken, strict=False):
            for block in blocks:  # from here on the op alone keeps them
                memory.pools[pool].release(block, 0)
        return is_whole

    def _order(
        self,
        request: Request,
        rank: int,
        plan: LoadPlan,
        point: Point,
        blocks: list[int],
        now: int,
    ) -> None:
        found = request.found
        assert found is not None
        keys = request.chain[: len(blocks)]
        own = blocks[len(plan.shared) :]
        moves = moves_into(keys[len(plan.shared) :], own, point)
        op = PrefetchOp(
            self._stores.next_op_id(),
            rank,
            found.store,
            moves,
            now,
            now + self._load_ns,
            keys=keys,
            own=own,
            point=point,
            found=found,
            local=plan.local,
        )
        self._residency.ops.begin(op)
        self._residency.expected[rank][point.key] += 1
        self._residency.cache.prefetches += 1
        order = LoadBlocks(
            op_id=op.op_id,
            engine_epoch=self._group.engine_epoch,
            after_step=0,
            moves=moves,
            traceparent=request.generate.traceparent,
            store=found.store,
        )
        self._outbox.send(self._group.peers[rank], order)

    def done(self, op: PrefetchOp, message: OpDone) -> None:
        """Before the op lets its blocks go: what came whole is found from here on."""
        if not op.is_overdue:
            self._unexpect(op)
        keys = [(move.hash, move.kind) for move in op.moves]
        is_complete = message.status == KvStatus.OK and len(message.done) == len(op.moves)
        if not is_complete or not all(message.done):
            self._stores.forget(op.store, keys)
            self._stores.counters["loads_failed"] += 1
            op.found.point_blocks = 0  # the request computes it
            return
        self._stores.learn(op.store, keys)
        index = self._residency.memories[op.rank].index
        first = len(op.keys) - len(op.own)
        below = [index.block_of.get(key, -1) for key in op.keys[:first]]
        if -1 in below:
            return  # evicted meanwhile: what came cannot be resumed
        blocks = np.array([*below, *op.own], np.int32)
        if index.publish(op.keys, blocks, op.point, Source.LOADED):
            self._residency.cache.prefetched_tokens += int(op.point.position - op.local)
            self._tiers[op.point.key] = op.found.tier
            while len(self._tiers) > MAX_KNOWN:
                del self._tiers[next(iter(self._tiers))]

    def give_up(self, op: PrefetchOp) -> None:
        """Nobody waits for it any more, and it is not tried again."""
        op.found.point_blocks = 0
        self._unexpect(op)

    def _unexpect(self, op: PrefetchOp) -> None:
        expected = self._residency.expected[op.rank]
        expected[op.point.key] -= 1
        if expected[op.point.key] <= 0:
            del expected[op.point.key]
