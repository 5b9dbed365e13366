"""Carries out the scheduler's stores and loads, on a thread of its own beside steps and mail."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from deepmesh.config import Config
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.link import Identity, LinkEvent
from deepmesh.wire.messages import (
    Capacity,
    KvStatus,
    LoadBlocks,
    OpDone,
    ServiceStats,
    StoreBlocks,
)
from deepmesh.wire.sockets import Mail, PeerDown, PeerUp
from services.executor.handover_area import HandoverArea
from services.executor.handover_export import ExportOp
from services.executor.handover_server import HandoverServer
from services.executor.kv_copy import BlockCopy, Bytes, CopyGroup
from services.executor.kv_link import StoreLink
from services.executor.kv_load import LoadOp
from services.executor.kv_ops import Op, Order, Road
from services.executor.kv_store import StoreOp

_log = logging.getLogger(__name__)
IDLE_S = 1.0
OP_DEADLINE_S = 30.0  # well below the 60 s for which a kvstore keeps what it has shown
CHUNK_BYTES = 4 << 20  # about a millisecond between two steps
MAX_LOADS, MAX_STORES = 4, 2  # at work at once, each on one chunk: this bounds host memory
MAX_WAITING = 4096


class _Ended(NamedTuple):
    op: Op
    copy: BlockCopy


class _Ordered(NamedTuple):
    order: Order
    generation: int
    deadline_s: float


class Done(NamedTuple):
    """An op that has ended, as the scheduler and a trace are told."""

    message: OpDone
    order: Order
    num_bytes: int
    begin_ns: int


class KvTransfers:
    """All stores and loads of one executor.

    Everything but the copies from and to the device happens on this thread: links to kvstores,
    checksums, the shared file. Each order of the present engine epoch is answered once; one of an
    older epoch never touches a block again, and is not answered.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        submit: Callable[[BlockCopy], None],
        wake: Callable[[], None],
        deadline_s: float = OP_DEADLINE_S,
        chunk_bytes: int = CHUNK_BYTES,
        pulls_from: Sequence[str] = (),
        serves_at: str = "",
    ) -> None:
        """
        Args:
            submit: queues a copy on the device stream.
            wake: says that `poll` has something.
            pulls_from: addresses of executors that have copies of prompts for this one.
            serves_at: address where those of other groups pull them from this one; empty: none do.
        """
        self.counters: Counter[str] = Counter()
        self._submit, self._wake = submit, wake
        self._deadline_s, self._chunk_bytes = deadline_s, chunk_bytes
        self._lock = threading.Lock()  # guards what both threads touch, up to `_closing`
        self._generation = 0  # of the engine epoch
        self._block_bytes = (0, 0, 0)
        self._ordered: deque[_Ordered] = deque()
        self._copied: deque[_Ended] = deque()
        self._copies: set[BlockCopy] = set()  # on the device stream
        self._results: deque[tuple[int, Done]] = deque()  # with their generation
        self._error: BaseException | None = None
        self._closing = False
        me = Identity.new("executor", name, config)
        addresses = [config.kvstore_address(index) for index in range(config.kvstore.count)]
        addresses += pulls_from
        self._name = name
        settings = config.executor
        self._sums_on_stream = settings.device != "cuda"  # a GPU's thread has steps to launch
        device = settings.device if settings.handover == "device" else ""
        self._links = [
            StoreLink(at, me, config.links, ServiceStats, device=device) for at in addresses
        ]
        self._by_key: dict[str, StoreLink] = {}  # links that are up
        self._inbox = Inbox(*(link.dialer for link in self._links))
        self._server = HandoverServer(config, me, serves_at) if serves_at else None
        if self._server is not None:
            self._inbox.add(self._server.listener)
        self._area_generation = 0  # engine epoch of the copies in there
        self._released: list[int] = []  # ops whose copies nobody needs; the lock guards it, too
        self._waiting: tuple[deque[_Ordered], deque[_Ordered]] = (deque(), deque())
        self._active: list[Op] = []
        self._began_ns: dict[int, int] = {}  # of active ops, by identity
        self._memory: list[Bytes] = []  # of chunks, for the next ones
        self._thread = threading.Thread(target=self._work, name="kv-transfer", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the service's thread

    def begin_epoch(self) -> None:
        """Abandon all ops: no copy of theirs begins from now on."""
        with self._lock:
            self._generation += 1
            self._ordered.clear()
            self._results.clear()
            for copy in self._copies:
                copy.cancel()
            self._copies.clear()
        self._inbox.wake()

    def loaded(self, capacity: Capacity) -> None:
        """The device is there; its blocks have these sizes."""
        with self._lock:
            self._block_bytes = capacity.block_bytes

    def order(self, order: Order) -> None:
        """Begin a store or load of the present engine epoch."""
        with self._lock:
            deadline_s = time.monotonic() + self._deadline_s
            self._ordered.append(_Ordered(order, self._generation, deadline_s))
        self._inbox.wake()

    def release(self, op_ids: Sequence[int]) -> None:
        """What these stores copied for other groups is not needed any more."""
        with self._lock:
            self._released += op_ids
        self._inbox.wake()

    def poll(self) -> Done | None:
        """The oldest op that has ended and was not told yet.

        Raises:
            BaseException: a bug ended the thread.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._results.popleft()[1] if self._results else None

    def close(self) -> None:
        """End the thread; ops are abandoned."""
        self.begin_epoch()
        with self._lock:
            self._closing = True
        self._inbox.wake()
        self._thread.join()

    # ------------------------------------------------------------ the stream's thread

    def _on_copied(self, op: Op, copy: BlockCopy) -> None:
        with self._lock:
            self._copies.discard(copy)
            self._copied.append(_Ended(op, copy))
        self._inbox.wake()

    # ------------------------------------------------------------ its own thread

    def _work(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # the one of this loop: the service's loop ends with it
            with self._lock:
                self._error = error
            self._wake()
        finally:
            for link in self._links:
                link.close()
            self._inbox.close()
            if self._server is not None:
                self._server.close()

    def _turn(self) -> None:
        for event in self._inbox.wait(self._patience()):
            self._on_event(event)
        with self._lock:
            generation = self._generation
            ordered, self._ordered = self._ordered, deque()
            copied, self._copied = self._copied, deque()
            released, self._released = self._released, []
        for op in [op for op in self._active if op.generation != generation]:
            op.abandon()
        if self._server is not None:
            self._keep_area(self._server.area, generation, released)
        for waiting in self._waiting:
            while waiting and waiting[0].generation != generation:
                waiting.popleft()
        for ended in copied:
            ended.op.on_copied(ended.copy)
        for order in ordered:
            self._enqueue(order)
        self._expire(time.monotonic())
        self._settle()

    def _patience(self) -> float:
        deadlines = [op.deadline_s for op in self._active if not op.failing]
        deadlines += [waiting[0].deadline_s for waiting in self._waiting if waiting]
        left = min(deadlines, default=float("inf")) - time.monotonic()
        return max(0.001, min(IDLE_S, left))

    def _keep_area(self, area: HandoverArea, generation: int, released: Sequence[int]) -> None:
        """Copies end with their engine epoch, or as soon as nobody needs them."""
        if generation != self._area_generation:
            self._area_generation = generation
            area.clear()
        for op_id in released:
            area.release(op_id)

    def _on_event(self, event: LinkEvent) -> None:
        if self._server is not None and self._server.on_event(event):
            return
        match event:
            case PeerUp(peer):
                for link in (link for link in self._links if link.dialer.peer is peer):
                    self._by_key[peer.key] = link
                    _log.info("connected to %s", peer.name)
            case PeerDown(peer, reason):
                if (link := self._by_key.pop(peer.key, None)) is not None:
                    self._on_down(link, f"{peer.name}: {reason}")
            case Mail(peer):
                if (link := self._by_key.get(peer.key)) is not None:
                    link.on_mail(event)

    def _on_down(self, link: StoreLink, reason: str) -> None:
        lost = [op for op in self._active if op.goes_over(link)]
        _log.warning("lost %s; %d transfers fail", reason, len(lost))
        link.on_down()
        for op in lost:
            op.fail(KvStatus.ERROR)

    def _enqueue(self, ordered: _Ordered) -> None:
        waiting = self._waiting[isinstance(ordered.order, LoadBlocks)]
        if len(waiting) < MAX_WAITING:
            waiting.append(ordered)
        else:
            self._refuse(ordered, KvStatus.FULL)

    def _expire(self, now_s: float) -> None:
        for op in [op for op in self._active if op.deadline_s <= now_s and not op.failing]:
            _log.warning("op %d is over its deadline", op.order.op_id)
            self.counters["overdue"] += 1
            op.fail(KvStatus.ERROR)
        for waiting in self._waiting:
            while waiting and waiting[0].deadline_s <= now_s:
                self.counters["overdue"] += 1
                self._refuse(waiting.popleft(), KvStatus.ERROR)

    def _settle(self) -> None:
        """Tell of what has ended, and begin what waits; both until there is no more of it."""
        while True:
            ended = [op for op in self._active if op.ended]
            self._active = [op for op in self._active if not op.ended]
            for op in ended:
                self._tell(op)
            if not self._begin_next():
                return

    def _begin_next(self) -> bool:
        """Begin one op; loads have their own share, so that no store keeps a request waiting."""
        stores, loads = self._waiting
        for waiting, limit in ((loads, MAX_LOADS), (stores, MAX_STORES)):
            if waiting and sum(op.is_load is (waiting is loads) for op in self._active) < limit:
                self._begin(waiting.popleft())
                return True
        return False

    def _begin(self, ordered: _Ordered) -> None:
        order = ordered.order
        is_export = isinstance(order, StoreBlocks) and order.store == self._name
        area = self._server.area if self._server is not None and is_export else None
        link = self._link_of(order)
        if (link is None and area is None) or not any(self._block_bytes):
            self.counters["no_store"] += 1
            self._refuse(ordered, KvStatus.ERROR)
            return
        road = Road(
            self._block_bytes,
            self._chunk_bytes,
            self._sums_on_stream,
            self._start_copy,
            self._take,
            self._memory.append,
        )
        of, until = ordered.generation, ordered.deadline_s
        if area is not None:
            op = ExportOp(order, area, road, generation=of, deadline_s=until)
        else:
            make = LoadOp if isinstance(order, LoadBlocks) else StoreOp
            op = make(order, link, road, generation=of, deadline_s=until)
        self._active.append(op)
        self._began_ns[id(op)] = time.time_ns()
        op.begin()

    def _link_of(self, order: Order) -> StoreLink | None:
        names = [order.store] if order.store else [link.name for link in self._links[:1]]
        return next((link for link in self._links if link.is_up and link.name in names), None)

    def _tell(self, op: Op) -> None:
        kind = "load" if op.is_load else "store"
        self.counters[f"{kind}_ops"] += 1
        self.counters[f"{kind}_bytes"] += op.num_bytes
        done = Done(op.result, op.order, op.num_bytes, self._began_ns.pop(id(op)))
        self._give(op.generation, done)

    def _refuse(self, ordered: _Ordered, status: KvStatus) -> None:
        order = ordered.order
        message = OpDone(order.op_id, order.engine_epoch, status, bytes(len(order.moves)))
        self._give(ordered.generation, Done(message, order, 0, time.time_ns()))

    def _give(self, generation: int, done: Done) -> None:
        with self._lock:
            if generation != self._generation:
                return
            self._results.append((generation, done))
        self._wake()

    # ------------------------------------------------------------ what ops ask for

    def _start_copy(self, op: Op, groups: Sequence[CopyGroup]) -> BlockCopy:
        copy = BlockCopy(
            groups,
            to_device=op.is_load,
            engine_epoch=op.order.engine_epoch,
            after_step=op.order.after_step,
            on_end=lambda ended: self._on_copied(op, ended),
        )
        with self._lock:
            if op.generation != self._generation:  # it will be abandoned
                copy.cancel()
                return copy
            self._copies.add(copy)
            self._submit(copy)
        return copy

    def _take(self, num_bytes: int) -> Bytes:
        """Host memory of a chunk; its pages are there already if it was used before."""
        self._memory.sort(key=len)
        for index, memory in enumerate(self._memory):
            if len(memory) >= num_bytes:
                return self._memory.pop(index)
        if self._memory:
            self._memory.pop(0)  # too small, as the largest was: a larger one takes its place
        return np.empty(max(num_bytes, self._chunk_bytes), np.uint8)
