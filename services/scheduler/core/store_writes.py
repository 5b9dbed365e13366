"""Write-through: published prefixes go to a kvstore, a bounded number of blocks at a time."""

from collections import deque
from dataclasses import dataclass

from deepmesh.wire.messages import KvKind, KvMove, OpDone, Pool, StoreBlocks

from .group import Group
from .kv_stores import Key, KvStores
from .op_fences import StoreOp
from .outbox import Outbox
from .prefix_index import Point
from .residency import Residency

MAX_BACKLOG = 64  # points of a rank that wait for their turn; what comes then is not stored
MAX_OPS = 4  # in flight, per rank
MAX_MOVES = 64  # of one op
PINNED_SHARE = 4  # of a pool's blocks, one in so many may be pinned by stores in flight
DEADLINE_NS = 10_000_000_000  # an op that takes longer counts as stuck


@dataclass(slots=True, eq=False)
class _Waiting:
    """A prefix that is not stored as a whole. It pins nothing: it may be evicted meanwhile."""

    store: str
    blocks: deque[bytes]  # hashes of global blocks that are not known to be there, first one first
    point: bytes  # empty once it is in flight


class StoreWrites:
    """Plans stores for one engine epoch, behind the planning of steps and never instead of it."""

    def __init__(
        self, residency: Residency, group: Group, stores: KvStores, outbox: Outbox
    ) -> None:
        self._residency = residency
        self._ops = residency.ops
        self._group = group
        self._stores = stores
        self._outbox = outbox
        self._backlog: list[deque[_Waiting]] = [deque() for _ in residency.memories]
        self._claimed: set[Key] = set()  # waiting or in flight on any rank: nobody stores them too
        if stores.count:
            residency.on_point = self.offer

    def offer(self, rank: int, chain: list[bytes], point: Point) -> None:
        """A point is there: store it and the blocks below it, but for what is there already."""
        store, key = self._stores.name_for(chain), (point.key, KvKind.POINT)
        if not store or key in self._claimed or self._stores.is_known(store, *key):
            return
        if len(self._backlog[rank]) >= MAX_BACKLOG:
            self._stores.counters["stores_dropped"] += 1
            return
        blocks: deque[bytes] = deque()
        for hash_ in reversed(chain):  # what lies below a block that is there is there, or will be
            block = (hash_, KvKind.BLOCK)
            if block in self._claimed or self._stores.is_known(store, *block):
                break
            blocks.appendleft(hash_)
        self._claimed.update((hash_, KvKind.BLOCK) for hash_ in blocks)
        self._claimed.add(key)
        self._backlog[rank].append(_Waiting(store, blocks, point.key))

    def flush(self, now: int) -> None:
        """Order what the bounds allow."""
        for rank, backlog in enumerate(self._backlog):
            if not backlog or rank not in self._group.loaded:
                continue
            open_ops = len(self._ops.of_rank(rank, StoreOp))
            while backlog and open_ops < MAX_OPS:
                waiting = backlog[0]
                if not self._stores.is_up(waiting.store):
                    self._give_up(waiting)
                moves = self._next_moves(rank, waiting)
                if moves:
                    self._order(rank, waiting.store, moves, now)
                    open_ops += 1
                if not waiting.blocks and not waiting.point:
                    backlog.popleft()
                elif not moves:
                    break  # no room: an op in flight has to end first

    def done(self, op: StoreOp, message: OpDone) -> None:
        """A store has ended; what it did not bring will be offered again when it is used."""
        self._claimed.difference_update((move.hash, move.kind) for move in op.moves)
        done = message.done[: len(op.moves)].ljust(len(op.moves), b"\0")
        kept = [(m.hash, m.kind) for m, ok in zip(op.moves, done, strict=True) if ok]
        self._stores.learn(op.store, kept)
        self._stores.counters["stored_blocks"] += len(kept)
        self._stores.counters["stores_failed"] += len(op.moves) - len(kept)

    @property
    def num_waiting(self) -> int:
        """Points that wait for their turn."""
        return sum(map(len, self._backlog))

    # ------------------------------------------------------------ parts

    def _next_moves(self, rank: int, waiting: _Waiting) -> list[KvMove]:
        """The next blocks of a prefix, and behind the last its point, as far as there is room."""
        index = self._residency.memories[rank].index
        moves: list[KvMove] = []
        room = min(MAX_MOVES, self._room(rank, Pool.GLOBAL))
        while waiting.blocks and len(moves) < room:
            block = index.block_of.get(waiting.blocks[0])
            if block is None:
                self._give_up(waiting)
                return moves
            moves.append(KvMove(waiting.blocks.popleft(), KvKind.BLOCK, [(Pool.GLOBAL, block)]))
        if waiting.blocks or not waiting.point:
            return moves
        point = index.points.get(waiting.point)
        if point is None:
            self._give_up(waiting)
        elif self._room(rank, Pool.WINDOW) > 0 and self._room(rank, Pool.STATE) > 0:
            waiting.point = b""
            windows = [(Pool.WINDOW, block) for block in point.window_blocks]
            parts = [*windows, (Pool.STATE, point.state_block)]
            moves.append(KvMove(point.key, KvKind.POINT, parts))
        return moves

    def _give_up(self, waiting: _Waiting) -> None:
        """Part of it was evicted, or its point was superseded by a later one."""
        self._claimed.difference_update((hash_, KvKind.BLOCK) for hash_ in waiting.blocks)
        self._claimed.discard((waiting.point, KvKind.POINT))
        waiting.blocks.clear()
        waiting.point = b""

    def _room(self, rank: int, pool: Pool) -> int:
        """Blocks that stores may still pin; one op at a time is always allowed."""
        ops = self._ops.of_rank(rank, StoreOp)
        limit = max(1, self._residency.memories[rank].pools[pool].total // PINNED_SHARE)
        return limit - sum(kind == pool for op in ops for kind, _ in op.blocks())

    def _order(self, rank: int, store: str, moves: list[KvMove], now: int) -> None:
        op_id = self._stores.next_op_id()
        op = StoreOp(op_id, rank, store, moves, now, now + DEADLINE_NS)
        self._ops.begin(op)
        order = StoreBlocks(
            op_id=op_id,
            engine_epoch=self._group.engine_epoch,
            # Whatever is published was computed in steps that have been applied.
            after_step=self._group.applied[rank],
            moves=moves,
            store=store,
        )
        self._outbox.send(self._group.peers[rank], order)
