"""Invariants of hand-overs: nobody waits for nothing, nothing is copied without a fence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .audit_memory import require

if TYPE_CHECKING:
    from .scheduler import Scheduler


def audit_handovers(core: Scheduler) -> None:
    """I24 and I25 between groups.

    Raises:
        AuditError: a request waits for a prompt that nobody was asked for, or an offer's copy
            reads blocks that are not pinned for it.
    """
    asks, offers = core.handovers.asks, core.handovers.offers
    for request in core.registry.live.values():
        found = request.found
        if found is not None and found.handover and found.is_open:
            require(asks.awaits(found), "I25 a request waits for a prompt that nobody owes")
    engine = core.engine
    for op in offers.copying(engine) if engine is not None else []:
        held = engine is not None and engine.residency.ops.get(op.op_id) is op
        require(held, "I24 a copy for another group reads blocks that are not pinned")
