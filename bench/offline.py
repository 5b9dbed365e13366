"""An executor's engine driven without a mesh: rows of given ids, all at one context."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.accounting import Touched, as_sets
from bench.watcher import Watcher
from deepmesh.config import load_config
from deepmesh.wire.messages import (
    BlockOp,
    Descriptor,
    Load,
    OpKind,
    Pool,
    SamplingParams,
    SlotInit,
    StepKind,
    SubmitStep,
)
from deepmesh.wire.packed import BLOCK, SLOT, pack_ids
from services.executor.batch import BatchRow, StepBatch
from services.executor.interface import LiveRows, OnProgress
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.runner import ModelEngine
from services.executor.slots import SlotTable

FIRST_ID = 32  # special tokens lie below
_STEP = SubmitStep(1, 1, 1, 1, Descriptor(StepKind.DECODE, 0, 0), rows=b"")


class Offline:
    """Up to `rows` requests in slots 0, 1, …; the last slot holds the prompt they begin with."""

    def __init__(self, folder: Path, *, rows: int, max_len: int, on_progress: OnProgress) -> None:
        """
        Args:
            rows: requests that decode at once.
            max_len: positions of each, at most.
        """
        size = 64
        blocks = -(-max_len // size)
        replace = msgspec.structs.replace
        config = load_config(None)
        config = replace(
            config,
            executor=replace(
                config.executor,
                slots=rows + 1,
                global_blocks=(rows + 1) * blocks,
                window_blocks=(rows + 1) * blocks,
            ),
            scheduler=replace(config.scheduler, max_rows=rows + 1),
        )
        self.engine = ModelEngine(config)
        order = Load(engine_epoch=1, rank=0, ranks=1, model=str(folder))
        self.capacity = self.engine.load(order, on_progress)
        self.engine.begin_epoch(1)
        model = self.engine.model
        assert isinstance(model, DeepseekV41)
        self._routed: list[set[int]] = []  # experts of each layer, of the latest look
        watcher = Watcher(lambda ids: self._routed.append(set(ids.flatten().tolist())))
        self._watched = DeepseekV41(model.config, model.weights, model.numerics, watcher)
        self.config = model.config
        self._rows, self._blocks = rows, blocks
        self._slots = SlotTable(self.capacity)
        self._generation = 0

    def begin(self, ids: NDArray[np.int32], context: int, *, chunk: int = 0) -> None:
        """Requests of these ids [rows, length], all computed up to position `context`.

        The first `context` ids of all rows must be equal: they are computed once and copied.
        """
        self._generation += 1
        rows, template = len(ids), self._rows
        assert rows <= self._rows
        assert (ids[:, :context] == ids[0, :context]).all()
        self._open(template, ids[0])
        for start in range(0, context, chunk or max(1, context)):
            self.prefill(start, min(context, start + (chunk or context)))
        for row in range(rows):
            self._open(row, ids[row])
            self._copy(template, row, -(-context // self.capacity.block_size))

    def prefill(self, start: int, end: int) -> None:
        """Positions of the prompt that all rows begin with."""
        live = self._live([self._rows], start, end - start)
        self.engine.compute(live, self._slots, _STEP)

    def decode(self, rows: int, position: int) -> None:
        """One token of each of the first rows, logits and greedy sampling included."""
        self.engine.compute(self._live(range(rows), position, 1), self._slots, _STEP)

    def touched(self, rows: int, position: int) -> Touched:
        """The same step once more, to see where it goes: the same bits, the same experts."""
        self._routed.clear()
        self._watched.forward(self._batch(range(rows), position), self.engine.cache)
        assert len(self._routed) == self.config.num_hidden_layers
        ids = tuple(self._slots.tokens[:rows, position].tolist())
        return Touched(as_sets(self._routed), ids, (position,) * rows)

    def logits(self, row: int, position: int) -> Tensor:
        """[1, vocab_size]: of one token of one row, computed once more."""
        return self.engine.model.forward(self._batch([row], position), self.engine.cache).logits

    def _batch(self, rows: Sequence[int], position: int) -> StepBatch:
        slots, width = self._slots, self.config.context_ids
        blocks = position // slots.block_size + 1
        return StepBatch.build(
            [
                BatchRow(
                    ids=slots.tokens[row, position : position + 1],
                    start=position,
                    global_blocks=slots.tables[Pool.GLOBAL][row, :blocks],
                    window_blocks=slots.tables[Pool.WINDOW][row, :blocks],
                    state_block=row,
                    context=slots.tokens[row, max(0, position - width) : position],
                )
                for row in rows
            ],
            width,
        )

    def close(self) -> None:
        """Give the memory back."""
        self.engine.close()

    def _open(self, slot: int, ids: NDArray[np.int32]) -> None:
        table = self._slots
        if table.is_open[slot]:
            table.close(np.array([(slot, table.gen[slot])], SLOT))
        gen = self._generation
        table.open(
            SlotInit(
                slot,
                gen,
                rid=slot + 1,
                epoch=1,
                ids=pack_ids(ids),
                prompt_len=len(ids),
                max_len=len(ids) + 1,
                sampling=SamplingParams(temperature=0.0),
                state_block=slot,
            )
        )
        held = range(self._blocks)
        entries = [
            (slot, gen, int(pool), index, slot * self._blocks + index)
            for pool in (Pool.GLOBAL, Pool.WINDOW)
            for index in held
        ]
        table.append(np.array(entries, BLOCK))

    def _copy(self, source: int, target: int, blocks: int) -> None:
        """Everything that the source's prompt left in the pools."""
        ops = [
            BlockOp(0, OpKind.COPY, pool, source * self._blocks + i, target * self._blocks + i)
            for pool in (Pool.GLOBAL, Pool.WINDOW)
            for i in range(blocks)
        ]
        self.engine.run_ops([*ops, BlockOp(0, OpKind.COPY, Pool.STATE, source, target)])

    def _live(self, slots: Sequence[int], start: int, count: int) -> LiveRows:
        num = len(slots)
        return LiveRows(
            rows=np.arange(num),
            slots=np.array(slots, np.int64),
            starts=np.full(num, start),
            counts=np.full(num, count),
            samples=np.ones(num, bool),
            drafted=np.zeros(num, bool),
            masked=np.zeros(num, bool),
        )


def random_rows(rows: int, context: int, length: int, vocab_size: int) -> NDArray[np.int32]:
    """Ids [rows, length], the first `context` of all rows the same, the rest each row's own."""
    draw = np.random.default_rng(0)
    first = min(FIRST_ID, vocab_size // 2)
    ids = draw.integers(first, vocab_size, (rows, length), dtype=np.int32)
    ids[:, :context] = ids[0, :context]
    return ids


def use_threads(threads: int) -> None:
    """Compute threads of this process from now on."""
    torch.set_num_threads(threads)
