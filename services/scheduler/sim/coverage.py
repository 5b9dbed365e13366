"""What the runs have reached, counted by depth and number of ranks."""

from collections import Counter

from ..core.request import Phase
from ..core.scheduler import Scheduler

STATES = (
    "unknown",  # before its Generate, or long forgotten
    "waiting",
    "waiting for a prefix",
    "waiting for a kvstore",
    "loading",
    "prefill",
    "prefill in flight",
    "decode",
    "decode in flight",
    "preempt pending",
    "preempted",
    "without an engine",
    "parked",
    "orphaned",
    "ended",
)


class Coverage:
    """Counters of one world, to be summed with those of others."""

    def __init__(self, *, depth: int, ranks: int) -> None:
        self.depth, self.ranks = depth, ranks
        self.counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Something has happened."""
        self.counts[name] += count


def state_of(core: Scheduler, rid: bytes) -> str:
    """Which of STATES a request is in, as the core sees it."""
    request = core.registry.live.get(rid)
    if request is None:
        return "ended" if rid in core.registry.ended else "unknown"
    if request.orphaned_ns:
        return "orphaned"
    engine = core.engine
    if engine is None:
        return "without an engine"
    if request.slot < 0:
        if request.is_parked:
            return "parked"
        if request.preemptions:
            return "preempted"
        if engine.transfers.loads.is_asking(request):
            return "waiting for a kvstore"
        return "waiting for a prefix" if request.awaited else "waiting"
    table, slot = engine.residency.table, request.slot
    if table.leaving[slot]:
        return "preempt pending"
    if table.phase[slot] == Phase.LOADING:
        return "loading"
    name = "prefill" if table.phase[slot] == Phase.PREFILL else "decode"
    return f"{name} in flight" if table.inflight_rows[slot] else name
