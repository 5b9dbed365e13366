"""Engine sessions: executors come and go, engines start anew from confirmed tokens."""

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity, ErrorCode, Load, Reset, Shutdown

from .alignment import ChooseKind
from .engine import Engine, geometry_of
from .events import StepEnded
from .expert_moves import ExpertMoves
from .group import Group, StepRecord, group_step_of
from .handover_asks import HandoverAsks
from .intake import Intake
from .kv_stores import KvStores
from .outbox import Outbox
from .registry import Registry
from .request import Request
from .waiting import WaitingQueue

MAX_SUSPECT = 2  # device faults while a request was in the step


class Session:
    """Owns the engine: there is one while every rank is linked and loaded, none otherwise."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        group: Group,
        registry: Registry,
        intake: Intake,
        waiting: WaitingQueue,
        outbox: Outbox,
        model: str,
        numerics: str,
        max_unacked: int,
        choose_kind: ChooseKind,
        stores: KvStores,
        asks: HandoverAsks,
    ) -> None:
        self.engine: Engine | None = None
        self.preemptions = self.output_tokens = self.cached_tokens = 0  # of all engines so far
        self._config = config
        self._group = group
        self._registry = registry
        self._intake = intake
        self._waiting = waiting
        self._outbox = outbox
        self._model, self._numerics = model, numerics
        self._max_unacked = max_unacked
        self._choose_kind = choose_kind
        self._stores, self._asks = stores, asks
        self.experts = ExpertMoves(config, group, outbox, first_epoch=group.engine_epoch)

    def executor_up(self, peer: str, rank: int) -> None:
        """Tell an executor what to load."""
        if rank >= self._group.ranks:
            self._outbox.note("error", "executor of an unknown rank", peer=peer, rank=rank)
            return
        self._group.peers[rank] = peer
        self._group.loaded.discard(rank)
        self._group.told[rank] = self._group.engine_epoch
        self._outbox.send(
            peer,
            Load(
                engine_epoch=self._group.engine_epoch,
                rank=rank,
                ranks=self._group.ranks,
                model=self._model,
                numerics=self._numerics,
            ),
        )

    def executor_down(self, rank: int, now: int) -> None:
        """Nothing on its device can be trusted any more."""
        self._group.peers.pop(rank, None)
        self._group.loaded.discard(rank)
        if self.engine is not None:
            self.restart(now, f"executor of rank {rank} is lost", faulty=None)

    def hung(self, step: StepRecord, now: int) -> None:
        """Ranks that owe a result, or the step's end on the device, for too long are taken for
        dead, whatever their links say."""
        done = self._group.gpu_done
        ranks = sorted(step.pending) or [r for r, at in enumerate(done) if at < step.step_id]
        for rank in ranks:
            peer = self._group.peers.pop(rank, None)
            self._group.loaded.discard(rank)
            if peer is not None:
                self._outbox.send(peer, Shutdown())  # its supervisor starts another one
        names = ", ".join(map(str, ranks))
        self.restart(now, f"no result of rank {names} for step {group_step_of(step.step_id)}", None)

    def capacity(self, message: Capacity, now: int) -> None:
        """A rank is loaded; with the last one the engine starts."""
        group = self._group
        if message.rank not in group.peers:
            return
        group.capacities[message.rank] = message
        group.loaded.add(message.rank)
        self._outbox.note(
            "info",
            "executor loaded",
            rank=message.rank,
            global_blocks=message.num_global_blocks,
            window_blocks=message.num_window_blocks,
            state_blocks=message.num_state_blocks,
        )
        if group.ready and self.engine is None:
            self._start(now)

    def _agree(self, capacities: list[Capacity]) -> bool:
        """All ranks must run the same model in the same way; only their room may differ."""
        shapes = [
            (
                c.block_size,
                c.chunk_align,
                c.window,
                c.vocab_size,
                c.draft_len,
                c.one_kernel_class,
                c.has_masks,
                c.fingerprint,
                c.vocabulary,
                c.experts,
                c.prefill_halo,
                c.prompt_work,
            )
            for c in capacities
        ]
        for rank, shape in enumerate(shapes):
            if shape != shapes[0]:
                text = "ranks disagree; give all executors the same model and numerics"
                self._outbox.note("error", text, rank=rank, this=str(shape), rank_0=str(shapes[0]))
                return False
        return True

    def _start(self, now: int) -> None:
        """All ranks are loaded: fresh pools, and every request starts from its confirmed tokens."""
        capacities = [self._group.capacities[rank] for rank in range(self._group.ranks)]
        if not self._agree(capacities):
            return
        geometry = geometry_of(self._config, capacities)
        self.engine = Engine(
            capacities,
            geometry,
            group=self._group,
            registry=self._registry,
            waiting=self._waiting,
            outbox=self._outbox,
            prefix_cache=self._config.prefix_cache,
            max_unacked=self._max_unacked,
            choose_kind=self._choose_kind,
            stores=self._stores,
            asks=self._asks,
            load_s=self._config.store_load_s,
            prefill_share=self._config.prefill_share,
            context_parallel_tokens=self._config.context_parallel_tokens,
        )
        self._registry.residency = self.engine.residency
        self._intake.geometry = geometry
        self._intake.totals = self.engine.totals
        self._intake.fingerprint = self._outbox.fingerprint = capacities[0].fingerprint
        self._intake.vocabulary = capacities[0].vocabulary
        self._intake.has_masks = capacities[0].has_masks
        for rank, peer in sorted(self._group.peers.items()):
            if self._group.told[rank] != self._group.engine_epoch:
                self._reset(rank, peer)  # it loaded while the epoch moved on
        self._intake.recheck(now)
        for request in self._registry.live.values():
            self.engine.results.watch(request.stop_ids)
        self.experts.begin(now)

    def restart(self, now: int, reason: str, faulty: StepRecord | None) -> None:
        """A new engine epoch: in-flight steps are void, KV too; requests requeue from K."""
        engine, group = self.engine, self._group
        assert engine is not None
        suspects = engine.requests_in(faulty) if faulty is not None else []
        steps = group.abandon()
        self.experts.end()
        residents = engine.residents()
        self.count(engine)
        engine.keep_learned()
        for request in residents:
            engine.residency.leave(request, publishes=False)
            self._waiting.add(request)
        self.engine = self._registry.residency = None
        self._outbox.note(
            "warning",
            "engine restart",
            reason=reason,
            requeued=len(residents),
            epoch=group.engine_epoch,
        )
        for step in steps:
            self.step_ended(step, now, error=reason)
        for request in suspects:
            self._suspect(request, reason, now)
        for rank, peer in sorted(group.peers.items()):
            if rank in group.loaded:
                self._reset(rank, peer)
        if group.ready:
            self._start(now)

    def _reset(self, rank: int, peer: str) -> None:
        self._group.told[rank] = self._group.engine_epoch
        self._outbox.send(peer, Reset(self._group.engine_epoch))

    def _suspect(self, request: Request, reason: str, now: int) -> None:
        """A device fault while the request was in the step; twice without progress ends it."""
        if len(request.ids) > request.suspect_len:
            request.suspect = 0
        request.suspect += 1
        request.suspect_len = len(request.ids)
        if request.suspect >= MAX_SUSPECT:
            detail = f"the device failed {MAX_SUSPECT} times while it computed this request: "
            self._registry.fail(request, ErrorCode.ENGINE_ERROR, detail + reason, now)

    def step_ended(self, step: StepRecord, now: int, error: str = "") -> None:
        """Report a step that all ranks have answered, or that was abandoned."""
        self._outbox.actions.append(
            StepEnded(
                group_step=group_step_of(step.step_id),
                kind=step.kind,
                num_rows=step.num_rows,
                num_tokens=step.num_tokens,
                planned_ns=step.planned_ns,
                applied_ns=now,
                begin_ns=step.begin_ns,
                end_ns=step.end_ns,
                error=error,
                step_id=step.step_id,
                ready_ns=step.ready_ns,
                last_rank=step.last_rank,
                placement=step.placement,
                rids=step.rows.rid.tobytes(),
            )
        )

    def count(self, engine: Engine) -> None:
        """Counters outlive an engine."""
        preemptions, output, cached = engine.take_counts()
        self.preemptions += preemptions
        self.output_tokens += output
        self.cached_tokens += cached
