"""Prompts that other groups compute for this one: asked for, awaited, loaded or given up."""

from bisect import bisect_left
from dataclasses import dataclass

from deepmesh.wire.messages import (
    HANDOVERS_S,
    HandOff,
    HandOffDone,
    HandOffRenew,
    HandoverStats,
    PrefillFor,
)
from deepmesh.wire.packed import pack_ids

from .events import HandedOver
from .outbox import Outbox
from .policy import Geometry
from .registry import Registry
from .request import Found, Phase, Request

MAX_ASKS = 2  # of one request: the second only after an engine that was lost, or a preemption


@dataclass(slots=True, eq=False)
class Ask:
    """One prefix that another group was asked for, until it is loaded or nobody wants it."""

    number: int
    peer: str  # the scheduler that computes it
    request: Request
    found: Found  # of the request; another one there means that this one is over
    position: int
    num_items: int
    asked_ns: int
    deadline_ns: int  # of the offer
    offered_ns: int = 0


class HandoverAsks:
    """The decode side of hand-overs. Outlives engines.

    What is offered is a place to load from; the load itself, its blocks and its fence are those of
    any load (`store_loads.py`). Whatever goes wrong, the request computes its prompt here.
    """

    def __init__(
        self, registry: Registry, outbox: Outbox, *, first_number: int, wait_s: float, ttl_s: float
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._next_number = first_number
        self._wait_ns, self._ttl_s = int(wait_s * 1e9), ttl_s
        self._up: set[str] = set()
        self._open: dict[int, Ask] = {}
        self._renewed_ns = 0
        self._block_bytes = (0, 0, 0)
        self._asked = self._loaded = self._failed = 0
        self._tokens = self._bytes = self._wait_sum_ns = self._pull_sum_ns = 0
        self._waits, self._pulls = [0] * (len(HANDOVERS_S) + 1), [0] * (len(HANDOVERS_S) + 1)

    def up(self, peer: str) -> None:
        """The link to a scheduler that computes prompts is up."""
        self._up.add(peer)

    def down(self, peer: str) -> None:
        """It is lost. What is being loaded may still arrive; the rest is computed here."""
        self._up.discard(peer)
        for ask in [ask for ask in self._open.values() if ask.peer == peer]:
            if ask.request.slot < 0:
                self._give_up(ask)

    @property
    def num_open(self) -> int:
        """Asked for, or offered and not loaded yet."""
        return len(self._open)

    def awaits(self, found: Found) -> bool:
        """Whether an offer may still come, or be loaded, for a request that found this."""
        ask = self._open.get(found.handover)
        return ask is not None and ask.found is found

    # ------------------------------------------------------------ before admission

    def may_ask(self, request: Request) -> bool:
        """Whether somebody is to compute its prompt, and was not asked in this epoch."""
        found, at = request.found, request.generate.prefill_at
        is_asked = found is not None and found.epoch == request.epoch
        return at in self._up and not is_asked and request.num_asks < MAX_ASKS

    def ask(self, request: Request, local: int, limit: int, geometry: Geometry, now: int) -> bool:
        """Ask for all of a prompt up to the last grid point at or below `limit`, unless all but a
        chunk of it is here; whether an answer is to come."""
        align, size = geometry.chunk_align, geometry.block_size
        position = limit // align * align
        if position - local < align:
            return False
        key = request.chain[position // size - 1]
        number, self._next_number = self._next_number, self._next_number + 1
        found = Found("", request.epoch, handover=number, key=key)
        request.found = found
        request.num_asks += 1
        peer, generate = request.generate.prefill_at, request.generate
        self._open[number] = Ask(
            number,
            peer,
            request,
            found,
            position,
            position // size + 1,
            now,
            now + self._wait_ns,
        )
        self._asked += 1
        order = PrefillFor(
            number=number,
            rid=generate.rid,
            attempt=request.attempt,
            ids=pack_ids(request.ids[: position + 1]),
            ttl_s=self._ttl_s,
            prompt_len=min(position + 1, request.prompt_len),
            salt=generate.salt,
            priority=generate.priority,
            tenant=generate.tenant,
            traceparent=generate.traceparent,
        )
        self._outbox.send(peer, order)
        return True

    # ------------------------------------------------------------ answers

    def offered(self, peer: str, message: HandOff, now: int) -> None:
        """The prefix is there: it can be loaded, if it is what was asked for, and all of it."""
        ask = self._open.get(message.number)
        if ask is None or ask.peer != peer:
            self._outbox.send(peer, HandOffDone(message.number, loaded=False))
            return
        if ask.offered_ns:
            return  # a repetition
        found = ask.found
        is_whole = message.num_tokens == ask.position and message.num_items == ask.num_items
        is_right = message.key == found.key and message.rid == ask.request.generate.rid
        if not (is_whole and is_right):
            self._outbox.note("warning", "a wrong prefix was offered", peer=peer)
            self._give_up(ask)
            return
        ask.offered_ns = now
        found.store, found.point_blocks = message.source, ask.num_items - 1
        found.cached_tokens = message.cached_tokens
        found.is_open = False

    def refused(self, peer: str, number: int) -> None:
        """It is not computed there, or not kept any longer."""
        ask = self._open.get(number)
        if ask is not None and ask.peer == peer and ask.request.slot < 0:
            self._give_up(ask)

    def tick(self, now: int, block_bytes: tuple[int, int, int] | None) -> None:
        """See how loads have ended, who has gone, what is late; renew the leases of the rest.

        Args:
            block_bytes: of the present engine; None without one.
        """
        if not self._open:
            return
        self._block_bytes = block_bytes or self._block_bytes
        for ask in list(self._open.values()):
            self._look(ask, now)
        if now - self._renewed_ns >= self._ttl_s * 1e9 / 4:
            self._renewed_ns = now
            for peer in sorted({ask.peer for ask in self._open.values()}):
                numbers = [ask.number for ask in self._open.values() if ask.peer == peer]
                self._outbox.send(peer, HandOffRenew(numbers))

    def stats(self) -> HandoverStats:
        """Counters of this side."""
        return HandoverStats(
            asked=self._asked,
            loaded=self._loaded,
            failed=self._failed,
            tokens=self._tokens,
            bytes=self._bytes,
            wait_ns=self._wait_sum_ns,
            pull_ns=self._pull_sum_ns,
            waits=list(self._waits),
            pulls=list(self._pulls),
        )

    # ------------------------------------------------------------ parts

    def _look(self, ask: Ask, now: int) -> None:
        request, found = ask.request, ask.found
        if found.is_loaded is not None:
            self._end(ask, now)
            return
        if self._registry.live.get(request.generate.rid) is not request:
            self._drop(ask)  # it ended, or its client went
        elif request.found is not found or found.epoch != request.epoch:
            self._give_up(ask, again=True)  # its engine is gone, or it was preempted
        elif request.slot >= 0 and not self._is_loading(request):
            self._drop(ask)  # it found the prefix here meanwhile, or no room for a load
        elif not ask.offered_ns and now >= ask.deadline_ns:
            self._outbox.note("warning", "a prompt does not come in time", peer=ask.peer)
            self._give_up(ask)

    def _end(self, ask: Ask, now: int) -> None:
        """Its load has ended."""
        request, is_loaded = ask.request, bool(ask.found.is_loaded)
        if is_loaded:
            size = self._num_bytes(ask)
            self._loaded += 1
            self._tokens += ask.position
            self._bytes += size
            wait_ns, pull_ns = ask.offered_ns - ask.asked_ns, now - ask.offered_ns
            self._wait_sum_ns += wait_ns
            self._pull_sum_ns += pull_ns
            self._waits[bisect_left(HANDOVERS_S, wait_ns / 1e9)] += 1
            self._pulls[bisect_left(HANDOVERS_S, pull_ns / 1e9)] += 1
            self._report(ask, now, size)
        else:
            self._failed += 1
            request.num_asks = MAX_ASKS
            self._report(ask, now, 0)
        self._drop(ask, loaded=is_loaded)

    def _give_up(self, ask: Ask, *, again: bool = False) -> None:
        """The request computes its prompt here, or has it from a kvstore, unless it may ask
        `again`."""
        self._failed += 1
        if not again:
            ask.request.num_asks = MAX_ASKS
        if ask.request.found is ask.found:
            ask.request.found = None
        self._drop(ask)

    def _drop(self, ask: Ask, *, loaded: bool = False) -> None:
        del self._open[ask.number]
        self._outbox.send(ask.peer, HandOffDone(ask.number, loaded))

    def _report(self, ask: Ask, now: int, num_bytes: int) -> None:
        generate = ask.request.generate
        self._outbox.actions.append(
            HandedOver(
                rid=generate.rid,
                traceparent=generate.traceparent,
                peer=ask.peer,
                num_tokens=ask.position,
                num_bytes=num_bytes,
                asked_ns=ask.asked_ns,
                offered_ns=ask.offered_ns,
                ended_ns=now,
            )
        )

    def _num_bytes(self, ask: Ask) -> int:
        """Of all that was offered, whatever was here before."""
        return ask.found.num_moves[0] * self._block_bytes[0] + (
            ask.found.num_moves[1] * self._block_bytes[1] + self._block_bytes[2]
        )

    def _is_loading(self, request: Request) -> bool:
        residency = self._registry.residency
        return residency is not None and int(residency.table.phase[request.slot]) == Phase.LOADING
