"""Everything between the pools of one engine epoch, the kvstores and other groups."""

from deepmesh.wire.messages import OpDone, ReleaseBlocks

from .group import Group
from .handover_asks import HandoverAsks
from .kv_stores import KvStores
from .op_fences import ExportOp, LoadOp, PrefetchOp, StoreOp
from .outbox import Outbox
from .prefetch import Prefetch
from .residency import Residency
from .store_loads import StoreLoads
from .store_writes import StoreWrites
from .waiting import WaitingQueue


class Transfers:
    """Takes what executors say about ops, and what time says."""

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
        self.writes = StoreWrites(residency, group, stores, outbox)
        self.loads = StoreLoads(
            residency,
            group,
            stores,
            waiting,
            outbox,
            asks=asks,
            load_s=load_s,
            prefill_token_ns=prefill_token_ns,
        )
        self.prefetch = Prefetch(residency, group, stores, outbox, load_ns=int(load_s * 1e9))
        self._ops = residency.ops
        self._group = group
        self._stores = stores
        self._outbox = outbox

    def op_done(self, peer: str, message: OpDone, now: int) -> None:
        """Only this unpins what an op touches. A late or repeated answer changes nothing."""
        op = self._ops.get(message.op_id)
        is_known = op is not None and self._group.peers.get(op.rank) == peer
        if op is None or not is_known or message.engine_epoch != self._group.engine_epoch:
            self._stores.counters["stale_ops"] += 1
            return
        if isinstance(op, PrefetchOp):
            self.prefetch.done(op, message)
            self._ops.end(op)
            return
        self._ops.end(op)
        match op:
            case LoadOp():
                self.loads.done(op, message, now)
            case StoreOp():
                self.writes.done(op, message)
            case ExportOp():
                op.answer = message
                if op.is_unwanted or op.is_overdue:
                    order = ReleaseBlocks(message.engine_epoch, [op.op_id])
                    self._outbox.send(peer, order)
            case _:
                raise AssertionError(f"op {op.op_id} is neither a load nor a store")

    @property
    def is_storing(self) -> bool:
        """Something that was published is on its way to a kvstore, and may yet arrive."""
        flying = (isinstance(op, StoreOp) and not op.is_overdue for op in self._ops)
        return self.writes.num_waiting > 0 or any(flying)

    def expire(self, now: int) -> None:
        """Ops over their deadline: requests stop waiting, blocks do not."""
        for op in self._ops.expire(now):
            self._outbox.note(
                "warning",
                "transfer over its deadline; its blocks stay pinned",
                op=op.op_id,
                kind="load" if isinstance(op, LoadOp | PrefetchOp) else "store",
                rank=op.rank,
                kvstore=op.store,
                moves=len(op.moves),
            )
            match op:
                case LoadOp():
                    self.loads.give_up(op)
                case PrefetchOp():
                    self.prefetch.give_up(op)
                case _:
                    pass

    def flush(self, now: int) -> None:
        """Order stores, behind the steps that were planned."""
        self.writes.flush(now)
