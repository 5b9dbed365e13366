"""Engram: rows of a large table, chosen by the last ids, added to the residual streams."""

import torch
from torch import Tensor

from kernels.engram.gate import add_gated, engram_gate
from kernels.engram.gather import gather_rows
from kernels.engram.hash import ngram_rows
from services.executor.batch import StepBatch
from services.executor.model_config import ModelConfig
from services.executor.models.numerics import Numerics
from services.executor.models.parameters import EngramWeights


class Engram:
    """One Engram layer."""

    def __init__(
        self, config: ModelConfig, weights: EngramWeights, pad_id: int, numerics: Numerics
    ) -> None:
        self._config, self._weights, self._pad_id = config, weights, pad_id
        self._num = numerics

    def rows(self, last_ids: Tensor) -> Tensor:
        """Rows of the table for each token, from `last_compressed_ids`."""
        weights = self._weights
        return ngram_rows(
            last_ids, self._pad_id, weights.multipliers, weights.primes, weights.offsets
        )

    def __call__(self, streams: Tensor, rows: Tensor) -> Tensor:
        """The streams with each its gated share of the looked-up value."""
        weights, hc = self._weights, self._config.hc_mult
        found = gather_rows(weights.table, weights.scales, rows)
        both = self._num.fp8_linear(found, weights.kv)
        keys, value = both.split((hc * self._config.hidden_size, self._config.hidden_size), 1)
        keys = keys.unflatten(1, (hc, -1))
        gate = engram_gate(
            streams, keys, weights.q_weight, weights.k_weight, self._config.rms_norm_eps
        )
        return add_gated(streams, gate, value, bf16=self._num.bf16)


def last_compressed_ids(batch: StepBatch, table: Tensor, row_of: Tensor, order: int) -> Tensor:
    """[num_tokens, order], int64: compressed id 0, 1, … positions back, -1 where there is none."""
    context = order - 1
    # Each row laid out behind its own context; a row can then look back without leaving it.
    padded = batch.engram_context.new_empty(batch.num_tokens + context * batch.num_rows)
    place = torch.arange(batch.num_tokens) + context * (row_of + 1)
    padded[place] = batch.ids
    starts = batch.row_starts[:-1] + context * torch.arange(batch.num_rows)
    padded[starts.unsqueeze(1) + torch.arange(context)] = batch.engram_context[:, -context:]
    ids = padded[place.unsqueeze(1) - torch.arange(order)]
    return torch.where(ids >= 0, table[ids.clamp_min(0)], -1)
