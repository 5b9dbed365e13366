"""Drives the core with a kvstore: the test says when lookups and transfers end, and how."""

from collections import deque
from collections.abc import Iterable

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Hits,
    KvStatus,
    LoadBlocks,
    Lookup,
    OpDone,
    Reset,
    StoreBlocks,
)
from services.scheduler.core.events import KvstoreDown, KvstoreHolds, KvstoreUp, Send
from services.scheduler.core.request import Phase
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.store import Contents, Order, Truth, begin
from tests.core.driver import CONFIG, EXECUTOR, Driver

KVSTORE = "kvstore-0"


class StoreDriver(Driver):
    """Like `Driver`, beside it one kvstore. With `auto`, lookups and stores end at once."""

    def __init__(
        self,
        config: SchedulerConfig = CONFIG,
        *,
        auto: bool = True,
        contents: Contents | None = None,
        max_unacked: int = 2048,
        **capacity: int | bool | str,
    ) -> None:
        self.contents = contents or Contents()
        self.auto = auto
        self.lookups: deque[Lookup] = deque()
        self.ops: list[Order] = []  # in flight on the executor
        self.is_up = False
        super().__init__(config, max_unacked=max_unacked, kvstores=1, **capacity)
        self.truth = Truth(self.capacity, self.requests)
        self.kvstore_up()

    # ------------------------------------------------------------ links

    def kvstore_up(self) -> None:
        """The scheduler's link is up."""
        self.is_up = True
        self.feed(KvstoreUp(KVSTORE, 0))

    def kvstore_holds(self, num_items: int) -> None:
        """A heartbeat of it."""
        self.feed(KvstoreHolds(0, num_items))

    def kvstore_down(self, *, empty: bool = True) -> None:
        """The kvstore is lost, and what it had, too."""
        self.is_up = False
        if empty:
            self.contents = Contents()
        self.lookups.clear()
        self.feed(KvstoreDown(KVSTORE, 0))

    # ------------------------------------------------------------ lookups and transfers

    @property
    def stores(self) -> list[StoreBlocks]:
        """Stores in flight."""
        return [op for op in self.ops if isinstance(op, StoreBlocks)]

    @property
    def loads(self) -> list[LoadBlocks]:
        """Loads in flight."""
        return [op for op in self.ops if isinstance(op, LoadBlocks)]

    def answer(self, lookup: Lookup | None = None) -> Hits:
        """The kvstore answers; without `lookup`, the oldest one."""
        hits = self.contents.lookup(lookup or self.lookups.popleft())
        self.mail(hits, KVSTORE)
        return hits

    def end(self, op: Order, *, lost: Iterable[int] = (), status: KvStatus | None = None) -> OpDone:
        """A transfer executes now, and its end is told; with `status`, only that is told."""
        self.ops.remove(op)
        if status is not None:
            done = OpDone(op.op_id, op.engine_epoch, status, bytes(len(op.moves)))
        elif isinstance(op, StoreBlocks):
            done = self.contents.store(op, self.device.kv, self.truth)
        else:
            done = self.contents.load(op, self.device.kv, set(lost))
        self.mail(done, EXECUTOR)
        return done

    def settle(self) -> None:
        """Everything that is in flight ends well."""
        while self.lookups or self.runnable_ops():
            if self.lookups:
                self.answer()
            for op in self.runnable_ops():
                self.end(op)

    def runnable_ops(self) -> list[Order]:
        """Ops whose step is complete."""
        return [op for op in self.ops if op.after_step <= self.device.gpu_done]

    def step(self) -> None:
        """Plan, run the oldest step to its end; with `auto`, transfers end beside it."""
        super().step()
        if self.auto:
            self.settle()

    def run(self, limit: int = 2000, *, to_end: bool = True) -> None:
        """Until nothing is in flight and nothing can be planned."""
        super().run(limit, to_end=to_end)
        while self.auto and (self.lookups or self.runnable_ops()):
            self.settle()
            super().run(limit, to_end=to_end)

    def lose_executor(self) -> None:
        """The executor dies, and with it its transfers."""
        self.ops.clear()
        super().lose_executor()

    def phase(self, request: SimRequest) -> int:
        """Phase of a request; NONE while it waits."""
        live = self.core.registry.live.get(request.rid)
        if live is None or live.slot < 0 or self.core.engine is None:
            return Phase.NONE
        return int(self.core.engine.residency.table.phase[live.slot])

    def is_loading(self, request: SimRequest) -> bool:
        """It waits in its slot for its blocks."""
        return self.phase(request) == Phase.LOADING

    def pinned(self) -> tuple[int, int, int]:
        """Blocks by class that only transfers keep."""
        return self.core.stats().pinned_blocks

    def _route(self, send: Send) -> None:
        match send.message:
            case Lookup():
                if self.is_up:
                    self.lookups.append(send.message)
            case StoreBlocks() | LoadBlocks():
                begin(send.message, self.device.kv)
                self.ops.append(send.message)
            case Reset():
                self.ops.clear()
                super()._route(send)
            case _:
                super()._route(send)
