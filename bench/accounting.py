"""What a forward must read and multiply at least: counted from what it really touched.

Weights count as the checkpoint stores them, KV as its packed formats are, whatever a program keeps
in memory: the floor is the same for everyone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.executor.kv_sizes import window_row_bytes
from services.executor.model_config import ModelConfig
from services.executor.tensor_specs import TensorSpec, tensor_specs

# Of the draft stages, a forward feeds the window rows only.
_FED = ("main_proj.weight", "main_proj.scale", "main_norm.weight", "kv_norm.weight")
_FED += ("attn.wkv.weight", "attn.wkv.scale")
_SCORING = (".indexer.wq_b.", ".indexer.weights_proj.")


@dataclass(frozen=True)
class Touched:
    """One decode step: what it computed, and the experts that its router chose."""

    experts: tuple[frozenset[int], ...]  # by layer
    ids: tuple[int, ...]  # of every row
    positions: tuple[int, ...]


def weight_bytes(config: ModelConfig, step: Touched) -> int:
    """Weights that the step reads, each once."""
    return sum(_weight_bytes(config, spec, step) for spec in tensor_specs(config))


def kv_bytes(config: ModelConfig, step: Touched) -> int:
    """Window rows, selected compressed rows and index keys that the step's rows read."""
    positions = np.array(step.positions)
    layers = range(config.num_hidden_layers)
    window = np.minimum(positions + 1, config.sliding_window).sum() * len(layers)
    rows = sum(int(_selected(config, layer, positions).sum()) for layer in layers)
    keys = sum(int(_scored(config, i, positions).sum()) for i in config.index_source_layer_ids)
    row_bytes = config.head_dim // 2 + config.head_dim // 16
    key_bytes = config.index_head_dim // 2 + config.index_head_dim // 32
    return int(window) * window_row_bytes(config) + rows * row_bytes + keys * key_bytes


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """2 x active weights x tokens, and attention over the rows really attended; one logits row."""
    active = sum(_active(config, spec) for spec in tensor_specs(config))
    positions = np.arange(tokens)
    layers = range(config.num_hidden_layers)
    attended = int(np.minimum(positions + 1, config.sliding_window).sum()) * len(layers)
    attended += sum(int(_selected(config, layer, positions).sum()) for layer in layers)
    attention = 2 * 2 * config.num_attention_heads * config.head_dim * attended
    head = 2 * config.vocab_size * config.hidden_size
    return 2 * active * tokens + attention + head


def linear_shapes(config: ModelConfig, tokens: int) -> list[tuple[int, int, int, int]]:
    """(rows, inputs, outputs, how many) of the large products of a prefill of `tokens`."""
    hidden, inter, heads = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_attention_heads,
    )
    o_rank, layers = config.o_groups * config.o_lora_rank, config.num_hidden_layers
    share = max(1, tokens * config.num_experts_per_tok // config.n_routed_experts)
    experts = layers * config.n_routed_experts
    return [
        (tokens, hidden, config.q_lora_rank + config.head_dim, layers),
        (tokens, config.q_lora_rank, heads * config.head_dim, layers),
        (
            tokens,
            heads * config.head_dim // config.o_groups,
            config.o_lora_rank,
            layers * config.o_groups,
        ),
        (tokens, o_rank, hidden, layers),
        (tokens, hidden, 2 * inter, layers),
        (tokens, inter, hidden, layers),
        (share, hidden, 2 * inter, experts),
        (share, inter, hidden, experts),
    ]


def _weight_bytes(config: ModelConfig, spec: TensorSpec, step: Touched) -> int:
    name = spec.name
    if name.endswith("bias_vl"):  # image tokens only
        return 0
    if name.startswith("mtp."):
        return spec.num_bytes if name.endswith(_FED) else 0
    if spec.expert is not None:
        return spec.num_bytes if spec.expert in step.experts[_layer(name)] else 0
    if name == "embed.weight":
        return len(set(step.ids)) * spec.num_bytes // spec.shape[0]
    if ".engram.embed." in name:
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        return len(step.ids) * columns * spec.num_bytes // spec.shape[0]
    if any(part in name for part in _SCORING):
        scored = _scored(config, _layer(name), np.array(step.positions))
        return spec.num_bytes if scored.any() else 0
    return spec.num_bytes


def _active(config: ModelConfig, spec: TensorSpec) -> int:
    """Weights of this tensor that multiply a token, on average over the experts."""
    name = spec.name
    is_table = name in ("embed.weight", "head.weight") or ".engram.embed." in name
    if len(spec.shape) < 2 or is_table or name.endswith(("q_weight", "k_weight")):
        return 0
    if name.startswith("mtp."):
        return spec.num_parameters if name.endswith(_FED) else 0
    if spec.expert is not None:
        return spec.num_parameters if spec.expert < config.num_experts_per_tok else 0
    return spec.num_parameters


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _selected(config: ModelConfig, layer: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compressed rows that each position attends to in a layer."""
    ratio = config.compress_ratios[layer]
    if ratio == 0:
        return np.zeros_like(positions)
    return np.minimum((positions + 1) // ratio, config.index_topk)


def _scored(config: ModelConfig, layer: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index keys that each position is compared with in an index source; none if all are taken."""
    visible = (positions + 1) // config.compress_ratios[layer]
    keys = np.where(visible > config.index_topk, visible, 0)
    if config.uses_candidates(layer):
        keys = np.minimum(keys, config.candidate_topk_blocks * config.candidate_block_size)
    return keys


def mean_experts(steps: Sequence[Touched]) -> float:
    """Experts of a layer that a step touches."""
    counts: list[int] = [len(layer) for step in steps for layer in step.experts]
    return sum(counts) / len(counts)


def as_sets(layers: Sequence[Collection[int]]) -> tuple[frozenset[int], ...]:
    """Experts by layer, for `Touched`."""
    return tuple(frozenset(layer) for layer in layers)
