"""Weights as the forward pass wants them: float32, transposed once, neighbours joined.

`*_t` is a linear's weight as [in, out]. FP8 and FP4 weights are exact in float32.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HyperWeights:
    """Hyper-connection of one sublayer, and the norm behind its collapse."""

    norm: Tensor  # [hidden]
    fn_t: Tensor  # [hc · hidden, (2 + hc) · hc]
    base: Tensor  # [(2 + hc) · hc]
    scale: Tensor  # [3]


@dataclass(frozen=True)
class CompressorWeights:
    """Only in KV sources."""

    kv_gate_t: Tensor  # [hidden, head_dim], or [hidden, 2 · head_dim] (values | gates) at ratio 2
    norm: Tensor  # [head_dim]
    index_key_t: Tensor  # [head_dim, index_head_dim]
    index_key_norm: Tensor  # [index_head_dim]


@dataclass(frozen=True)
class IndexerWeights:
    """Only in index sources."""

    query_t: Tensor  # [q_lora, index_heads · index_head_dim]
    heads_t: Tensor  # [hidden, index_heads]


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of one layer or draft stage."""

    sinks: Tensor  # [heads]
    down_t: Tensor  # [hidden, q_lora + head_dim]: wq_a | wkv
    q_norm: Tensor  # [q_lora]
    kv_norm: Tensor  # [head_dim]
    query_t: Tensor  # [q_lora, heads · head_dim]
    group_out_t: tuple[Tensor, ...]  # o_groups of [heads · head_dim / o_groups, o_lora]
    out_t: Tensor  # [o_groups · o_lora, hidden]
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    """Router, the experts that this rank owns, and the shared expert."""

    gate_t: Tensor  # [hidden, experts]
    bias: Tensor  # [experts]
    first_expert: int
    num_experts: int  # of all ranks
    w13_t: Tensor  # [local experts, hidden, 2 · inter]
    w2_t: Tensor  # [local experts, inter, hidden]
    shared_w13_t: Tensor  # [hidden, 2 · inter]
    shared_w2_t: Tensor  # [inter, hidden]


@dataclass(frozen=True)
class EngramWeights:
    """Table stays quantised, mapped from its file."""

    table: Tensor  # [rows, dim], float8_e4m3fn
    scales: Tensor  # [rows, dim / 32], UE8M0
    kv_t: Tensor  # [rows_per_token · dim, (hc + 1) · hidden]: keys of the streams | value
    q_weight: Tensor  # [hc, hidden]
    k_weight: Tensor  # [hc, hidden]
    multipliers: Tensor  # [order], int64
    primes: Tensor  # [order - 1, heads], int64
    offsets: Tensor  # [order - 1, heads], int64


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, or the block of a draft stage."""

    attn_hyper: HyperWeights
    ffn_hyper: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None = None


@dataclass(frozen=True)
class DraftWeights:
    """DSpark: the draft stages and their heads."""

    main_proj_t: Tensor  # [targets · hidden, hidden]
    main_norm: Tensor  # [hidden]
    stages: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    markov_embed: Tensor  # [vocab, rank]
    markov_head_t: Tensor  # [rank, vocab]
    confidence_t: Tensor  # [hidden + rank, 1]


@dataclass(frozen=True)
class ModelWeights:
    """All that a rank holds."""

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head_t: Tensor  # [hidden, vocab]
    compressed_ids: Tensor  # [vocab], int64: Engram's id of every token id
    draft: DraftWeights | None
