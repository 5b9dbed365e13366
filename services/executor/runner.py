"""The engine with the real model: rows of a step to a batch, forward, sample."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.config import Config
from deepmesh.wire.messages import BlockOp, Capacity, Load, OpKind, Pool, SubmitStep
from services.executor.batch import StepBatch
from services.executor.capacity import fingerprint, plan_capacity, planned_slots
from services.executor.device_clock import WorkerClock
from services.executor.interface import LiveRows, OnProgress, Sampled
from services.executor.kv_cache import KvCache, layout
from services.executor.kv_copy import Bytes
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.masks.protocol import MaskState
from services.executor.model_config import ModelConfig, load_config
from services.executor.models.outputs import StepOutput
from services.executor.parallel import NO_EPOCH, ExpertGroup
from services.executor.prompt_logprobs import prompt_logprobs, wanted_logits
from services.executor.rendezvous import make_rendezvous
from services.executor.sampler import sample
from services.executor.slots import SlotTable
from services.executor.step_costs import measure_costs
from services.executor.weights import load_model

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


class ModelEngine:
    """Weights and KV tensors of one rank on the CPU."""

    kind = "cpu"  # of arithmetic: another one may give other bits
    device = "cpu"  # where the tensors lie, as torch names it

    def __init__(self, config: Config, index: int = 0, masks: GrammarMasks | None = None) -> None:
        """
        Args:
            index: of the scheduler whose EP group this rank belongs to.
            masks: keep outputs to grammars; None: there are none.
        """
        self.clock = WorkerClock()
        self._masks = masks
        self._config, self._index = config, index
        self._group: ExpertGroup | None = None  # None: this rank is all there is
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
                vocab_size, num_slots = load_config(path).vocab_size, planned_slots(self._config)
                self._masks.start(path, vocab_size=vocab_size, num_slots=num_slots)
            self._group = self._make_group(order)
            self._model: Model = self._load_model(path, order, on_progress)
            self._packed = order.numerics != "exact"  # which rounds no rows
            engine = f"{self.kind} {layout(packed=self._packed)}"
            self._fingerprint = fingerprint(path, order.numerics, engine)
            self._make_cache(order)
            if self._group is None:  # ranks that step together would have to measure together
                torch.set_num_threads(self._config.executor.threads)
                costs = measure_costs(
                    self._model.config,
                    self._model.forward,
                    packed=self._packed,
                    device=self.device,
                )
                self._capacity = msgspec.structs.replace(self._capacity, costs=costs)
            has_masks = self._masks is not None and self._masks.wait_ready()
            grammars = self._config.executor.grammar_cache if has_masks else 0
            self._capacity = msgspec.structs.replace(
                self._capacity, has_masks=has_masks, grammars=grammars
            )
            self._loaded = wanted
        return msgspec.structs.replace(
            self._capacity, engine_epoch=order.engine_epoch, rank=order.rank
        )

    def _load_model(self, path: Path, order: Load, on_progress: OnProgress) -> Model:
        return load_model(
            path,
            numerics=order.numerics,
            rank=order.rank,
            ranks=order.ranks,
            exchange=self._group,
            progress=on_progress,
        )

    def _pool_bytes(self, order: Load) -> int:
        """What the KV pools may take."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(memory * POOL_SHARE / order.ranks)  # ranks may share a machine

    def _make_group(self, order: Load) -> ExpertGroup | None:
        if order.ranks == 1:
            return None
        address = self._config.group_address(self._index)
        return ExpertGroup(make_rendezvous(address, rank=order.rank, ranks=order.ranks))

    def begin_epoch(self, engine_epoch: int) -> None:
        """Meet the other ranks anew with the first step of this epoch."""
        if self._group is not None:
            self._group.begin_epoch(engine_epoch)

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
        )
        self.cache = KvCache(
            model,
            capacity.num_global_blocks,
            capacity.num_window_blocks,
            capacity.num_state_blocks,
            packed=self._packed,
            device=self.device,
        )
        self._capacity = msgspec.structs.replace(
            capacity,
            fingerprint=self._fingerprint,
            block_bytes=KvCache.block_bytes(model, packed=self._packed),
        )

    def run_ops(self, ops: Sequence[BlockOp]) -> None:
        """Copy and clear blocks."""
        for op in ops:
            match op.kind:
                case OpKind.COPY:
                    self.cache.copy_block(op.pool, op.src, op.dst)
                case OpKind.ZERO:
                    self.cache.zero_block(op.pool, op.dst)

    def export_block(self, pool: Pool, block: int, out: Bytes) -> None:
        """Copy a block to host memory; see `KvCache.export_block`."""
        self.cache.export_block(pool, block, out)

    def import_block(self, pool: Pool, block: int, data: Bytes) -> None:
        """Fill a block from host memory."""
        self.cache.import_block(pool, block, data)

    @torch.inference_mode()
    def compute(self, live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
        """One forward over all rows, then one call of the sampler."""
        if not self._threads_set:  # a setting of each thread
            torch.set_num_threads(self._config.executor.threads)
            self._threads_set = True
        if self._group is not None:
            self._group.enter(step)
        if not len(live.rows):
            self._model.serve()
            return spread(None, live.rows, 0)
        if self._masks is not None:
            self._masks.begin(live, slots)
        wanted = wanted_logits(live, slots)
        batch = StepBatch.of_slots(live, slots, wanted, self._model.config.context_ids)
        logits = self._model.forward(batch, self.cache).logits
        asking = np.flatnonzero(live.samples)
        prompt = prompt_logprobs(logits, wanted, live, slots)
        if not len(asking):
            return spread(None, asking, len(live.rows))._replace(prompt=prompt)
        if len(logits) > len(asking):
            logits = logits[torch.from_numpy(np.cumsum(wanted)[asking] - 1)]
        return self._draw(logits, asking, live, slots)._replace(prompt=prompt)

    def _draw(
        self, logits: Tensor, asking: NDArray[np.int64], live: LiveRows, slots: SlotTable
    ) -> Sampled:
        """A token for each of the rows `asking`; [asking, vocab_size] logits.

        Rows whose mask is not there sample nothing, whatever it would have allowed.
        """
        masks = self._masks
        if masks is None or not live.masked.any():
            drawn = sample(logits, [slots.sample_row(s) for s in live.slots[asking].tolist()])
            return spread(drawn, asking, len(live.rows))
        states = masks.collect(live, slots)
        may_draw = (states[asking] == MaskState.FREE) | (states[asking] == MaskState.MASK)
        drawn = None
        if may_draw.any():
            if not may_draw.all():
                logits = logits[torch.from_numpy(may_draw)]
            drawn = sample(
                logits,
                [
                    slots.sample_row(slot, masks.mask(slot) if state == MaskState.MASK else None)
                    for slot, state in zip(
                        live.slots[asking[may_draw]].tolist(),
                        states[asking[may_draw]].tolist(),
                        strict=True,
                    )
                ],
            )
        return masks.settle(live, slots, states, spread(drawn, asking[may_draw], len(live.rows)))

    def close(self) -> None:
        """A step that waits for other ranks ends now."""
        self.begin_epoch(NO_EPOCH)
        if self._masks is not None:
            self._masks.close()


def spread(drawn: Sampled | None, asking: NDArray[np.int64], num_rows: int) -> Sampled:
    """What was drawn for the rows that sample, as arrays over all rows."""
    tokens, finite = np.zeros(num_rows, np.int32), np.ones(num_rows, bool)
    logprobs = np.zeros(num_rows, np.float32)
    top_ids = [np.zeros(0, np.int32)] * num_rows
    top_logprobs = [np.zeros(0, np.float32)] * num_rows
    if drawn is not None:
        tokens[asking], finite[asking], logprobs[asking] = drawn[:3]
        for j, i in enumerate(asking.tolist()):
            top_ids[i], top_logprobs[i] = drawn.top_ids[j], drawn.top_logprobs[j]
    return Sampled(tokens, finite, logprobs, top_ids, top_logprobs)
