"""The forwards of one model over one cache: graphs of decode steps, and prompt chunks."""

import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.gpu.decode_program import DecodeProgram, bucket_for, bucket_sizes
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.draft_program import DraftProgram
from services.executor.gpu.draft_step import DraftStep
from services.executor.gpu.drafter import Draw
from services.executor.gpu.model import DeviceModel
from services.executor.kv_cache import KvCache


class ModelForwards:
    """See `Forwards`. On a GPU each bucket is captured once, so that a step is one launch."""

    def __init__(
        self,
        model: DeviceModel,
        cache: KvCache,
        *,
        max_rows: int,
        max_blocks: int,
        max_tokens: int | None = None,
    ) -> None:
        """
        Args:
            max_rows: of a step.
            max_blocks: width of a block table.
            max_tokens: of a step's decode rows, with their drafts; None: one each.
        """
        self._max_rows = max_rows
        self._model, self._cache = model, cache
        self._is_cuda = model.device.name.type == "cuda"
        self._programs: dict[int, DecodeProgram] = {}
        self._graphs = torch.cuda.graph_pool_handle() if self._is_cuda else None
        for size in reversed(
            bucket_sizes(max_tokens or max_rows)
        ):  # the largest first: the others fit its pool
            step = DecodeStep.empty(model.config, size, max_blocks, model.device.name)
            self._agree(size)
            program = self._programs[size] = DecodeProgram(model, cache, step)
            if self._is_cuda:
                program.capture(self._graphs)
        self._sizes = sorted(self._programs)

    @property
    def has_two_classes(self) -> bool:
        """See `Forwards`."""
        return self._model.prefill is not None

    @property
    def logits(self) -> list[Tensor]:
        """See `Forwards`."""
        return [program.logits for program in self._programs.values()]

    @property
    def max_tokens(self) -> int:
        """See `Forwards`."""
        return self._sizes[-1]

    @property
    def pairs(self) -> Tensor:
        """See `Forwards`."""
        return self._cache.pairs

    def draft_programs(self, places: int, draw: Draw) -> list[DraftProgram]:
        """See `Forwards`."""
        model, programs = self._model, list[DraftProgram]()
        assert model.drafter is not None, "the draft stages are not on the device"
        for size in reversed(bucket_sizes(self._max_rows)):
            step = DraftStep.empty(model.config, size, places, model.device.name)
            programs.append(DraftProgram(model.drafter, self._cache, step, draw))
            if self._is_cuda:
                programs[-1].capture(self._graphs)
        return programs[::-1]

    def step(self, num_rows: int) -> DecodeStep:
        """See `Forwards`."""
        assert num_rows <= self._sizes[-1], f"{num_rows} decode rows of {self._sizes[-1]}"
        return self._programs[bucket_for(self._sizes, num_rows)].step

    def decode(self, step: DecodeStep) -> Tensor:
        """See `Forwards`."""
        program = self._programs[step.num_tokens]
        if self._is_cuda:
            program.replay()
        else:
            self._agree(step.num_tokens)
            program.run()
        return program.logits

    def _agree(self, num_tokens: int) -> None:
        """Ranks of a group run a forward of this size."""
        if self._model.group is not None:
            self._model.group.padded = num_tokens

    def prefill(self, batch: StepBatch, padded: int = 0) -> Tensor:
        """See `Forwards`."""
        self._agree(padded)
        if self._model.prefill is not None:
            return self._model.prefill.forward(batch, self._cache).logits
        return self._model.launch(batch, self._cache).logits

    def serve(self, padded: int) -> None:
        """See `Forwards`."""
        self._agree(padded)
        self._model.serve()
