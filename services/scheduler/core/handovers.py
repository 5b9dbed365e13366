"""Both sides of hand-overs of one scheduler: prompts that others compute, and those for others."""

from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    HandOff,
    HandOffDone,
    HandOffRefused,
    HandOffRenew,
    HandoverStats,
    PrefillFor,
)

from .engine import Engine
from .events import DecoderDown, PrefillerDown, PrefillerUp
from .handover_asks import HandoverAsks
from .handover_offers import HandoverOffers
from .intake import Intake
from .kv_stores import KvStores
from .outbox import Outbox
from .registry import Registry

HandoverEvent = PrefillerUp | PrefillerDown | DecoderDown
HandoverMail = PrefillFor | HandOff | HandOffRefused | HandOffRenew | HandOffDone


class Handovers:
    """What the scheduler needs to know of hand-overs."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        registry: Registry,
        intake: Intake,
        stores: KvStores,
        outbox: Outbox,
        first_number: int,
    ) -> None:
        self.asks = HandoverAsks(
            registry,
            outbox,
            first_number=first_number,
            wait_s=config.handover_wait_s,
            ttl_s=config.handover_ttl_s,
        )
        self.offers = HandoverOffers(intake, registry, stores, outbox)

    def link(self, event: HandoverEvent, now: int) -> None:
        """A link to another scheduler came or went."""
        match event:
            case PrefillerUp(peer):
                self.asks.up(peer)
            case PrefillerDown(peer):
                self.asks.down(peer)
            case DecoderDown(peer):
                self.offers.peer_down(peer, now)

    def mail(self, peer: str, message: HandoverMail, engine: Engine | None, now: int) -> None:
        """Something that another scheduler says."""
        match message:
            case PrefillFor():
                self.offers.prefill_for(peer, message, engine, now)
            case HandOff():
                self.asks.offered(peer, message, now)
            case HandOffRefused(number):
                self.asks.refused(peer, number)
            case HandOffRenew(numbers):
                self.offers.renew(peer, numbers, now)
            case HandOffDone(number, loaded):
                self.offers.done(peer, number, now, loaded=loaded)

    def tick(self, engine: Engine | None, now: int) -> None:
        """Before steps are planned: what has ended makes room for others."""
        first = engine.group.capacities[0] if engine is not None else None
        self.asks.tick(now, first.block_bytes if first is not None else None)
        self.offers.tick(engine, now)

    def stats(self) -> HandoverStats:
        """Counters of both sides."""
        ours, theirs = self.asks.stats(), self.offers.stats()
        return replace(
            ours,
            served=theirs.served,
            refused=theirs.refused,
            expired=theirs.expired,
            held=theirs.held,
        )
