"""What each token of a long prompt costs, so that its chunks can be cut by work. No torch."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import PromptWork
from services.executor.model_config import ModelConfig
from services.executor.tensor_specs import TensorSpec, tensor_specs

ALIGN = 16  # positions between which a chunk may be cut: whole groups of compressed rows

Work = NDArray[np.int64]  # multiply-adds by token


@dataclass(frozen=True)
class TokenWork:
    """Multiply-adds of each token of a chunk, whoever's experts it needs."""

    encoder: Work  # layers below the first decoder layer, and that layer's compressed rows
    decoder: Work  # the others

    def of_parts(self, bounds: Sequence[int], tail: int = 0) -> list[tuple[int, int]]:
        """Encoder and decoder work of each part.

        Args:
            bounds: of the parts, as tokens of the chunk.
            tail: first token that runs through the decoder layers.
        """
        parts = itertools.pairwise(bounds)
        return [
            (int(self.encoder[a:b].sum()), int(self.decoder[max(a, tail) : max(b, tail)].sum()))
            for a, b in parts
        ]


def token_work(config: ModelConfig, start: int, end: int) -> TokenWork:
    """Work of the tokens at positions start .. end - 1."""
    positions = np.arange(start, end, dtype=np.int64)
    halves = np.tile(np.array(_weights(config), np.int64)[:, None], end - start)
    split = config.candidate_source_layer_id
    heads = config.num_attention_heads * config.head_dim
    index_heads = config.index_n_heads * config.index_head_dim
    for layer in range(config.num_hidden_layers):
        half, ratio = halves[0 if layer < split else 1], config.compress_ratios[layer]
        attended = np.minimum(positions + 1, config.sliding_window)
        if ratio:
            attended = attended + np.minimum((positions + 1) // ratio, config.index_topk)
        half += 2 * heads * attended
        if layer in config.index_source_layer_ids:
            half += index_heads * _scored(config, layer, positions)
    return TokenWork(halves[0], halves[1])


def tail_start(config: ModelConfig, end: int) -> int:
    """First position to run through the decoder layers, so that the last window of positions
    before `end` has exact rows in every layer and exact outputs."""
    decoder_layers = config.num_hidden_layers - config.candidate_source_layer_id
    window = config.sliding_window
    return max(0, end - window - decoder_layers * (window - 1))


def prompt_work(config: ModelConfig) -> PromptWork:
    """What the scheduler cuts by: the encoder's work of tokens at the positions where it bends.

    Between two of these it is a line but for the steps of whole compressed rows, which are less
    than a thousandth of it.
    """
    bends = {0, config.sliding_window}
    for ratio in {config.compress_ratios[layer] for layer in config.index_source_layer_ids}:
        bends |= {ratio * config.index_topk, ratio * (config.index_topk + 1)}
    last = config.max_model_len - 1
    near = {at + step for at in bends for step in (-2, -1, 0, 1)} | {last}
    positions = sorted(at for at in near if 0 <= at <= last)
    work = [int(token_work(config, at, at + 1).encoder[0]) for at in positions]
    return PromptWork(positions, work, align=ALIGN)


@functools.cache
def _weights(config: ModelConfig) -> tuple[int, int]:
    """Weights below and above the split that multiply one token, whatever its position."""
    halves, split = [0, 0], config.candidate_source_layer_id
    for spec in tensor_specs(config):
        part = spec.name.split(".")
        if part[0] == "layers":
            is_shared_row = ".compressor." in spec.name or ".indexer.wk." in spec.name
            is_encoder = int(part[1]) < split or (int(part[1]) == split and is_shared_row)
            halves[0 if is_encoder else 1] += _active(config, spec)
    return halves[0], halves[1]


def _active(config: ModelConfig, spec: TensorSpec) -> int:
    """Weights of a tensor that multiply one token."""
    is_table = ".engram.embed." in spec.name or spec.name.endswith(("q_weight", "k_weight"))
    if len(spec.shape) < 2 or is_table:
        return 0
    if spec.expert is not None and spec.expert >= config.num_experts_per_tok:
        return 0  # a token has so many experts, and all are alike
    return spec.num_parameters


def _scored(config: ModelConfig, layer: int, positions: Work) -> Work:
    """Index keys that each position is compared with; none where all entries are taken."""
    visible = (positions + 1) // config.compress_ratios[layer]
    keys = np.where(visible > config.index_topk, visible, 0)
    if config.uses_candidates(layer):
        keys = np.minimum(keys, config.candidate_topk_blocks * config.candidate_block_size)
    return keys
