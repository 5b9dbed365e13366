"""The external writer: not ordered with any device stream, it fills freed blocks at once."""

from collections.abc import Sequence

import numpy as np

from deepmesh.wire.messages import Pool

from ..core.scheduler import Scheduler
from .device import Device

_POOLS = tuple(Pool)


class ExternalWriter:
    """Watches the free lists. Stream order hides a block that is freed too early; this does not:
    whoever still reads such a block finds poison."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.fenced_hits = 0  # of them, into blocks whose fence had just passed
        self._known: list[list[list[int]]] = []  # free lists by rank and pool
        self._passed: list[int] = []  # watermarks by rank, when the lists were read
        self._engine: object = None

    def observe(self, core: Scheduler, devices: Sequence[Device]) -> None:
        """Poison every block that became free since the last call."""
        engine = core.engine
        if engine is not self._engine:
            self._engine = engine
            memories = engine.memories if engine else []
            self._known = [[[] for _ in Pool] for _ in memories]
            self._passed = [0] * len(memories)
        if engine is None:
            return
        for rank, memory in enumerate(engine.memories):
            for pool in _POOLS:
                free, known = memory.pools[pool].free_blocks(), self._known[rank][pool]
                # Blocks are taken from the end and come back there.
                if len(free) != len(known) or (free and free[-1] != known[-1]):
                    new = sorted(set(free).difference(known))
                    self._known[rank][pool] = list(free)
                    self._fill(devices[rank], pool, new, memory.pools[pool].fence, rank)
            self._passed[rank] = memory.gpu_done

    def _fill(
        self, device: Device, pool: Pool, blocks: list[int], fence: "np.ndarray", rank: int
    ) -> None:
        if blocks:
            device.kv.poison(pool, blocks)
            self.num_writes += len(blocks)
            self.fenced_hits += int(np.count_nonzero(fence[blocks] > self._passed[rank]))
