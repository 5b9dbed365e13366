"""Loads and stores in flight: the blocks they touch stay theirs until OpDone or the epoch's end."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from deepmesh.wire.messages import KvMove, OpDone, Pool

from .leases import RankMemory
from .prefix_index import Point
from .request import Found, Request


@dataclass(slots=True, eq=False)
class Op:
    """One order to an executor. Its blocks are pinned from the order to its end."""

    op_id: int
    rank: int
    store: str  # name of the kvstore
    moves: list[KvMove]
    began_ns: int
    deadline_ns: int
    is_overdue: bool = False  # its blocks are in quarantine: nobody knows when they come back

    def blocks(self) -> Iterator[tuple[Pool, int]]:
        """Everything that it touches, the end of the prefix first: that is to leave first."""
        for move in reversed(self.moves):
            yield from reversed(move.blocks)


@dataclass(slots=True, eq=False)
class StoreOp(Op):
    """Reads blocks that hold a confirmed prefix."""


@dataclass(slots=True, eq=False)
class ExportOp(Op):
    """Copies a confirmed prefix to where executors of another group find it; `store` is the
    executor itself."""

    answer: OpDone | None = None  # once it has ended
    is_unwanted: bool = False  # the copy is released as soon as it is complete


@dataclass(slots=True, eq=False)
class LoadOp(Op):
    """Fills leased blocks of a request that waits in its slot."""

    request: Request = field(kw_only=True)
    index: int = field(kw_only=True)  # of the slot; with another `gen` the request has left
    gen: int = field(kw_only=True)
    position: int = field(kw_only=True)  # of the point: C once the load is complete
    local: int = field(kw_only=True)  # C without it
    found: Found = field(kw_only=True)  # where it comes from


@dataclass(slots=True, eq=False)
class PrefetchOp(Op):
    """Fills blocks that nobody holds: it alone keeps them."""

    keys: list[bytes] = field(kw_only=True)  # of the whole prefix
    own: list[int] = field(kw_only=True)  # global blocks of the last of them, which it fills
    point: Point = field(kw_only=True)
    local: int = field(kw_only=True)  # what the rank could resume without it
    found: Found = field(kw_only=True)


class OpFences:
    """Open ops of all ranks in this engine epoch. Independent of step fences: a block waits for
    all. When the epoch ends the pools go, and the ops with them."""

    def __init__(self, memories: list[RankMemory]) -> None:
        self._memories = memories
        self._open: list[dict[int, Op]] = [{} for _ in memories]  # by rank, oldest first
        self._ranks: dict[int, int] = {}  # op_id -> rank
        self._next_deadline_ns = 0  # no op is over its deadline before; 0: none is open

    def __iter__(self) -> Iterator[Op]:
        return (op for ops in self._open for op in ops.values())

    def __len__(self) -> int:
        return len(self._ranks)

    def get(self, op_id: int) -> Op | None:
        """An open op."""
        rank = self._ranks.get(op_id)
        return None if rank is None else self._open[rank][op_id]

    def begin(self, op: Op) -> None:
        """Pin what the op touches."""
        for pool, block in op.blocks():
            self._memories[op.rank].pools[pool].pin(block)
        self._open[op.rank][op.op_id] = op
        self._ranks[op.op_id] = op.rank
        self._next_deadline_ns = min(self._next_deadline_ns or op.deadline_ns, op.deadline_ns)

    def end(self, op: Op) -> None:
        """The executor does not touch its blocks any more."""
        del self._open[op.rank][op.op_id]
        del self._ranks[op.op_id]
        for pool, block in op.blocks():
            self._memories[op.rank].pools[pool].unpin(block)

    def expire(self, now: int) -> list[Op]:
        """Ops that are over their deadline since the last call. No time frees their blocks."""
        if not self._next_deadline_ns or now < self._next_deadline_ns:
            return []
        overdue = [op for op in self if not op.is_overdue and op.deadline_ns <= now]
        for op in overdue:
            op.is_overdue = True
        left = [op.deadline_ns for op in self if not op.is_overdue]
        self._next_deadline_ns = min(left, default=0)
        return overdue

    def of_rank(self, rank: int, kind: type[Op] = Op) -> list[Op]:
        """Open ops of a rank, oldest first."""
        return [op for op in self._open[rank].values() if isinstance(op, kind)]

    def num_quarantined(self, rank: int, pool: Pool) -> int:
        """Blocks that only ops over their deadline keep."""
        blocks: set[int] = set()
        for op in self._open[rank].values():
            if op.is_overdue:
                blocks.update(block for kind, block in op.blocks() if kind == pool)
        held = self._memories[rank].pools[pool].held
        return sum(int(held[block]) == 0 for block in blocks)

    def num_returning(self, rank: int, pool: Pool) -> int:
        """Blocks that are sure to come back: steps and ops in flight are the last to touch them."""
        blocks = self._memories[rank].pools[pool]
        return blocks.num_fenced + blocks.num_pinned - self.num_quarantined(rank, pool)

    @property
    def num_overdue(self) -> int:
        """Ops over their deadline."""
        return sum(op.is_overdue for op in self)
