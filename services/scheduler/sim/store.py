"""A simulated kvstore, and the executor's side of stores and loads, in virtual time.

Neither is ordered with the device stream: a load owns its blocks from its order to its end, so it
fills them with poison at once; a store reads when it executes. What is stored and loaded is
compared with what the tokens behind each hash must have left there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from deepmesh.prefix_hash import extend_chain, root_hash
from deepmesh.wire.messages import (
    Capacity,
    Hits,
    KvKind,
    KvMove,
    KvStatus,
    KvTier,
    LoadBlocks,
    Lookup,
    OpDone,
    Pool,
    StoreBlocks,
)

from ..core.events import Incoming
from .clock import MS, SECOND, US, Clock
from .device import Device
from .link import Link
from .oracle import chain_of
from .requests import SimRequest
from .shadow import Cells, ShadowError, ShadowKV

HASH_BYTES = 16
RETRY_NS = 200 * US  # an op looks so often whether its step is complete
Key = tuple[bytes, KvKind]
Order = StoreBlocks | LoadBlocks


class Truth:
    """What the blocks and points behind each hash must hold: a function of the tokens alone."""

    def __init__(self, capacity: Capacity, requests: dict[bytes, SimRequest]) -> None:
        self._capacity = capacity
        self._requests = requests
        self._seen = 0
        self._prefixes: dict[bytes, Cells] = {}  # hash -> cells of all positions of its prefix

    def parts_of(self, move: KvMove) -> list[Cells]:
        """The cells of each part of a block or point.

        Raises:
            ShadowError: no request has these tokens.
        """
        if self._seen < len(self._requests):
            self._read_requests()
        cells, size = self._prefixes.get(move.hash), self._capacity.block_size
        if cells is None:
            raise ShadowError("a hash is stored or loaded that belongs to no request's tokens")
        if move.kind == KvKind.BLOCK:
            return [cells[-size:]]
        start = max(0, len(cells) - self._capacity.window) // size * size
        return [*cells[start:].reshape(-1, size), cells[-1:]]

    def _read_requests(self) -> None:
        capacity, size = self._capacity, self._capacity.block_size
        for request in list(self._requests.values())[self._seen :]:
            ids = [*request.prompt, *request.expected(capacity.vocab_size)[0]]
            chain: list[bytes] = []
            root = root_hash(request.salt, capacity.fingerprint)
            extend_chain(chain, root, np.array(ids, np.int32), size, len(ids))
            cells = np.array(chain_of(ids), np.int64)
            if not capacity.one_kernel_class:
                cells &= ~1  # where classes differ, only what prefill computed is published
            for index, hash_ in enumerate(chain):
                self._prefixes.setdefault(hash_, cells[: (index + 1) * size])
        self._seen = len(self._requests)


class Contents:
    """What a kvstore keeps."""

    def __init__(self) -> None:
        self.items: dict[Key, list[Cells]] = {}

    def lookup(self, message: Lookup) -> Hits:
        """The longest run of blocks, and the last point in it."""
        chain = message.chain
        keys = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
        there = [(key, KvKind.BLOCK) in self.items for key in keys]
        blocks = there.index(False) if False in there else len(keys)
        points = [at for at in range(blocks) if (keys[at], KvKind.POINT) in self.items]
        point = points[-1] + 1 if points else 0
        return Hits(message.lookup_id, blocks, point, KvTier.MEMORY if point else KvTier.NONE)

    def store(self, order: StoreBlocks, kv: ShadowKV, truth: Truth) -> OpDone:
        """Read the blocks as they are now, and keep them.

        Raises:
            ShadowError: they do not hold what belongs under their hash.
        """
        for move in order.moves:
            parts = [kv.read_block(pool, block) for pool, block in move.blocks]
            expected = truth.parts_of(move)
            if len(parts) != len(expected):
                raise ShadowError(f"a {move.kind.name} is stored in {len(parts)} parts")
            for (pool, block), found, want in zip(move.blocks, parts, expected, strict=True):
                if not np.array_equal(found, want):
                    raise ShadowError(f"op {order.op_id} stores {pool.name} {block} with {found}")
            self.items[move.hash, move.kind] = parts
        done = bytes([1]) * len(order.moves)
        return OpDone(order.op_id, order.engine_epoch, KvStatus.OK, done)

    def load(self, order: LoadBlocks, kv: ShadowKV, lost: Iterable[int] = ()) -> OpDone:
        """Fill the blocks; those of moves that are `lost`, or not there, keep their poison."""
        done = bytearray(len(order.moves))
        for at, move in enumerate(order.moves):
            parts = self.items.get((move.hash, move.kind))
            if parts is None or at in lost:
                continue
            for (pool, block), cells in zip(move.blocks, parts, strict=True):
                kv.fill_block(pool, block, cells)
            done[at] = 1
        status = KvStatus.OK if all(done) else KvStatus.MISS
        return OpDone(order.op_id, order.engine_epoch, status, bytes(done))


class SimArea(Contents):
    """Copies by the op that made them; they end with the engine epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, dict[Key, list[Cells]]] = {}

    @property
    def num_copies(self) -> int:
        """Ops whose copies are kept."""
        return len(self._copies)

    def keep(self, order: StoreBlocks, kv: ShadowKV, truth: Truth, *, is_full: bool) -> OpDone:
        """Copy the blocks as they are now, unless there is no room.

        Raises:
            ShadowError: they do not hold what belongs under their hash.
        """
        if is_full:
            return OpDone(order.op_id, order.engine_epoch, KvStatus.FULL, bytes(len(order.moves)))
        copy = Contents()
        done = copy.store(order, kv, truth)
        self._copies[order.op_id] = copy.items
        self._merge()
        return done

    def release(self, op_ids: list[int]) -> None:
        """Nobody needs these any more."""
        for op_id in op_ids:
            self._copies.pop(op_id, None)
        self._merge()

    def clear(self) -> None:
        """The engine epoch, or the process, is over."""
        self._copies.clear()
        self._merge()

    def _merge(self) -> None:
        self.items = {key: parts for copy in self._copies.values() for key, parts in copy.items()}


def begin(order: Order, kv: ShadowKV) -> None:
    """A load may write its blocks at any time from its order on."""
    if isinstance(order, LoadBlocks):
        for move in order.moves:
            for pool in Pool:
                kv.poison(pool, [block for kind, block in move.blocks if kind == pool])


class SimStore:
    """One kvstore process; it dies with what it has."""

    def __init__(
        self, name: str, *, index: int, link: Link, to_core: Callable[[str, Incoming], None]
    ) -> None:
        self.name = name
        self.index = index
        self.link = link
        self.contents = Contents()
        self.is_hung = False  # takes lookups, answers none
        self._to_core = to_core

    def receive(self, message: Lookup) -> None:
        """A question of the scheduler."""
        if not self.is_hung:
            answer = self.contents.lookup(message)
            self.link.send("back", lambda: self._to_core(self.name, answer))

    def crash(self) -> None:
        """The process dies; the next one is empty."""
        self.contents = Contents()
        self.is_hung = False


@dataclass(slots=True)
class OpFaults:
    """Shares of the ops of an executor that go wrong."""

    never: float = 0.0  # does not end in this engine epoch
    late: float = 0.0  # ends behind every deadline
    twice: float = 0.0  # is answered twice
    lost: float = 0.0  # of a load's blocks: gone, or damaged, when they are fetched
    full: float = 0.0  # of the copies for another group: no room


class SimTransfers:
    """An executor's transfers: beside its steps, ordered with nothing but `after_step`."""

    def __init__(
        self,
        clock: Clock,
        *,
        name: str,
        device: Callable[[], Device],
        stores: dict[str, SimStore],
        truth: Truth,
        send: Callable[[Incoming], None],
        current_epoch: Callable[[], int],
    ) -> None:
        self.faults = OpFaults()
        self.num_ended = 0
        self.name = name
        self.area = SimArea()
        self.areas: dict[str, SimArea] = {}  # of executors of other groups, by name
        self._clock = clock
        self._device = device
        self._stores = stores
        self._truth = truth
        self._send = send
        self._current_epoch = current_epoch
        self._life = 0  # ops of an earlier engine epoch touch nothing any more

    def abandon(self) -> None:
        """Another engine epoch."""
        self._life += 1
        self.area.clear()

    def receive(self, order: Order) -> None:
        """An order of the scheduler, in this engine epoch."""
        draw, life = self._clock.random, self._life
        begin(order, self._device().kv)
        delay = draw.randrange(50 * US, 5 * MS)
        fate = draw.random()
        if fate < self.faults.never:
            return
        if fate < self.faults.never + self.faults.late:
            delay = 12 * SECOND
        self._clock.at(delay, lambda: self._run(order, life))

    def _run(self, order: Order, life: int) -> None:
        if life != self._life or order.engine_epoch != self._current_epoch():
            return  # abandoned, even if the news is still on its way
        device, draw = self._device(), self._clock.random
        if device.gpu_done < order.after_step:
            self._clock.at(RETRY_NS, lambda: self._run(order, life))
            return
        moves, store = range(len(order.moves)), self._stores.get(order.store)
        lost = {at for at in moves if draw.random() < self.faults.lost}
        area = self.areas.get(order.store)
        if isinstance(order, StoreBlocks) and order.store == self.name:
            is_full = draw.random() < self.faults.full
            answer = self.area.keep(order, device.kv, self._truth, is_full=is_full)
        elif isinstance(order, LoadBlocks) and area is not None:
            answer = area.load(order, device.kv, lost)
        elif store is None or not store.link.is_up:
            nothing = bytes(len(order.moves))
            answer = OpDone(order.op_id, order.engine_epoch, KvStatus.ERROR, nothing)
        elif isinstance(order, StoreBlocks):
            answer = store.contents.store(order, device.kv, self._truth)
        else:
            answer = store.contents.load(order, device.kv, lost)
        self.num_ended += 1
        self._send(answer)
        if draw.random() < self.faults.twice:
            self._send(answer)
