"""Loads: a prefix that a kvstore has and the device has not is fetched into leased blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepmesh.wire.messages import (
    KvKind,
    KvMove,
    KvStatus,
    KvTier,
    LoadBlocks,
    OpDone,
    Pool,
)

from .cache_counts import DEVICE
from .group import Group
from .handover_asks import HandoverAsks
from .kv_stores import Key, KvStores
from .op_fences import LoadOp
from .outbox import Outbox
from .prefix_index import Hit, Point
from .request import Found, Phase, Request
from .residency import Residency
from .waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load would bring: C, and the global blocks that are on the device already."""

    position: int
    local: int
    shared: list[int]


def moves_into(keys: Sequence[bytes], blocks: Sequence[int], point: Point) -> list[KvMove]:
    """What fills leased blocks, the first one by the first key, and the point behind them."""
    moves = [
        KvMove(key, KvKind.BLOCK, [(Pool.GLOBAL, block)])
        for key, block in zip(keys, blocks, strict=True)
    ]
    windows = [(Pool.WINDOW, block) for block in point.window_blocks]
    return [*moves, KvMove(point.key, KvKind.POINT, [*windows, (Pool.STATE, point.state_block)])]


SLOWER = 4  # a load takes nothing from others, so it may take so many times as long as computing


class LoadCosts:
    """Whether loading beats computing: what loads from each tier took so far, against the profiled
    prefill."""

    def __init__(self, prefill_token_ns: int) -> None:
        self._prefill_token_ns = prefill_token_ns  # 0: not known
        self._move_ns: dict[KvTier, float] = {}  # per block or point, of recent loads

    def pays(self, tokens: int, moves: int, tier: KvTier = KvTier.MEMORY) -> bool:
        """Whether to load `moves` blocks, the slowest of them from `tier`, instead of computing
        `tokens`.

        What is not known counts for the load. Each refusal makes loads look better, so that a
        store that has been slow is tried again.
        """
        most_ns = SLOWER * tokens * self._prefill_token_ns
        each = self._move_ns.get(tier, 0.0)
        if not self._prefill_token_ns or moves * each <= most_ns:
            return True
        self._move_ns[tier] = 0.9 * each
        return False

    def observe(self, took_ns: int, moves: int, tier: KvTier = KvTier.MEMORY) -> None:
        """A load has brought everything."""
        each = took_ns / max(1, moves)
        self._move_ns[tier] = 0.75 * self._move_ns.get(tier, each) + 0.25 * each


class StoreLoads:
    """Plans and ends the loads of one engine epoch."""

    def __init__(
        self,
        residency: Residency,
        group: Group,
        stores: KvStores,
        waiting: WaitingQueue,
        outbox: Outbox,
        *,
        asks: HandoverAsks,
        load_s: float,
        prefill_token_ns: int,
    ) -> None:
        self.cached_tokens = 0
        self._asks = asks
        self._residency = residency
        self._table = residency.table
        self._geometry = residency.geometry
        self._group = group
        self._stores = stores
        self._waiting = waiting
        self._outbox = outbox
        self._load_ns = int(load_s * 1e9)
        self._costs = LoadCosts(prefill_token_ns)

    # ------------------------------------------------------------ before admission

    def may_ask(self, request: Request, limit: int) -> bool:
        """Whether a kvstore could say something new, or another group is to compute the prompt:
        once in an epoch, if a chunk may be won."""
        if self._asks.may_ask(request):
            return limit >= self._geometry.chunk_align
        found = request.found
        is_asked = found is not None and found.epoch == request.epoch
        return self._stores.any_up and not is_asked and limit >= self._geometry.chunk_align

    def is_asking(self, request: Request) -> bool:
        """Whether an answer is to come."""
        return request.found is not None and request.found.is_open

    def ask(self, request: Request, local: int, limit: int, now: int) -> bool:
        """Ask for more than `local`, the longest prefix that a rank can resume, up to `limit`;
        whether an answer is to come. The request is passed over until then."""
        if self._asks.may_ask(request):
            if self._asks.ask(request, local, limit, self._geometry, now):
                return True
            if not self._stores.any_up:
                return False
        align, size = self._geometry.chunk_align, self._geometry.block_size
        if limit // align * align - local < align:
            return False
        return self._stores.ask(request, request.chain[: limit // size], now)

    def plan(self, request: Request, rank: int, hit: Hit, limit: int) -> LoadPlan | None:
        """A load that is worth it on this rank: at least one grid chunk deeper than the local
        hit, and not much slower than computing that."""
        found, size = request.found, self._geometry.block_size
        if found is None or found.epoch != request.epoch or not found.point_blocks:
            return None
        position = found.point_blocks * size
        is_sound = position <= limit and position % self._geometry.chunk_align == 0
        if not is_sound or rank not in self._group.loaded:
            return None
        gain = position - hit.position
        if gain < self._geometry.chunk_align:
            return None
        if found.handover:
            if request.chain[position // size - 1] != found.key:
                return None  # of another model than is loaded now
        elif self._stores.name_for(request.chain) != found.store:
            return None  # its link is down
        keys = request.chain[: min(position, hit.matched) // size]
        block_of = self._residency.memories[rank].index.block_of
        shared = [block_of[key] for key in keys]
        moves = 1 + position // size - len(shared)
        if not found.handover and not self._costs.pays(gain, moves, found.tier):
            return None
        return LoadPlan(position, hit.position, shared)

    def begin(self, request: Request, rank: int, plan: LoadPlan, now: int) -> bool:
        """Lease everything and order the load; False: no room now."""
        found = request.found
        assert found is not None
        point = self._residency.enter_loading(request, rank, plan.shared, plan.position)
        if point is None:
            return False
        index, size = request.slot, self._geometry.block_size
        blocks = self._table.global_blocks[index]
        fresh = slice(len(plan.shared), plan.position // size)
        moves = moves_into(request.chain[fresh], blocks[fresh].tolist(), point)
        load = LoadOp(
            self._stores.next_op_id(),
            rank,
            found.store,
            moves,
            now,
            now + self._load_ns,
            request=request,
            index=index,
            gen=int(self._table.gen[index]),
            position=plan.position,
            local=plan.local,
            found=found,
        )
        found.num_moves = (len(moves) - 1, len(point.window_blocks))
        self._residency.ops.begin(load)
        order = LoadBlocks(
            op_id=load.op_id,
            engine_epoch=self._group.engine_epoch,
            after_step=0,  # the blocks were free: no step can touch them any more
            moves=moves,
            traceparent=request.generate.traceparent,
            store=found.store,
        )
        self._outbox.send(self._group.peers[rank], order)
        self._stores.counters["loads"] += not found.handover
        return True

    # ------------------------------------------------------------ afterwards

    def done(self, load: LoadOp, message: OpDone, now: int) -> None:
        """A load has ended: the request goes on behind it, or computes what is missing."""
        is_complete = message.status == KvStatus.OK and _all_done(load, message)
        if load.found.handover:
            load.found.is_loaded = is_complete and self._is_waiting(load)
        elif is_complete:
            self._costs.observe(now - load.began_ns, len(load.moves), load.found.tier)
            self._stores.learn(load.store, _keys(load))
        else:
            self._stores.forget(load.store, _keys(load))
            self._stores.counters["loads_failed"] += 1
        if not self._is_waiting(load):
            return  # it gave up, or its client did
        if is_complete:
            self._complete(load, now)
        else:
            self._fall_back(load)

    def give_up(self, load: LoadOp) -> None:
        """A load is over its deadline. Its blocks stay pinned; the request computes with others."""
        if self._is_waiting(load):
            load.found.is_loaded = False
            self._stores.counters["loads_late"] += 1
            self._fall_back(load)

    # ------------------------------------------------------------ parts

    def _complete(self, load: LoadOp, now: int) -> None:
        request, size = load.request, self._geometry.block_size
        point_move = load.moves[-1].blocks
        point = Point(
            key=load.moves[-1].hash,
            position=load.position,
            window_start=max(0, load.position - self._geometry.window) // size,
            window_blocks=tuple(block for pool, block in point_move if pool == Pool.WINDOW),
            state_block=point_move[-1][1],
        )
        self._residency.loaded(request, point, now)
        found, cached = load.found, load.position
        if found.handover:  # somebody computed it for this request
            cached = max(load.local, found.cached_tokens)
        else:
            self._stores.counters["hit_tokens"] += int(load.position - load.local)
            self._count_hit(request, load)
        if request.cached_tokens < 0:
            request.cached_tokens = int(min(cached, request.prompt_len))
            self.cached_tokens += request.cached_tokens

    def _count_hit(self, request: Request, load: LoadOp) -> None:
        if request.cached_tokens < 0:
            hits, local = self._residency.cache.hits, min(load.local, request.prompt_len)
            hits[DEVICE] += int(local)
            hits[load.found.tier] += int(min(load.position, request.prompt_len) - local)

    def _fall_back(self, load: LoadOp) -> None:
        """Without the point nothing of the load can be resumed: a new epoch, other blocks, and
        what is on the device already. It keeps its age, so it stands in front again."""
        request = load.request
        self._residency.leave(request)
        is_over = Found(load.store, request.epoch, is_open=False)
        request.found = None if load.found.handover else is_over  # a kvstore may still have it
        self._waiting.add(request)

    def _is_waiting(self, load: LoadOp) -> bool:
        alive = self._table.gen[load.index] == load.gen
        return bool(alive) and int(self._table.phase[load.index]) == Phase.LOADING


def _keys(load: LoadOp) -> list[Key]:
    return [(move.hash, move.kind) for move in load.moves]


def _all_done(load: LoadOp, message: OpDone) -> bool:
    return len(message.done) == len(load.moves) and all(message.done)
