"""The external writer: not ordered with any device stream, it fills freed blocks at once."""

from deepmesh.wire.messages import Pool

from ..core.scheduler import Scheduler
from .device import Device


class ExternalWriter:
    """Watches the free lists. Stream order hides a block that is freed too early; this does not:
    whoever still reads such a block finds poison."""

    def __init__(self) -> None:
        self.num_writes = 0
        self._known: list[list[set[int]]] = []
        self._engine: object = None

    def observe(self, core: Scheduler, devices: list[Device]) -> None:
        """Poison every block that became free since the last call."""
        engine = core.engine
        if engine is not self._engine:
            self._engine = engine
            self._known = [[set() for _ in Pool] for _ in engine.memories] if engine else []
        if engine is None:
            return
        for rank, memory in enumerate(engine.memories):
            for pool in Pool:
                free = set(memory.pools[pool].free_blocks())
                new = sorted(free - self._known[rank][pool])
                self._known[rank][pool] = free
                if new:
                    devices[rank].kv.poison(pool, new, "the external writer")
                    self.num_writes += len(new)
