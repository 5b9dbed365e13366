"""One engine epoch: the pools, table and pipeline that live and die with it."""

from typing import Literal

import msgspec

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Capacity,
    Pool,
    ReplicaStats,
    StepKind,
    StepResult,
    StepStatus,
    SubmitStep,
)

from .admission import Admission
from .alignment import Alignment, ChooseKind
from .context_parts import ContextParts
from .costs import Costs
from .grammars import Grammars
from .group import Group, StepRecord
from .handover_asks import HandoverAsks
from .kv_stores import KvStores
from .leases import RankMemory
from .outbox import Outbox
from .pace import Pace
from .packer import Packer
from .plan import Plan
from .planner import Planner
from .policy import Geometry
from .registry import Registry
from .request import Phase, Request
from .residency import Residency
from .results import Results
from .speculation import VerifyCapacity
from .step_curve import SpeculationCosts
from .transfers import Transfers
from .waiting import WaitingQueue
from .watermark import Watermark


def geometry_of(config: SchedulerConfig, capacities: list[Capacity]) -> Geometry:
    """What the executors declared, bounded by the config."""
    first = capacities[0]
    limit = min(capacity.max_model_len for capacity in capacities)
    if config.max_model_len:
        limit = min(limit, config.max_model_len)
    align = first.chunk_align
    return Geometry(
        block_size=first.block_size,
        chunk_align=align,
        chunk_tokens=max(align, config.chunk_tokens // align * align),
        step_tokens=config.step_tokens,
        window=first.window,
        max_model_len=limit,
        depth=config.depth,
        max_rows=config.max_rows,
        decode_width=1 + first.draft_len,
        one_kernel_class=first.one_kernel_class,
        vocab_size=first.vocab_size,
        prefill_halo=first.prefill_halo,
    )


class Engine:
    """Plans and applies steps for one engine epoch."""

    def __init__(
        self,
        capacities: list[Capacity],
        geometry: Geometry,
        *,
        group: Group,
        registry: Registry,
        waiting: WaitingQueue,
        outbox: Outbox,
        prefix_cache: bool,
        max_unacked: int,
        choose_kind: ChooseKind,
        stores: KvStores,
        asks: HandoverAsks,
        load_s: float,
        prefill_share: float,
        context_parallel_tokens: int,
    ) -> None:
        costs = Costs(capacities)
        self.geometry = geometry
        self.group = group
        self._costs_ns = costs.slowest_ns()
        self.memories = [RankMemory(capacity) for capacity in capacities]
        self.residency = Residency(self.memories, geometry)
        self.residency.count_in(group.cache)
        self.watermark = Watermark(self.residency, waiting)
        self.transfers = Transfers(
            self.residency,
            group,
            stores,
            waiting,
            outbox,
            asks=asks,
            load_s=load_s,
            prefill_token_ns=capacities[0].costs.prefill_token_ns,
        )
        kept = min(capacity.grammars for capacity in capacities)
        self.grammars = Grammars(group, outbox, kept=kept)
        self.admission = Admission(
            self.residency,
            waiting,
            self.watermark,
            transfers=self.transfers,
            costs=costs,
            grammars=self.grammars,
            prefix_cache=prefix_cache,
            max_unacked=max_unacked,
        )
        self.pace = Pace(costs, geometry, share=prefill_share)
        alignment = Alignment(
            self.residency,
            waiting,
            geometry,
            costs=costs,
            choose_kind=choose_kind,
            is_paced=self.pace.binds,
        )
        self.planner = Planner(
            self.residency,
            self.watermark,
            self.admission,
            alignment,
            self.pace,
            ContextParts(
                self.residency,
                costs,
                self.pace,
                capacities[0].prompt_work,
                least_tokens=context_parallel_tokens,
            ),
            outbox.readers,
            prefix_cache=prefix_cache,
            max_unacked=max_unacked,
        )
        first = capacities[0]
        self._key = f"{first.fingerprint} {len(capacities)} {first.draft_len}"
        self.verify = VerifyCapacity(
            draft_len=geometry.decode_width - 1,
            costs=SpeculationCosts.of([capacity.costs for capacity in capacities]),
            counts=group.drafts,
            learned=group.drafts.learned.get(self._key, ()),
        )
        self.packer = Packer(self.residency, group, self.verify)
        self._last_end_ns = 0
        self._tried: dict[int, set[int]] = {}  # phases that lacked blocks, of ranks at a stand
        self._is_short = False  # of blocks, so that the last plan had no row
        self.results = Results(self.residency, group, outbox, registry, geometry)

    @property
    def totals(self) -> tuple[int, int, int]:
        """The least blocks of any rank, by class."""
        by_rank = [[pool.total for pool in memory.pools] for memory in self.memories]
        least = [min(column) for column in zip(*by_rank, strict=True)]
        return (least[0], least[1], least[2])

    def plan(self, now: int, flags: int = 0) -> list[SubmitStep] | None:
        """The next step of every rank; None if nothing can run now and no flag is to be told."""
        plan = self.planner.plan(now)
        broken = [rank for rank in self._stuck(plan) if self.watermark.break_deadlock(rank)]
        if plan.empty and broken:
            plan = self.planner.plan(now)
        is_short = bool(plan.starved) or self.admission.is_blocked
        self._is_short = plan.empty and is_short and not plan.held
        plan.flags = flags
        return self.packer.pack(plan, now) if flags or not plan.empty else None

    @property
    def lacks_quarantined(self) -> bool:
        """Nothing runs and nothing comes back, and transfers that do not end keep blocks."""
        if not self._is_short or self.residency.ops.num_overdue == 0 or self.group.unresolved:
            return False
        return all(self._is_stuck(rank) for rank in range(len(self.memories)))

    def apply(self, step: StepRecord, results: list[StepResult], now: int) -> None:
        """Apply the results of some ranks for a step, and complete the preemptions they allow.

        Raises:
            ProtocolError: a rank's result does not fit; nothing has been applied then.
        """
        answered = [result for result in results if result.status != StepStatus.SKIPPED]
        settled = self.results.apply(step, answered, now) if answered else []
        for result in results:
            if result.rank == 0:
                self.verify.observe(result.confidence)
            if self.geometry.decode_width > 1:
                step.drafts.add(result, self.geometry.decode_width - 1)
                self.group.drafts.saw(result)
            if result.status == StepStatus.SKIPPED:
                settled += self.results.discard(step, result.rank)
        for request in settled:
            self.watermark.preempt(request)

    def complete(self, step: StepRecord) -> None:
        """All ranks have answered: what the step took is known."""
        self.pace.saw(step)
        # With what is between two steps: it is the same for one that brings more tokens.
        began_ns = max(step.drafts.enqueued_ns, self._last_end_ns)
        self._last_end_ns = step.end_ns
        if self.geometry.decode_width > 1 and step.kind == StepKind.DECODE:
            self.verify.saw(step.drafts, step.end_ns - min(began_ns, step.begin_ns))

    def keep_learned(self) -> None:
        """What was learned of drafts is there for the next engine."""
        if learned := self.verify.learned:
            self.group.drafts.learned[self._key] = learned

    def residents(self) -> list[Request]:
        """All resident requests, oldest first."""
        table = self.residency.table
        found = [table.request_at(i) for i in table.resident().tolist()]
        return sorted(found, key=lambda request: request.order)

    def requests_in(self, step: StepRecord) -> list[Request]:
        """Live requests with a row in a step."""
        table = self.residency.table
        alive = table.gen[step.rows.index] == step.rows.gen
        return [table.request_at(i) for i in step.rows.index[alive].tolist()]

    def take_counts(self) -> tuple[int, int, int]:
        """Preemptions, output tokens and cached prompt tokens since the last call."""
        watermark, results, admission = self.watermark, self.results, self.admission
        loads = self.transfers.loads
        cached = admission.cached_tokens + loads.cached_tokens
        counts = (watermark.preemptions, results.output_tokens, cached)
        watermark.preemptions = results.output_tokens = 0
        admission.cached_tokens = loads.cached_tokens = 0
        return counts

    def fill(self, stats: ReplicaStats, waiting_tokens: int) -> ReplicaStats:
        """Add what only a loaded engine knows."""
        table = self.residency.table
        resident = table.resident()
        uncomputed = table.target[resident] - table.confirmed_kv[resident]
        return msgspec.structs.replace(
            stats,
            max_model_len=self.geometry.max_model_len,
            waiting_tokens=waiting_tokens + int(uncomputed[uncomputed > 0].sum()),
            inflight_tokens=self.group.inflight_tokens,
            context_tokens=int(table.confirmed[resident].sum()),
            **self._costs_ns,
            free_blocks=self._sum("num_free"),
            cached_blocks=self._sum("num_evictable"),
            total_blocks=self._sum("total"),
            pinned_blocks=self._sum("num_pinned"),
            quarantined_blocks=sum(
                self.residency.ops.num_quarantined(rank, pool)
                for rank in range(len(self.memories))
                for pool in Pool
            ),
        )

    @property
    def num_points(self) -> int:
        """Resumable points on all ranks."""
        return sum(len(memory.index.points) for memory in self.memories)

    def _sum(
        self, count: Literal["num_free", "num_evictable", "num_pinned", "total"]
    ) -> tuple[int, int, int]:
        by_class = [
            sum(int(getattr(memory.pools[pool], count)) for memory in self.memories)
            for pool in Pool
        ]
        return (by_class[0], by_class[1], by_class[2])

    def _stuck(self, plan: Plan) -> list[int]:
        """Ranks that get no further, whatever the others do: they lack blocks, none comes back,
        and all their residents had their chance, be it in steps of different kinds."""
        if not plan.starved:
            self._tried.clear()
            return []
        slots, table = self.residency.slots, self.residency.table
        tokens = plan.tokens_by_rank(len(self.memories), slots, 1)
        idle = sorted(r for r in plan.starved if tokens[r] == 0 and self._is_stuck(r))
        self._tried = {rank: self._tried.get(rank, set()) | plan.tried for rank in idle}
        phases = {rank: table.phase[rank * slots : (rank + 1) * slots] for rank in idle}
        runs = {Phase.PREFILL, Phase.DECODE}
        return [r for r in idle if runs.intersection(phases[r].tolist()) <= self._tried[r]]

    def _is_stuck(self, rank: int) -> bool:
        """A rank has no row in flight, and no block or slot on its way back."""
        ops, slots, table = self.residency.ops, self.residency.slots, self.residency.table
        return not (
            table.inflight_rows[rank * slots : (rank + 1) * slots].any()
            or self.memories[rank].num_fenced_slots
            or any(ops.num_returning(rank, pool) for pool in Pool)
        )
