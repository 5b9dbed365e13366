"""What routers are told of resumable points: all of them first, then what came and went."""

from deepmesh.prefix_hash import HASH_BYTES
from deepmesh.wire.messages import PrefixEvents

from .engine import Engine
from .outbox import Outbox

PERIOD_NS = 20_000_000  # between two reports of changes
MAX_HASHES = 4096  # of one message


class PrefixReports:
    """Nothing is kept and nothing is sent while no router is linked.

    A link loses no message without breaking, and who links anew is told everything anew, so a
    router knows a group's points as they were a report ago.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._told: set[str] = set()  # routers that only need what changes
        self._fresh: set[str] = set()  # those that need all of it
        self._engine: Engine | None = None  # whose points they know
        self._next_ns = 0

    def up(self, router: str) -> None:
        """A router is linked; it knows nothing."""
        self._told.discard(router)
        self._fresh.add(router)

    def down(self, router: str) -> None:
        """A router is lost."""
        self._told.discard(router)
        self._fresh.discard(router)

    @property
    def is_waiting(self) -> bool:
        """Changes wait for their report."""
        if self._engine is None:
            return False
        return any(memory.index.touched for memory in self._engine.memories)

    def flush(self, engine: Engine | None, now: int) -> None:
        """Report what is due. A group has a point while any of its ranks has it."""
        if engine is None:
            return
        if not (self._told or self._fresh):
            self._watch(None)
            return
        if engine is not self._engine:
            self._watch(engine)
            self._fresh |= self._told
        if self._fresh:
            points = {key for memory in engine.memories for key in memory.index.points}
            self._send(engine, self._fresh, points, set(), first=True)
            self._told |= self._fresh
            self._fresh = set()
        if now < self._next_ns or not self.is_waiting:
            return
        self._next_ns = now + PERIOD_NS
        touched: set[bytes] = set()
        for memory in engine.memories:
            touched |= (memory.index.touched or {}).keys()
            memory.index.touched = {}
        here = {k for k in touched if any(k in memory.index.points for memory in engine.memories)}
        self._send(engine, self._told, here, touched - here, first=False)

    # ------------------------------------------------------------ parts

    def _watch(self, engine: Engine | None) -> None:
        """Note the changes of this engine, and of no other."""
        for memory in self._engine.memories if self._engine is not None else ():
            memory.index.touched = None
        self._engine = engine
        for memory in engine.memories if engine is not None else ():
            memory.index.touched = {}

    def _send(
        self,
        engine: Engine,
        routers: set[str],
        added: set[bytes],
        dropped: set[bytes],
        *,
        first: bool,
    ) -> None:
        """In messages of bounded size. Points that nobody can find yet have other keys."""
        come, gone = (sorted(k for k in keys if len(k) == HASH_BYTES) for keys in (added, dropped))
        geometry = engine.geometry
        for at in range(0, max(len(come), len(gone), int(first)), MAX_HASHES):
            message = PrefixEvents(
                first and at == 0,
                self._outbox.fingerprint,
                geometry.block_size,
                geometry.chunk_align,
                b"".join(come[at : at + MAX_HASHES]),
                b"".join(gone[at : at + MAX_HASHES]),
            )
            for router in sorted(routers):
                self._outbox.send(router, message)
