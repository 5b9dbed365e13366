"""Known faults to plant: the check's positive control. Each makes a request depend on others."""

from dataclasses import replace

import torch
from msgspec.structs import replace as replace_fields

from bench.determinism.engines import KeptEngine
from deepmesh.config import Config
from deepmesh.wire.messages import Capacity, Load, SubmitStep
from services.executor.batch import NO_ID, StepBatch
from services.executor.interface import OnProgress
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.outputs import StepOutput
from services.executor.runner import Model

FAULTS = {
    "split_k": "sums are split in two when a step has more than four rows",
    "seed": "noise depends on the slot that a request happens to get",
    "chunk": "a chunk forgets the ids before it",
    "order": "rounding depends on the place of a row in its step",
}


class FaultyModel:
    """A model that computes right, but for one fault."""

    def __init__(self, model: Model, fault: str) -> None:
        self._model, self._fault = model, fault

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self._model.config

    def serve(self) -> None:
        """As the model does."""
        self._model.serve()

    def forward(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """As the model does, then the fault."""
        if self._fault == "chunk":
            widths = batch.row_starts.diff()
            context = torch.where(widths[:, None] > 1, NO_ID, batch.engram_context)
            batch = replace(batch, engram_context=context)
        output = self._model.forward(batch, cache)
        logits = output.logits
        if self._fault == "split_k" and batch.num_rows > 4:
            logits = logits * 0.3 + logits * 0.7  # the same sum, in two parts
        if self._fault == "order":
            is_odd = torch.arange(len(logits)) % 2 == 1
            logits = torch.where(is_odd[:, None], logits * 0.3 + logits * 0.7, logits)
        return replace(output, logits=logits)


class FaultyEngine(KeptEngine):
    """The engine with a faulty model."""

    def __init__(self, config: Config, fault: str) -> None:
        super().__init__(config)
        self._fault = fault

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """As the engine does, then the fault."""
        capacity = super().load(order, on_progress)
        if not isinstance(self._model, FaultyModel):
            self._model = FaultyModel(self._model, self._fault)
        return capacity


def seed_by_slot(step: SubmitStep) -> SubmitStep:
    """The fault `seed`."""
    inits = [replace_fields(init, seed=init.seed + init.slot) for init in step.init]
    return replace_fields(step, init=inits)
