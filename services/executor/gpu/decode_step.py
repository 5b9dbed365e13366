"""Index tensors of a decode step at fixed addresses: what a graph of one bucket reads.

A token is one row of every tensor. A padding row has position -1; its slots are -1 throughout, so
that it reads and writes nothing, and it goes to no expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.models.plan import Angles


@dataclass(frozen=True)
class DecodeRatio:
    """Compressed rows of one ratio."""

    entries: int  # of a block
    slots: Tensor  # [tokens, index_topk], int32: all entries that a token sees, -1 behind them
    visible: Tensor  # [tokens], int32: how many it sees; above index_topk they are chosen by score
    write_slots: Tensor  # [tokens], int32: of the entry that the token completes, -1: none
    angles: Angles  # [tokens, rope_dim / 2], float32: of that entry


@dataclass(frozen=True)
class DecodeStep:
    """All inputs of the forward of one bucket."""

    ids: Tensor  # [tokens], int32; 0 for a padding row
    last_ids: Tensor  # [tokens, engram order], int64, as `ngram_rows` takes them: compressed ids of
    # the token and of those before it, newest first, -1 for none
    positions: Tensor  # [tokens], int32
    blocks: Tensor  # [tokens, max_blocks], int32: table of the global pool
    state_blocks: Tensor  # [tokens], int32: of open pairs; -1 for a padding row
    window_slots: Tensor  # [tokens, sliding_window], int32, oldest first
    window_writes: Tensor  # [tokens], int32
    plain: Angles  # [tokens, rope_dim / 2], float32
    compressed: Angles
    ratios: dict[int, DecodeRatio]
    rows: Tensor  # [tokens], int32: 0, 1, … (every token is a row of its own)

    @property
    def num_tokens(self) -> int:
        """Rows of the bucket."""
        return self.ids.shape[0]

    @staticmethod
    def empty(
        config: ModelConfig, num_tokens: int, max_blocks: int, device: torch.device
    ) -> "DecodeStep":
        """All padding."""

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((num_tokens, *shape), -1, dtype=dtype, device=device)

        def angles() -> Angles:
            half = config.qk_rope_head_dim // 2
            return (
                torch.zeros(num_tokens, half, device=device),
                torch.zeros(num_tokens, half, device=device),
            )

        ratios = {config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        return DecodeStep(
            ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
            last_ids=ints(config.engram_max_ngram_size, dtype=torch.int64),
            positions=ints(),
            blocks=ints(max_blocks),
            state_blocks=ints(),
            window_slots=ints(config.sliding_window),
            window_writes=ints(),
            plain=angles(),
            compressed=angles(),
            ratios={
                ratio: DecodeRatio(
                    BLOCK_TOKENS // ratio, ints(config.index_topk), ints(), ints(), angles()
                )
                for ratio in sorted(ratios)
            },
            rows=torch.arange(num_tokens, dtype=torch.int32, device=device),
        )
