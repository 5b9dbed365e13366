"""The scheduler core: one event in, actions out. No I/O, no clock, no threads."""

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Abort,
    Ack,
    Attach,
    Capacity,
    Drain,
    ErrorCode,
    ExpertsPlaced,
    FlushCache,
    Generate,
    GpuDone,
    GrammarsCompiled,
    HandOff,
    HandOffDone,
    HandOffRefused,
    HandOffRenew,
    Hits,
    OpDone,
    Pause,
    PrefillFor,
    Progress,
    ReplicaStats,
    Resume,
    Shutdown,
    StepResult,
    StopAt,
)

from .alignment import ChooseKind, KindPolicy
from .audit import audit
from .controls import Controls
from .engine import Engine
from .events import (
    Action,
    DecoderDown,
    Event,
    ExecutorDown,
    ExecutorUp,
    Incoming,
    KvstoreDown,
    KvstoreHolds,
    KvstoreUp,
    Mail,
    PrefillerDown,
    PrefillerUp,
    RouterDown,
    RouterUp,
    StepResults,
    Tick,
    TokenizerDown,
    TokenizerUp,
)
from .expert_orders import ExpertsPlanned
from .group import Group, make_step_id
from .handovers import Handovers
from .intake import Intake
from .kv_stores import KvStores
from .outbox import Outbox
from .prefix_reports import PERIOD_NS, PrefixReports
from .registry import Registry
from .request import Request
from .session import Session
from .steps import Steps
from .waiting import WaitingQueue

TIMER_NS = 250_000_000


class Scheduler:
    """Plans all ranks of one EP group. `handle` is its whole interface."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        name: str,
        model: str,
        served_model: str = "",
        numerics: str = "bf16",
        ranks: int = 1,
        first_epoch: int = 1,
        max_unacked: int = 2048,
        kvstores: int = 0,
        role: str = "both",
        choose_kind: ChooseKind | None = None,
        encodes_rows: bool = False,
    ) -> None:
        policy = KindPolicy(config.hold_steps, 1e6 * config.decode_itl_ms)
        self.config = config
        self.name = name
        self._role = role
        self.group = Group(ranks=ranks, first_epoch=first_epoch)
        self.outbox = Outbox(encodes_rows=encodes_rows)
        self.stores = KvStores(
            self.outbox,
            count=kvstores,
            first_op=make_step_id(first_epoch, 0),
            lookup_s=config.store_lookup_s,
        )
        self.prefixes = PrefixReports(self.outbox)
        self.waiting = WaitingQueue()
        self.registry = Registry(self.waiting, self.outbox)
        self.intake = Intake(
            self.registry,
            self.waiting,
            self.outbox,
            replica=name,
            max_waiting=config.max_waiting,
            max_unacked=max_unacked,
        )
        self.handovers = Handovers(
            config,
            registry=self.registry,
            intake=self.intake,
            stores=self.stores,
            outbox=self.outbox,
            first_number=make_step_id(first_epoch, 0),
        )
        self._session = Session(
            config,
            group=self.group,
            registry=self.registry,
            intake=self.intake,
            waiting=self.waiting,
            outbox=self.outbox,
            model=model,
            numerics=numerics,
            max_unacked=max_unacked,
            choose_kind=choose_kind or policy.choose,
            stores=self.stores,
            asks=self.handovers.asks,
        )
        self._controls = Controls(self.group, self.registry)
        self.drained = False  # nothing is left to do, nothing new is taken, and the ranks know
        self._steps = Steps(self.group, self._session, self.outbox, hang_s=config.hang_s)
        self._served_model = served_model
        self._max_unacked = max_unacked
        self._incarnations: dict[str, bytes] = {}
        self._has_orphans = False  # perhaps
        self._drain_deadline_ns = 0
        self._next_timer_ns = 0

    # ------------------------------------------------------------ the interface

    def handle(self, event: Event, now: int) -> list[Action]:
        """Take one event at `now` (ns, never backwards: SteadyClock); what to do about it."""
        match event:
            case Tick(steps):
                self._timers(now)
                self._expire_transfers(now)
                self.handovers.tick(self.engine, now)
                self._plan(now, steps)
                self._session.experts.tick(now)
                self.prefixes.flush(self.engine, now)
                if self.engine is not None:
                    self.engine.transfers.flush(now)
                    self.engine.grammars.flush()
                if self.intake.draining:
                    is_storing = self.engine is not None and self.engine.transfers.is_storing
                    is_storing |= self.handovers.offers.num_open > 0
                    self.drained = self._controls.has_drained(now, is_storing=is_storing)
            case Mail(peer, message):
                self._mail(peer, message, now)
            case StepResults(results):
                self._steps.take([result for _, result in results], now)
            case TokenizerUp(peer, incarnation):
                self.outbox.readers.forget(peer)
                self._tokenizer_up(peer, incarnation, now)
            case TokenizerDown(peer):
                self.outbox.readers.forget(peer)
                self._has_orphans = True
                for request in self.registry.live.values():
                    if request.reply_to == peer and not request.orphaned_ns:
                        request.orphaned_ns = now
            case ExecutorUp(peer, rank):
                self._session.executor_up(peer, rank)
            case ExecutorDown(_, rank):
                self._session.executor_down(rank, now)
            case KvstoreUp(peer, index):
                self.stores.up(peer, index)
            case KvstoreDown(_, index):
                self.stores.down(index)
            case KvstoreHolds(index, num_items):
                self.stores.holds(index, num_items)
            case PrefillerUp() | PrefillerDown() | DecoderDown():
                self.handovers.link(event, now)
            case RouterUp(peer):
                self.prefixes.up(peer)
            case RouterDown(peer):
                self.prefixes.down(peer)
            case ExpertsPlanned():
                self._session.experts.planned(event, now)
        if self.config.audit:
            audit(self)
        return self.outbox.take()

    @property
    def engine(self) -> Engine | None:
        """Pools, table and pipeline while all ranks are loaded."""
        return self._session.engine

    @property
    def has_room(self) -> bool:
        """Fewer steps are in flight than may be."""
        return len(self.group.unresolved) < self.config.depth

    @property
    def is_paused(self) -> bool:
        """Nothing is in flight, and nothing will be until it is resumed."""
        return self._controls.is_paused

    def learned(self) -> dict[str, list[float]]:
        """What was learned of drafts, by engine: `group.drafts.learned` of a later scheduler."""
        if self.engine is not None:
            self.engine.keep_learned()
        return self.group.drafts.learned

    def idle_for(self) -> float:
        """Seconds until a timer may be due."""
        if self.stores.num_lookups:
            return self.config.store_lookup_s / 2
        if self.prefixes.is_waiting:
            return PERIOD_NS / 1e9
        busy = self.registry.live or self.registry.tombstones or self.registry.ended
        return 0.25 if busy or self._drain_deadline_ns else 1.0

    def stats(self) -> ReplicaStats:
        """The state of the replica, for heartbeats."""
        engine, registry, geometry = self.engine, self.registry, self.intake.geometry
        residents, waste = len(registry.live) - len(self.waiting), self.group.waste
        verified, accepted = self.group.drafts.lists()
        stats = ReplicaStats(
            name=self.name,
            ready=self.engine is not None and not self.intake.draining,
            model=self._served_model,
            fingerprint=self.intake.fingerprint,
            vocab_size=geometry.vocab_size if geometry is not None else 0,
            vocabulary=self.intake.vocabulary,
            waiting=len(self.waiting),
            running=residents,
            preemptions=self._session.preemptions,
            prompt_tokens=self.intake.prompt_tokens,
            cached_prompt_tokens=self._session.cached_tokens,
            output_tokens=self._session.output_tokens,
            steps=self.group.group_step,
            finished=registry.num_finished,
            failed=registry.num_failed,
            draining=self.intake.draining,
            paused=self.is_paused,
            store_hit_tokens=self.stores.counters["hit_tokens"],
            stored_blocks=self.stores.counters["stored_blocks"],
            overrun_tokens=waste.overrun_tokens,
            null_rows=waste.null_rows,
            dummy_tokens=waste.dummy_tokens,
            pad_tokens=waste.pad_tokens,
            late_results=waste.late_results,
            verified_drafts=verified,
            accepted_drafts=accepted,
            drafts=self.group.drafts.stats(),
            experts=self._session.experts.stats(),
            shared_prompt_tokens=self.group.shared_tokens,
            cache=self.group.cache.stats(0 if engine is None else engine.num_points),
            role=self._role,
            handovers=self.handovers.stats(),
        )
        return stats if engine is None else engine.fill(stats, self.waiting.num_tokens)

    # ------------------------------------------------------------ mail

    def _mail(self, peer: str, message: Incoming, now: int) -> None:
        match message:
            case StepResult():
                self._steps.take([message], now)
            case GpuDone():
                self._steps.gpu_done(message, now)
            case Generate():
                self._generate(message, now)
            case Ack():
                self.outbox.readers.took(peer, message.group_step)
                self.intake.ack(message, peer, now)
            case Attach():
                self.intake.attach(message, now)
            case StopAt():
                self.intake.stop_at(message, peer, now)
            case Abort():
                self.intake.abort(message, peer, now)
            case Capacity():
                self._session.capacity(message, now)
            case OpDone():
                if self.engine is not None:
                    self.engine.transfers.op_done(peer, message, now)
            case Hits():
                self.stores.hits(peer, message)
            case PrefillFor() | HandOff() | HandOffRefused() | HandOffRenew() | HandOffDone():
                self.handovers.mail(peer, message, self.engine, now)
            case GrammarsCompiled():
                if self.engine is not None:
                    self.engine.grammars.compiled(message)
            case ExpertsPlaced():
                self._session.experts.placed(message, now)
            case Progress():
                self.outbox.note(
                    "debug",
                    "loading",
                    peer=peer,
                    stage=message.stage,
                    done=message.done,
                    total=message.total,
                )
            case FlushCache():
                for memory in self.engine.residency.memories if self.engine is not None else ():
                    memory.index.flush()
            case Drain():
                self._drain(now + int(message.deadline_s * 1e9))
            case Pause():
                self._controls.pause(now)
            case Resume():
                self._controls.resume(now)
            case Shutdown():
                self._drain(now)
                self._timers(now)

    def _generate(self, message: Generate, now: int) -> None:
        request = self.intake.generate(message, now)
        if request is not None and self.engine is not None:
            self.engine.results.watch(request.stop_ids)
            self.engine.grammars.awaits(request, now)  # ordered now, it is there the sooner

    def _tokenizer_up(self, peer: str, incarnation: bytes, now: int) -> None:
        """A link that came back to the same process gets what it may have missed."""
        known = self._incarnations.get(peer)
        self._incarnations[peer] = incarnation
        if known != incarnation:
            return
        for request in self.registry.live.values():
            if request.reply_to == peer and request.orphaned_ns:
                request.orphaned_ns = 0
                self.intake.replay(request, request.acked, now)
        for ended in self.registry.ended.values():
            if ended.request.reply_to == peer:
                self.outbox.replay(ended.request, ended.request.ids, ended.request.acked, now)
                self.outbox.send(peer, ended.terminal)

    # ------------------------------------------------------------ steps

    def _plan(self, now: int, most: int) -> None:
        """Submit as many steps as depth, pause and drain allow, and at most so many."""
        engine, group, controls = self.engine, self.group, self._controls
        if self.intake.draining and not self.registry.live:
            controls.finish(now)
        experts = self._session.experts
        while engine is not None and group.ready and len(group.unresolved) < self.config.depth:
            if most <= 0 or not experts.may_step:
                return
            most -= 1
            flags = controls.next_flags()
            if flags is None:
                return
            experts.before_step(now)
            steps = engine.plan(now, flags)
            if steps is None:
                if engine.lacks_quarantined:
                    self._session.restart(now, "transfers do not end, and blocks are short", None)
                return
            controls.sent(flags)
            for rank, step in enumerate(steps):
                self.outbox.send(group.peers[rank], step)

    # ------------------------------------------------------------ timers

    def _expire_transfers(self, now: int) -> None:
        """What a kvstore has not answered, and what an executor has not moved, in time."""
        self.stores.expire(now)
        if self.engine is not None:
            self.engine.transfers.expire(now)

    def _drain(self, deadline_ns: int) -> None:
        self.intake.draining = True
        earlier = min(self._drain_deadline_ns, deadline_ns)
        self._drain_deadline_ns = earlier if self._drain_deadline_ns else deadline_ns
        self._next_timer_ns = 0

    def _timers(self, now: int) -> None:
        if now < self._next_timer_ns:
            return
        self._next_timer_ns = now + TIMER_NS
        self.registry.expire(now)
        self._steps.watch(now)
        for request in self._watched(now):
            self._check_timers(request, now)

    def _watched(self, now: int) -> list[Request]:
        """All requests whose time may be up; of thousands of residents only the stalled ones."""
        live = self.registry.live.values()
        if self.engine is None or self._drain_deadline_ns:
            return list(live)
        orphans = [r for r in live if r.orphaned_ns] if self._has_orphans else []
        self._has_orphans = bool(orphans)
        found = orphans + [request for request in self.waiting if not request.orphaned_ns]
        table = self.engine.residency.table
        here = table.resident()
        stalled = here[now - table.progress_ns[here] >= self.config.deadline_s * 1e9]
        known = [table.request_at(i) for i in stalled.tolist()]
        return found + [request for request in known if not request.orphaned_ns]

    def _check_timers(self, request: Request, now: int) -> None:
        registry = self.registry
        if self._drain_deadline_ns and now >= self._drain_deadline_ns:
            detail = "this replica shuts down; send the request again"
            registry.fail(request, ErrorCode.OVERLOADED, detail, now, retry_after_s=1.0)
        elif request.orphaned_ns and now - request.orphaned_ns >= self.config.orphan_s * 1e9:
            self.intake.abandon(request, now)
        elif self._overdue(request, now):
            self._fail_overdue(request, now)

    def _fail_overdue(self, request: Request, now: int) -> None:
        unread = self.registry.confirmed_len(request) - request.prompt_len - request.acked
        if unread >= self._max_unacked:
            code, detail = ErrorCode.SLOW_CONSUMER, "the client does not take its tokens"
        elif self.engine is None:
            code = ErrorCode.ENGINE_RESTARTED
            detail = "the engine did not come back before the request's deadline"
        else:
            code, detail = ErrorCode.DEADLINE, "the request made no progress before its deadline"
        self.registry.fail(request, code, detail, now, retry_after_s=5.0)

    def _overdue(self, request: Request, now: int) -> bool:
        """Past the caller's deadline while it waits, or without progress for too long; in a pause
        nobody makes progress."""
        progress = request.progress_ns
        if request.slot >= 0 and self.engine is not None:
            progress = int(self.engine.residency.table.progress_ns[request.slot])
        if now - progress >= self.config.deadline_s * 1e9 and not self._controls.is_pausing:
            return True
        deadline = request.generate.deadline_ns
        return bool(deadline) and now >= deadline and request.slot < 0
