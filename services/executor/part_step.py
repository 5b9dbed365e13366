"""A rank's part of a chunk that all ranks compute together, from what its step says of it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from deepmesh.wire.messages import Part, Split, SubmitStep
from deepmesh.wire.packed import unpack_ids
from services.executor.batch import NO_BLOCK, BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.context_part import ContextPart, Swap
from services.executor.models.outputs import StepOutput


class _Ring:
    """A `Swap` of the group's ranks, seen in the order of their parts."""

    def __init__(self, swap: Swap, home: int, ranks: int) -> None:
        self._swap, self._ranks = swap, ranks
        self._first = (home + 1) % ranks

    def swap(self, sent: Sequence[Tensor], num_from: Sequence[int]) -> list[Tensor]:
        """See `Swap`."""
        ranks, first = self._ranks, self._first
        places = [(rank - first) % ranks for rank in range(ranks)]  # part of each rank
        got = self._swap.swap([sent[at] for at in places], [num_from[at] for at in places])
        return [got[(first + at) % ranks] for at in range(ranks)]


def part_of(split: Split, rank: int) -> int:
    """Which part a rank has."""
    return (rank - split.home - 1) % (len(split.bounds) - 1)


def context_part(split: Split, rank: int, swap: Swap) -> ContextPart:
    """What the model is to know of a rank's part."""
    ranks = len(split.bounds) - 1
    return ContextPart(
        rank=part_of(split, rank),
        bounds=split.bounds,
        tail=split.tail,
        swap=_Ring(swap, split.home, ranks),
        shared=split.shared,
    )


def part_batch(
    split: Split, part: Part, rank: int, *, num_logits: int, context_ids: int
) -> StepBatch:
    """The tokens of a rank's part: a batch of one row.

    Args:
        num_logits: of its last tokens.
        context_ids: `ModelConfig.context_ids`.
    Raises:
        ValueError: blocks of positions that it writes are missing.
    """
    start, end = split.bounds[part_of(split, rank) :][:2]
    ids = unpack_ids(part.ids)
    windows = unpack_ids(part.window_blocks)
    before = np.full(part.first_window, NO_BLOCK, np.int32)
    row = BatchRow(
        ids=ids[len(ids) - (end - start) :],
        start=start,
        global_blocks=unpack_ids(part.global_blocks),
        window_blocks=np.concatenate((before, windows)),
        state_block=part.state_block,
        context=ids[: len(ids) - (end - start)],
        num_logits=num_logits,
    )
    return StepBatch.build([row], context_ids)


@runtime_checkable
class SharingModel(Protocol):
    """A model whose ranks can compute a prompt's chunk together."""

    @property
    def config(self) -> ModelConfig:
        """Its shapes."""
        ...

    def forward_part(self, batch: StepBatch, cache: KvCache, part: ContextPart) -> StepOutput:
        """This rank's part of the chunk; all ranks enter."""
        ...


class PartForward:
    """The forward pass of a rank in steps whose chunk all ranks compute.

    It takes everything from the step: whether the chunk's row is alive is known to its own rank
    alone, and the others wait for that rank's part in any case.
    """

    def __init__(self, model: SharingModel, cache: KvCache, rank: int, swap: Swap) -> None:
        self._model, self._cache, self._rank, self._swap = model, cache, rank, swap

    def run(self, step: SubmitStep, num_logits: int) -> Tensor:
        """Compute this rank's part; the logits of its last `num_logits` tokens.

        Raises:
            ValueError: the step lacks what the part needs.
            GroupLost: a peer is gone.
        """
        split, part = step.descriptor.split, step.part
        if split is None or part is None:
            raise ValueError("a part of a chunk that is not split, or none of one that is")
        context_ids = self._model.config.context_ids
        batch = part_batch(split, part, self._rank, num_logits=num_logits, context_ids=context_ids)
        one = context_part(split, self._rank, self._swap)
        return self._model.forward_part(batch, self._cache, one).logits
