"""Prompts that this group computes for others: computed, copied out of the pools, kept a while."""

import hashlib
from dataclasses import dataclass

from deepmesh.prefix_hash import extend_chain, root_hash
from deepmesh.wire.messages import (
    FinishReason,
    Generate,
    HandOff,
    HandOffRefused,
    HandoverStats,
    KvKind,
    KvMove,
    KvStatus,
    Pool,
    PrefillFor,
    ReleaseBlocks,
    StoreBlocks,
)
from deepmesh.wire.packed import unpack_ids

from .engine import Engine
from .intake import Intake
from .kv_stores import KvStores
from .op_fences import ExportOp
from .outbox import Outbox
from .prefix_index import Point
from .registry import Registry
from .request import Request

MAX_COPIES = 4  # under way at once, on each rank: they pin blocks
COPY_NS = 10_000_000_000  # an op that takes longer counts as stuck

Key = tuple[str, int]  # peer, number


@dataclass(slots=True, eq=False)
class Offer:
    """One prefix for another group: first computed, then copied, then offered."""

    peer: str
    order: PrefillFor
    chain: list[bytes]
    request: Request  # ours, which computes it
    ttl_ns: int
    expires_ns: int
    engine: Engine  # whose blocks are computed or were copied
    op: ExportOp | None = None  # once it is computed
    is_offered: bool = False

    @property
    def num_tokens(self) -> int:
        """Of the prefix."""
        return len(self.order.ids) // 4 - 1

    @property
    def cached_tokens(self) -> int:
        """Of the prefix, those that were here when it was asked for."""
        if not self.request.admitted_ns:
            return self.num_tokens
        return min(max(0, self.request.cached_tokens), self.num_tokens)


class HandoverOffers:
    """The prefill side of hand-overs. Outlives engines; what they computed does not."""

    def __init__(
        self, intake: Intake, registry: Registry, stores: KvStores, outbox: Outbox
    ) -> None:
        self._intake = intake
        self._registry = registry
        self._stores = stores
        self._outbox = outbox
        self._offers: dict[Key, Offer] = {}
        self._served = self._refused = self._expired = 0

    @property
    def num_open(self) -> int:
        """Prefixes that are computed for others, or kept for them."""
        return len(self._offers)

    def copying(self, engine: Engine) -> list[ExportOp]:
        """Copies of this engine's blocks that are under way."""
        ops = [offer.op for offer in self._offers.values() if offer.engine is engine]
        return [op for op in ops if op is not None and op.answer is None]

    # ------------------------------------------------------------ what the other side says

    def prefill_for(self, peer: str, order: PrefillFor, engine: Engine | None, now: int) -> None:
        """Begin to compute a prefix, or find that it is here."""
        if (peer, order.number) in self._offers:
            return
        if len(order.ids) % 4:
            self._refuse(peer, order.number, "the ids are no whole int32s")
            return
        geometry, ids = self._intake.geometry, unpack_ids(order.ids)
        position = len(ids) - 1
        if engine is None or geometry is None:
            self._refuse(peer, order.number, "the engine is not there")
            return
        if position < geometry.chunk_align or position % geometry.chunk_align:
            self._refuse(peer, order.number, f"{position} tokens are not whole chunks")
            return
        chain: list[bytes] = []
        root = root_hash(order.salt, self._intake.fingerprint)
        extend_chain(chain, root, ids, geometry.block_size, position)
        request = self._intake.generate(_request(peer, order), now)
        if request is None:
            self._refuse(peer, order.number, "the request does not fit, or too many wait")
            return
        ttl_ns = int(order.ttl_s * 1e9)
        self._offers[peer, order.number] = Offer(
            peer, order, chain, request, ttl_ns, now + ttl_ns, engine
        )

    def renew(self, peer: str, numbers: list[int], now: int) -> None:
        """They are still wanted."""
        for number in numbers:
            offer = self._offers.get((peer, number))
            if offer is not None:
                offer.expires_ns = now + offer.ttl_ns

    def done(self, peer: str, number: int, now: int, *, loaded: bool) -> None:
        """It was pulled, or is not wanted any more."""
        offer = self._offers.get((peer, number))
        if offer is not None:
            self._served += loaded
            self._drop(offer, now)

    def peer_down(self, peer: str, now: int) -> None:
        """Its hand-overs are over: it will ask for none of them again."""
        for offer in [offer for offer in self._offers.values() if offer.peer == peer]:
            self._drop(offer, now)

    # ------------------------------------------------------------ what happens here

    def tick(self, engine: Engine | None, now: int) -> None:
        """Copy what is computed, offer what is copied, drop what nobody renews."""
        for offer in list(self._offers.values()):
            if offer.expires_ns <= now:
                self._expired += 1
                self._withdraw(offer, now, "nobody has renewed it")
            elif engine is None or offer.engine is not engine:
                if offer.op is not None:
                    self._withdraw(offer, now, "the engine is gone, and what it had")
                elif engine is not None:
                    offer.engine = engine  # ours is computed again
            else:
                self._advance(offer, engine, now)

    def stats(self) -> HandoverStats:
        """Counters of this side."""
        return HandoverStats(
            served=self._served, refused=self._refused, expired=self._expired, held=self.num_open
        )

    # ------------------------------------------------------------ parts

    def _advance(self, offer: Offer, engine: Engine, now: int) -> None:
        if offer.op is None:
            self._copy_if_computed(offer, engine, now)
        elif offer.op.is_overdue:
            self._withdraw(offer, now, "it was not copied in time")
        elif offer.op.answer is not None and not offer.is_offered:
            answer = offer.op.answer
            if answer.status is KvStatus.OK and answer.done.count(1) == len(offer.op.moves):
                self._offer(offer, engine)
            else:
                self._withdraw(offer, now, f"it was not copied: {answer.status.name}")

    def _copy_if_computed(self, offer: Offer, engine: Engine, now: int) -> None:
        key, is_live = offer.chain[-1], self._is_live(offer)
        found = False
        for rank, memory in enumerate(engine.memories):
            if rank not in engine.group.loaded or key not in memory.index.points:
                continue
            if memory.index.lookup(offer.chain, offer.num_tokens).position != offer.num_tokens:
                continue  # blocks below it were evicted
            found = True
            if len(engine.residency.ops.of_rank(rank, ExportOp)) < MAX_COPIES:
                self._copy(offer, engine, rank, memory.index.points[key], now)
                self._end_request(offer, now)
                return
        if not found and not is_live:
            self._withdraw(offer, now, "it was not computed")

    def _copy(self, offer: Offer, engine: Engine, rank: int, point: Point, now: int) -> None:
        index, executor = engine.memories[rank].index, engine.group.peers[rank]
        moves = [
            KvMove(key, KvKind.BLOCK, [(Pool.GLOBAL, index.block_of[key])]) for key in offer.chain
        ]
        windows = [(Pool.WINDOW, block) for block in point.window_blocks]
        moves.append(KvMove(point.key, KvKind.POINT, [*windows, (Pool.STATE, point.state_block)]))
        op = ExportOp(self._stores.next_op_id(), rank, executor, moves, now, now + COPY_NS)
        engine.residency.ops.begin(op)
        offer.op = op
        order = StoreBlocks(
            op_id=op.op_id,
            engine_epoch=engine.group.engine_epoch,
            after_step=engine.group.applied[rank],  # published is what applied steps computed
            moves=moves,
            traceparent=offer.order.traceparent,
            store=executor,
        )
        self._outbox.send(executor, order)

    def _offer(self, offer: Offer, engine: Engine) -> None:
        op, order = offer.op, offer.order
        assert op is not None
        offer.is_offered = True
        message = HandOff(
            number=order.number,
            rid=order.rid,
            attempt=order.attempt,
            source=op.store,
            engine_epoch=engine.group.engine_epoch,
            num_tokens=offer.num_tokens,
            key=offer.chain[-1],
            num_items=len(op.moves),
            cached_tokens=offer.cached_tokens,
        )
        self._outbox.send(offer.peer, message)

    def _withdraw(self, offer: Offer, now: int, detail: str) -> None:
        self._refuse(offer.peer, offer.order.number, detail)
        self._drop(offer, now)

    def _refuse(self, peer: str, number: int, detail: str) -> None:
        self._refused += 1
        self._outbox.send(peer, HandOffRefused(number, detail))

    def _drop(self, offer: Offer, now: int) -> None:
        """Nobody wants it; its copy goes once it is complete."""
        del self._offers[offer.peer, offer.order.number]
        self._end_request(offer, now)
        op = offer.op
        if op is not None and op.answer is not None:
            epoch = op.answer.engine_epoch
            self._outbox.send(op.store, ReleaseBlocks(epoch, [op.op_id]))
        elif op is not None:
            op.is_unwanted = True

    def _is_live(self, offer: Offer) -> bool:
        return self._registry.live.get(offer.request.generate.rid) is offer.request

    def _end_request(self, offer: Offer, now: int) -> None:
        """Ours has done its work, or nobody wants it; there is no client to tell."""
        if self._is_live(offer):
            self._registry.finish(offer.request, FinishReason.STOP, now, keep=0)
        self._registry.ended.pop(offer.request.generate.rid, None)


def _request(peer: str, order: PrefillFor) -> Generate:
    """One that nobody reads: it computes the prefix, and its one more token is thrown away."""
    name = f"{peer} {order.number}".encode()
    return Generate(
        rid=hashlib.blake2b(name, digest_size=16, person=b"hand-over").digest(),
        attempt=1,
        reply_to="",
        prompt_ids=order.ids,
        prompt_len=order.prompt_len or len(order.ids) // 4,
        max_tokens=1 + len(order.ids) // 4 - (order.prompt_len or len(order.ids) // 4),
        salt=order.salt,
        priority=order.priority,
        tenant=order.tenant,
        traceparent=order.traceparent,
    )
