"""Fills a `DecodeStep` from a batch of single tokens as the host plans it, and runs programs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.gpu.decode_program import DecodeProgram
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.model import DeviceModel
from services.executor.kv_cache import KvCache
from services.executor.models.engram import last_compressed_ids
from services.executor.models.outputs import StepOutput
from services.executor.models.plan import Ropes, plan_step


def fill(
    step: DecodeStep, batch: StepBatch, cache: KvCache, compressed_ids: Tensor, first: int = 0
) -> None:
    """Rows `first`, first + 1, … of `step` become the batch's tokens, all others padding."""
    config, tokens = cache.config, batch.num_tokens
    assert tokens == batch.num_rows
    plan = plan_step(batch, cache, config, Ropes(config))
    order = config.engram_max_ngram_size
    window_null = cache.window.shape[1] - 1
    blank = DecodeStep.empty(config, step.num_tokens, step.blocks.shape[1], step.ids.device)
    some = slice(first, first + tokens)

    def put(to: Tensor, empty: Tensor, values: Tensor, null: int | None = None) -> None:
        if null is not None:
            values = torch.where(values == null, -1, values)
        to.copy_(empty)
        to[some, ..., : values.shape[-1]] = values.to(to)

    def put_each(to: Tensor, empty: Tensor, values: Tensor) -> None:
        to.copy_(empty)
        to[some] = values.to(to)

    put_each(step.ids, blank.ids, batch.ids)
    last = last_compressed_ids(batch, compressed_ids, plan.row_of, order)
    put_each(step.last_ids, blank.last_ids, last)
    put_each(step.positions, blank.positions, plan.positions)
    put(step.blocks, blank.blocks, batch.global_blocks)
    put_each(step.state_blocks, blank.state_blocks, batch.state_blocks)
    put(step.window_slots, blank.window_slots, plan.window_slots, window_null)
    put_each(step.window_writes, blank.window_writes, plan.window_writes)
    for ours, empty, planned in (
        (step.plain, blank.plain, plan.plain),
        (step.compressed, blank.compressed, plan.compressed),
    ):
        for to, of_blank, values in zip(ours, empty, planned, strict=True):
            put_each(to, of_blank, values)
    for number, ratio in step.ratios.items():
        own, empty = plan.ratios[number], blank.ratios[number]
        slots = own.table.slots(plan.row_of, own.all_visible)
        put(ratio.slots, empty.slots, slots, own.table.null_row)
        put_each(ratio.visible, empty.visible, own.visible)
        ratio.write_slots.copy_(empty.write_slots)
        ratio.write_slots[first + own.ending] = own.write_slots.to(ratio.write_slots)
        for to, values in zip(ratio.angles, own.angles, strict=True):
            to.zero_()
            to[first + own.ending] = values.to(to)


class ProgramModel:
    """A model whose steps of single tokens run as programs, all others as forwards."""

    def __init__(
        self,
        model: DeviceModel,
        compressed_ids: Tensor,
        buckets: Sequence[int],
        max_blocks: int,
        *,
        first: int = 0,
        graph: bool = False,
    ) -> None:
        """`first`: padding rows before the tokens."""
        self.model, self.runs = model, 0
        self._compressed_ids, self._buckets = compressed_ids, buckets
        self._max_blocks, self._first, self._graph = max_blocks, first, graph
        self.programs: dict[int, DecodeProgram] = {}

    def forward(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """See `DeviceModel.forward`."""
        if batch.num_tokens != batch.num_rows:
            return self.model.forward(batch, cache)
        rows = next(size for size in self._buckets if size >= batch.num_rows + self._first)
        if rows not in self.programs:
            device = self.model.device.name
            step = DecodeStep.empty(self.model.config, rows, self._max_blocks, device)
            self.programs[rows] = DecodeProgram(self.model, cache, step)
            if self._graph:
                self.programs[rows].capture()
        program = self.programs[rows]
        fill(program.step, batch, cache, self._compressed_ids, self._first)
        program.replay() if self._graph else program.run()
        self.runs += 1
        some = slice(self._first, self._first + batch.num_tokens)
        return StepOutput(program.logits[some].clone().cpu(), program.features[some].clone())
