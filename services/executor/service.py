"""The executor's loop: dials its scheduler, obeys its orders, sends back what the device says."""

import contextlib
import gc
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from msgspec.structs import replace

from deepmesh.config import Config
from deepmesh.health import Readiness
from deepmesh.recorder import Desk, Recorder
from deepmesh.telemetry import SPAN_LOAD, Tracer
from deepmesh.vocabulary import vocabulary_digest
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    AnyMessage,
    Capacity,
    CompileGrammars,
    Drain,
    GroupFlag,
    KvStatus,
    Load,
    LoadBlocks,
    OpDone,
    PlaceExperts,
    Progress,
    ReleaseBlocks,
    Reset,
    ServiceStats,
    Shutdown,
    StepResult,
    StoreBlocks,
    SubmitStep,
)
from deepmesh.wire.sockets import Dialer, Identity, LinkEvent, Mail, PeerDown, PeerUp
from services.executor.checkpoint_stamp import Stamp, stamp
from services.executor.interface import DeviceLost, Executor, GroupLost, OnProgress
from services.executor.kv_transfer import KvTransfers
from services.executor.loader import Loader
from services.executor.masks.ahead import CompileAhead
from services.executor.progress import LoadDisplay
from services.executor.traces import Traces
from services.executor.work import WorkBook

_log = logging.getLogger(__name__)
IDLE_S = 1.0
PROGRESS_S = 0.1  # between two Progress messages of a stage
LEAVE_S = 0.3  # in which what was sent leaves before the process does
NO_EPOCH = -1

MakeExecutor = Callable[[Callable[[], None], OnProgress], Executor]  # on_result, on_progress


class Verdict(Enum):
    """What to do with a step that arrived."""

    RUN = "run"
    DROP = "drop"  # of another epoch, or a repetition
    GAP = "gap"  # a step before it is missing, or was the last: KV cannot be trusted any more


class StepGate:
    """Lets the steps of one engine epoch pass in order, each once, without a gap."""

    def __init__(self, epoch: int = NO_EPOCH) -> None:
        self.epoch = epoch
        self._last = 0
        self._is_over = False

    def check(self, step: SubmitStep) -> Verdict:
        """Judge the next step."""
        if step.engine_epoch != self.epoch or (self._last and step.step_id <= self._last):
            return Verdict.DROP
        if self._is_over or (self._last and step.step_id != self._last + 1):
            return Verdict.GAP
        self._last = step.step_id
        self._is_over = bool(step.descriptor.flags & GroupFlag.DRAIN)
        return Verdict.RUN


class ExecutorService:
    """One rank of the EP group of scheduler `index`."""

    def __init__(
        self,
        config: Config,
        make: MakeExecutor,
        *,
        index: int,
        rank: int,
        tracer: Tracer,
        recorder: Recorder | None = None,
        work: WorkBook | None = None,
        ahead: CompileAhead | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            recorder: what the engine has done beside its steps; None: nothing.
            work: what the engine notes of its steps; None: nothing.
            ahead: compiles grammars before they are in a step; None: there are none.
            on_end: called when the loop is over, before the device is given back.
        """
        self.name, self._rank = f"executor-{index}-{rank}", rank
        self.counters: Counter[str] = Counter()
        self.is_hung = False  # at the end: the device did not give its thread back
        self._config, self._tracer, self._on_end = config, tracer, on_end
        self._traces = Traces(tracer, rank=rank)
        self._work = work or WorkBook()
        self._address = config.scheduler_address(index)
        self._me = Identity.new("executor", self.name, config)
        self._desk = Desk(
            self._me,
            tracer,
            rank=rank,
            recorder=recorder,
            slices=self._traces.slices,
            work=self._work,
        )
        self._inbox = Inbox()
        self._life = threading.RLock()  # a signal handler may come while this thread holds it
        self._open = True
        self._dial()
        self._executor = make(self._wake, self._on_progress)
        self._transfers: KvTransfers | None = None  # without kvstores and hand-overs there are none
        prefillers = config.prefillers(index)
        serves = config.is_split and config.role(index) != "decode"
        if config.kvstore.count or prefillers or serves:
            ranks = range(config.executor.ranks)
            self._transfers = KvTransfers(
                config,
                self.name,
                submit=self._executor.submit,
                wake=self._wake,
                pulls_from=[config.handover_address(i, r) for i in prefillers for r in ranks],
                serves_at=config.handover_address(index, rank) if serves else "",
            )
        self._ahead = ahead or CompileAhead()
        self._ahead.listen(self._wake)
        self._loader = Loader(self._executor.load, self._wake)
        self._display = LoadDisplay()
        self._ready = Readiness(config.mesh.run_dir, self.name, self._is_ready)
        self._gate = StepGate()
        self._unresolved = 0  # steps submitted whose result is still to come
        self._stopping = False
        self._drain_until = math.inf  # monotonic; infinite: nobody has asked
        self._ordered: Load | None = None  # of the session that is up
        self._load_began_ns = 0
        self._checkpoint: Stamp | None = None  # of the one that this process has loaded
        self._progress: tuple[str, int, int] | None = None  # latest; written by the loader
        self._shown: tuple[str, int, int] | None = None
        self._shown_at = 0.0

    def _dial(self) -> None:
        self._link = Dialer(self._address, self._me, self._config.links, self._stats)
        self._inbox.add(self._link)

    def _is_ready(self) -> bool:
        return self._gate.epoch != NO_EPOCH

    def _stats(self) -> ServiceStats:
        work = self._work.total(self._rank, self._traces.busy_ns)
        return ServiceStats(self._is_ready(), self._unresolved, work=work)

    def stop(self) -> None:
        """End the loop. Safe from signal handlers and other threads."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with self._life:  # not after the inbox is closed: its descriptor may be another's by then
            if self._open:
                self._inbox.wake()

    def run(self) -> None:
        """Serve until `stop`, `Shutdown` or `Drain`.

        Raises:
            Exception: the weights cannot be loaded, the device is lost, or a bug; the process
                should end.
        """
        try:
            while not self._stopping and not self._is_drained():
                events = self._inbox.wait(IDLE_S)
                # before the next step begins: it would keep the core from the thread that sends
                with contextlib.suppress(GroupLost):  # comes again behind the mail
                    self._send_all_results()
                for event in events:
                    self._on_event(event)
                self._report_loading()
                self._send_results()
                self._send_transfers()
                self._send_compiled()
                self._traces.quiet()
                self._ready.look()
        except DeviceLost:
            until = time.monotonic() + LEAVE_S
            while (left := until - time.monotonic()) > 0:  # the scheduler learns which step it was
                self._inbox.wait(left)
            raise
        finally:
            self._traces.abandon()
            self._ready.close()
            self._on_end()
            self._display.close()
            if self._transfers is not None:
                self._transfers.close()
            self.is_hung = not self._executor.close()
            with self._life:
                self._open = False
            self._inbox.close()

    def _is_drained(self) -> bool:
        if math.isinf(self._drain_until):
            return False
        return not self._unresolved or time.monotonic() >= self._drain_until

    # ------------------------------------------------------------ mail

    def _on_event(self, event: LinkEvent) -> None:
        match event:
            case PeerUp(peer):
                _log.info("connected to %s", peer.name)
            case PeerDown(peer, reason):
                _log.warning("lost %s: %s; its steps are abandoned", peer.name, reason)
                self._ordered = None
                self._begin_epoch(NO_EPOCH)
            case Mail(message=message):
                self._on_message(message)

    def _on_message(self, message: AnyMessage) -> None:
        match message:
            case Load():
                self._on_load(message)
            case SubmitStep():
                self._on_step(message)
            case StoreBlocks() | LoadBlocks():
                self._on_blocks(message)
            case ReleaseBlocks(engine_epoch=epoch, op_ids=op_ids):
                if self._transfers is not None and epoch == self._gate.epoch:
                    self._transfers.release(op_ids)
            case PlaceExperts():
                self._executor.submit(message)
            case CompileGrammars():
                self._ahead.order(message)
            case Reset(engine_epoch=epoch):
                _log.info("reset to engine epoch %d", epoch)
                self._begin_epoch(epoch)
            case Drain(deadline_s=deadline_s):
                self._drain_until = time.monotonic() + deadline_s
            case Shutdown():
                self._stopping = True
            case _:
                self.counters["unexpected"] += 1
                _log.warning("ignored a %s: not for an executor", type(message).__name__)

    def _on_load(self, order: Load) -> None:
        wanted = stamp(Path(order.model))
        if self._checkpoint not in (None, wanted):
            _log.info(
                "%s holds other weights than are loaded: the next process begins", order.model
            )
            self.stop()  # two checkpoints side by side may be more than the memory holds
            return
        self._checkpoint = wanted
        self._begin_epoch(NO_EPOCH)
        self._ordered, self._load_began_ns = order, time.time_ns()
        _log.info("loading %s, rank %d of %d", order.model, order.rank, order.ranks)
        self._loader.order(order)

    def _on_step(self, step: SubmitStep) -> None:
        match self._gate.check(step):
            case Verdict.RUN:
                self._unresolved += 1
                self._traces.submit(step)
                self._executor.submit(step)
            case Verdict.DROP:
                self.counters["dropped_steps"] += 1
                _log.warning(
                    "dropped step %d of engine epoch %d: this is epoch %d, or it came before",
                    step.step_id,
                    step.engine_epoch,
                    self._gate.epoch,
                )
            case Verdict.GAP:
                self.counters["gaps"] += 1
                text = "step %d is not the next one, or comes behind the last: dialling again"
                _log.error(text, step.step_id)
                self._redial()

    def _on_blocks(self, order: StoreBlocks | LoadBlocks) -> None:
        if order.engine_epoch != self._gate.epoch:
            self.counters["dropped_ops"] += 1
        elif self._transfers is not None:
            self._transfers.order(order)
        else:
            nothing = bytes(len(order.moves))
            self._link.send(OpDone(order.op_id, order.engine_epoch, KvStatus.ERROR, nothing))

    def _begin_epoch(self, epoch: int) -> None:
        self._traces.abandon()
        if self._transfers is not None:
            self._transfers.begin_epoch()
        self._executor.reset(epoch)
        self._gate = StepGate(epoch)
        self._unresolved = 0

    def _redial(self) -> None:
        """No step can be replayed, so the session ends; the scheduler sees a new link."""
        self._ordered = None
        self._begin_epoch(NO_EPOCH)
        self._inbox.endpoints.remove(self._link)
        self._link.close()
        self._dial()

    # ------------------------------------------------------------ reports

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        """Called by the loader's thread."""
        self._progress = (stage, done, total)
        self._wake()

    def _report_loading(self) -> None:
        if self._progress is not None and self._progress != self._shown:
            now, (stage, done, total) = time.monotonic(), self._progress
            fresh = self._shown is None or self._shown[0] != stage
            if fresh or done >= total or now - self._shown_at >= PROGRESS_S:
                self._shown, self._shown_at = (stage, done, total), now
                self._display.update(stage, done, total)
                self._link.send(Progress(stage, done, total))
        capacity = self._loader.take()
        if capacity is not None and self._ordered is not None:
            tokens = vocabulary_digest(Path(self._ordered.model))
            self._on_loaded(replace(capacity, vocabulary=tokens))

    def _on_loaded(self, capacity: Capacity) -> None:
        self._display.close()
        now_ns = time.time_ns()
        self._tracer.record(
            SPAN_LOAD,
            "",
            self._load_began_ns,
            now_ns,
            {"model": self._config.mesh.model, "fingerprint": capacity.fingerprint},
        )
        _log.info("loaded in %.1f s: %s", (now_ns - self._load_began_ns) / 1e9, capacity)
        gc.collect()
        gc.freeze()  # what lives now lives to the end: no later collection looks at it
        self._gate = StepGate(capacity.engine_epoch)
        if self._transfers is not None:
            self._transfers.loaded(capacity)
        self._link.send(capacity)

    def _send_results(self) -> None:
        try:
            self._send_all_results()
        except GroupLost as error:
            self.counters["lost_groups"] += 1
            _log.error("the EP group is lost (%s): dialling again", error)
            self._redial()

    def _send_all_results(self) -> None:
        while (result := self._executor.poll(0)) is not None:
            if not self._link.send(result):
                self.counters["unsent_results"] += 1  # the link is down: a reset follows
            if isinstance(result, StepResult):
                self._unresolved -= 1
                self._traces.result(result)  # later: the scheduler waits for the result

    def _send_compiled(self) -> None:
        for compiled in self._ahead.take(self._rank):
            self._link.send(compiled)  # lost with the link: the next engine epoch asks anew

    def _send_transfers(self) -> None:
        while self._transfers is not None and (done := self._transfers.poll()) is not None:
            name = "kv load" if isinstance(done.order, LoadBlocks) else "kv store"
            if done.order.traceparent:
                about = {"moves": len(done.order.moves), "bytes": done.num_bytes}
                self._tracer.record(
                    name, done.order.traceparent, done.begin_ns, time.time_ns(), about
                )
            if not self._link.send(done.message):
                self.counters["unsent_results"] += 1  # the link is down: a reset follows
