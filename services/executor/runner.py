"""The engine with the real model: rows of a step to a batch, forward, sample."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol, TypeGuard, runtime_checkable

import msgspec
import numpy as np
import torch

from deepmesh.config import Config
from deepmesh.recorder import Slice
from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    ExpertsPlaced,
    Load,
    OpKind,
    PlaceExperts,
    Pool,
    StepCosts,
    SubmitStep,
)
from kernels.sampling.draws import Draws
from services.executor.batch import StepBatch
from services.executor.capacity import fingerprint, plan_capacity, planned_slots
from services.executor.context_parallel import prompt_work
from services.executor.device_clock import WorkerClock
from services.executor.drawing import draw_tokens, spread
from services.executor.eplb import GroupExperts, HostRoom
from services.executor.interface import LiveRows, OnProgress, Sampled
from services.executor.kv_cache import KvCache, layout
from services.executor.kv_copy import Place
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.model_config import ModelConfig, load_config
from services.executor.models.outputs import DraftBatch, DraftOutput, StepOutput
from services.executor.parallel import NO_EPOCH, EpochGroup, ExpertGroup
from services.executor.part_step import PartForward, SharingModel, part_of
from services.executor.peaks import device_peaks
from services.executor.prefill_tail import bounded_halo, exact_halo
from services.executor.prompt_logprobs import prompt_logprobs, wanted_logits
from services.executor.rendezvous import make_rendezvous
from services.executor.slots import SlotTable
from services.executor.speculation import Speculation, scratch_blocks
from services.executor.step_costs import measure_costs
from services.executor.weights import ExpertReader, load_model
from services.executor.work import WorkBook
from services.executor.work_shapes import WorkShapes

_log = logging.getLogger(__name__)
POOL_SHARE = 0.25  # of the machine's memory, at most, for KV pools of default size


class Model(Protocol):
    """What a step needs of `models.deepseek_v41.DeepseekV41`."""

    @property
    def config(self) -> ModelConfig:
        """Its shapes."""
        ...

    def forward(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """Write the KV of all tokens of the batch; logits where they are wanted."""
        ...

    def serve(self) -> None:
        """A step without tokens: the experts held here work for the other ranks."""
        ...


@runtime_checkable
class Drafting(Protocol):
    """A model with draft stages."""

    def draft(
        self,
        batch: DraftBatch,
        cache: KvCache,
        draws: Draws | None = None,
        num_places: int | None = None,
    ) -> DraftOutput:
        """Propose tokens behind anchors."""
        ...


class ModelEngine:
    """Weights and KV tensors of one rank on the CPU."""

    kind = "cpu"  # of arithmetic: another one may give other bits
    device = "cpu"  # where the tensors lie, as torch names it
    speculation = Speculation  # benchmarks have drafts of their own making
    leaves_out = True  # whether rows of prompts may leave out the upper layers
    fills_memory = False  # whether KV pools take all that may be had, instead of what is usual

    def __init__(self, config: Config, index: int = 0, masks: GrammarMasks | None = None) -> None:
        """
        Args:
            index: of the scheduler whose EP group this rank belongs to.
            masks: keep outputs to grammars; None: there are none.
        """
        self.clock = WorkerClock()
        self.record: Callable[[Slice], None] = lambda piece: None  # of the timeline
        self.work = WorkBook()
        self._masks = masks
        self._config, self._index = config, index
        self._group: EpochGroup | None = None  # None: this rank is all there is
        self._experts: GroupExperts | None = None  # of a rank that is one of several
        self._speculation: Speculation | None = None
        self._parts: PartForward | None = None  # where ranks compute chunks together
        self._loaded: tuple[object, ...] = ()
        self._threads_set = False

    @property
    def model(self) -> Model:
        """What is loaded; for benchmarks, which look at where its tokens go."""
        return self._model

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """Load the weights unless they are there, and plan the pools."""
        path, wanted = Path(order.model), (order.model, order.rank, order.ranks, order.numerics)
        if self._loaded != wanted:
            self._loaded = ()
            if self._masks is not None:  # its worker reads the vocabulary meanwhile
                model = load_config(path)
                self._masks.start(
                    path,
                    vocab_size=model.vocab_size,
                    num_slots=planned_slots(self._config),
                    draft_len=min(self._config.executor.draft_tokens, model.dspark_block_size),
                )
            self._group = self._make_group(order)
            self._model: Model = self._load_model(path, order, on_progress)
            self._packed = order.numerics != "exact"  # which rounds no rows
            engine = f"{self.kind} {layout(packed=self._packed)}"
            if self._config.executor.prefill_tail == "bounded":
                engine += " bounded"  # other bits: nothing of it meets a cache of exact ones
            self._fingerprint = fingerprint(path, order.numerics, engine)
            self._make_cache(order)
            costs = self._measure_costs()
            self._capacity = msgspec.structs.replace(self._capacity, costs=costs)
            self._begin_work(order)
            has_masks = self._masks is not None and self._masks.wait_ready()
            grammars = self._config.executor.grammar_cache if has_masks else 0
            self._capacity = msgspec.structs.replace(
                self._capacity, has_masks=has_masks, grammars=grammars
            )
            self._loaded = wanted
        return msgspec.structs.replace(
            self._capacity, engine_epoch=order.engine_epoch, rank=order.rank
        )

    def _begin_work(self, order: Load) -> None:
        """Count steps of this model from now on."""
        config, (_, experts, redundant) = self._model.config, self._capacity.experts
        held = -(-(experts + redundant) // order.ranks) if order.ranks > 1 else 0
        shapes = WorkShapes(config, self._capacity.max_model_len, held_experts=held)
        self.work.begin(shapes, device_peaks(self._config.executor, self.device))

    def _measure_costs(self) -> StepCosts:
        torch.set_num_threads(self._config.executor.threads)
        with self._group.apart() if self._group is not None else nullcontext():
            draft_len, model = self._capacity.draft_len, self._model
            chooses = self._config.executor.draft_policy == "adaptive"
            return measure_costs(
                model.config,
                model.forward,
                packed=self._packed,
                device=self.device,
                draft=model.draft if chooses and self._can_draft(model) else None,
                most_verified=self._capacity.num_slots * (1 + draft_len),
            )

    def _load_model(self, path: Path, order: Load, on_progress: OnProgress) -> Model:
        redundant = self._config.executor.redundant_experts if order.ranks > 1 else 0
        if self._experts is not None:
            self._experts.close()
        self._experts = None
        model = load_model(
            path,
            numerics=order.numerics,
            rank=order.rank,
            ranks=order.ranks,
            exchange=self._group if isinstance(self._group, ExpertGroup) else None,
            progress=on_progress,
            redundant=redundant,
        )
        if order.ranks > 1:
            record = self._config.scheduler.experts_record_steps
            self._experts = GroupExperts(
                [HostRoom(layer.moe) for layer in model.weights.layers],
                ExpertReader(path, model.config),
                order.rank,
                num_redundant=redundant,
                record_steps=record,
            )
        return model

    def _pool_bytes(self, order: Load) -> int:
        """What the KV pools may take."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(memory * POOL_SHARE / order.ranks)  # ranks may share a machine

    def _make_group(self, order: Load) -> EpochGroup | None:
        if order.ranks == 1:
            return None
        address = self._config.group_address(self._index)
        meeting = make_rendezvous(address, rank=order.rank, ranks=order.ranks)
        return ExpertGroup(meeting, record=self.record)

    def begin_epoch(self, engine_epoch: int) -> None:
        """Meet the other ranks anew with the first step of this epoch."""
        if self._group is not None:
            self._group.begin_epoch(engine_epoch)
        if self._experts is not None:
            self._experts.cancel()

    def place(self, order: PlaceExperts, report: Callable[[ExpertsPlaced], None]) -> None:
        """See `PlacingEngine`."""
        if self._experts is not None:
            self._experts.place(order, report)

    def leave(self, engine_epoch: int) -> None:
        """Let the other ranks know that this one does not go on."""
        if self._group is not None:
            self._group.leave(engine_epoch)

    def _make_cache(self, order: Load) -> None:
        model = self._model.config
        capacity = plan_capacity(
            self._config,
            model,
            order,
            bytes_per_block=KvCache.block_bytes(model, packed=self._packed),
            memory_bytes=self._pool_bytes(order),
            fills=self.fills_memory,
            draft_len=self._draft_len(),
            prefill_halo=self._prefill_halo(),
        )
        self.cache = KvCache(
            model,
            capacity.num_global_blocks,
            capacity.num_window_blocks,
            capacity.num_state_blocks + capacity.num_slots * scratch_blocks(capacity.draft_len),
            packed=self._packed,
            device=self.device,
        )
        self._parts = self._make_parts(order.rank)
        self._capacity = msgspec.structs.replace(
            capacity,
            prompt_work=prompt_work(model) if self._parts is not None else None,
            fingerprint=self._fingerprint,
            block_bytes=KvCache.block_bytes(model, packed=self._packed),
            experts=(0, 0, 0) if self._experts is None else self._experts.shape,
        )

    def _make_parts(self, rank: int) -> PartForward | None:
        """What computes chunks together with the other ranks, if this device and model can; rows
        that see no window before the tail would not see it in every part."""
        is_bounded = self._config.executor.prefill_tail == "bounded"
        if not isinstance(self._group, ExpertGroup) or not self.leaves_out or is_bounded:
            return None
        if not isinstance(self._model, SharingModel):
            return None
        return PartForward(self._model, self.cache, rank, self._group)

    def run_ops(self, ops: Sequence[BlockOp]) -> None:
        """Copy and clear blocks."""
        for op in ops:
            match op.kind:
                case OpKind.COPY:
                    self.cache.copy_block(op.pool, op.src, op.dst)
                case OpKind.ZERO:
                    self.cache.zero_block(op.pool, op.dst)

    def export_block(self, pool: Pool, block: int, out: Place) -> None:
        """Copy a block to host memory; see `KvCache.export_block`."""
        self.cache.export_block(pool, block, out)

    def import_block(self, pool: Pool, block: int, data: Place) -> None:
        """Fill a block from host memory."""
        self.cache.import_block(pool, block, data)

    @torch.inference_mode()
    def compute(self, live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
        """One forward over all rows, then one call of the sampler."""
        if not self._threads_set:  # a setting of each thread
            torch.set_num_threads(self._config.executor.threads)
            self._threads_set = True
        if self._experts is not None:
            self._experts.before(step)
        if self._group is not None:
            self._group.enter(step)
        if not len(live.rows):
            if self._parts is not None and step.part is not None:
                self._parts.run(step, 0)
            else:
                self._model.serve()
            self._note_work(step, live, 0)
            return self._counted(step, spread(None, live.rows, 0))
        if self._masks is not None:
            self._masks.begin(live, slots)
        wanted, context_ids = wanted_logits(live, slots), self._model.config.context_ids
        speculation = self._speculation_of(slots)
        if speculation is None:
            batch = StepBatch.of_slots(live, slots, wanted, context_ids)
        else:
            has_masks = self._masks is not None and live.masked.any()
            bound = self._masks.most_drafts(live, slots) if self._masks and has_masks else None
            live = speculation.trim(live, step, bound)
            wanted = np.where(live.drafted, live.counts, wanted)
            batch = speculation.batch(live, wanted, context_ids)
        touched = -1
        if self._parts is not None and step.part is not None:
            logits = self._parts.run(step, int(wanted.sum()))
        else:
            output = self._model.forward(batch, self.cache)
            logits, touched = output.logits, output.num_experts
        self._note_work(step, live, len(logits), touched)
        prompt = prompt_logprobs(logits, wanted, live, slots)
        drawn = draw_tokens(logits, wanted, live, slots, self._masks, speculation)
        if speculation is not None:
            drawn = drawn._replace(verified=live.counts - 1)
        if speculation is not None and step.descriptor.n_draft_passes:
            began_ns = time.perf_counter_ns()
            confidence = speculation.propose(live, drawn)
            drafting = speculation.drafting(confidence, time.perf_counter_ns() - began_ns)
            drawn = drawn._replace(confidence=confidence, drafting=drafting)
            if self._masks is not None and live.masked.any():
                self._masks.draft(live.slots, *speculation.drafts(live.slots))
        return self._counted(step, drawn._replace(prompt=prompt))

    def _note_work(self, step: SubmitStep, live: LiveRows, logits: int, touched: int = -1) -> None:
        """For metrics: this rank's part of a step."""
        split, arrived = step.descriptor.split, -1
        if self._experts is not None:
            arrived = int(np.frombuffer(self._experts.rows(), "<u4").sum())
        if self._parts is not None and step.part is not None and split is not None:
            part = part_of(split, self._capacity.rank)
            start, end = split.bounds[part : part + 2]
            skip = min(end, max(start, split.tail)) - start
            self.work.note_part(step.group_step, (start, end, skip), logits, expert_rows=arrived)
        else:
            self.work.note(step.group_step, live, logits, touched=touched, expert_rows=arrived)

    def _counted(self, step: SubmitStep, sampled: Sampled) -> Sampled:
        """With what a rank that is one of several has counted."""
        experts = self._experts
        if experts is None:
            return sampled
        return sampled._replace(experts=(experts.rows(), experts.loads(step)))

    def _prefill_halo(self) -> int:
        """See Capacity.

        Raises:
            ValueError: layers are to be left out that this device or model always runs.
        """
        tail, model = self._config.executor.prefill_tail, self._model.config
        if tail == "bounded" and not (self.leaves_out and bounded_halo(model)):
            raise ValueError(
                'executor.prefill_tail: "bounded" needs device "cpu", and a model whose upper '
                'layers leave nothing behind but window rows; use "exact"'
            )
        if tail == "full" or not self.leaves_out:
            return 0
        return bounded_halo(model) if tail == "bounded" else exact_halo(model)

    def _draft_len(self) -> int:
        """Drafts of a row, at most.

        Raises:
            ValueError: there is nothing to draft with.
        """
        asked, config = self._config.executor.draft_tokens, self._model.config
        if asked and not config.num_stages:
            raise ValueError("executor.draft_tokens: this checkpoint has no draft stages; use 0")
        if asked and (reason := self._no_drafts()):
            raise ValueError(f"executor.draft_tokens: {reason}; use 0")
        return min(asked, config.dspark_block_size)

    def _no_drafts(self) -> str:
        """Why there cannot be drafts here; empty: there can."""
        return "" if isinstance(self._model, Drafting) else f"device {self.device!r} cannot draft"

    def _can_draft(self, model: Model) -> TypeGuard[Drafting]:
        return self._capacity.draft_len > 0 and isinstance(model, Drafting)

    def _speculation_of(self, slots: SlotTable) -> Speculation | None:
        """The drafts of the slots' engine epoch, if there are to be any."""
        draft_len = self._capacity.draft_len
        if draft_len and (self._speculation is None or self._speculation.slots is not slots):
            assert isinstance(self._model, Drafting)
            self._speculation = self.speculation(self._model.draft, self.cache, slots, draft_len)
            self._speculation.rejects = self._config.executor.draft_acceptance == "rejection"
        return self._speculation if draft_len else None

    def close(self) -> None:
        """A step that waits for other ranks ends now."""
        self.begin_epoch(NO_EPOCH)
        if self._experts is not None:
            self._experts.close()
        if self._masks is not None:
            self._masks.close()
