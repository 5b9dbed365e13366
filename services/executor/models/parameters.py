"""Weights as the forward pass wants them: linears packed once at load, neighbours joined.

FP8 and FP4 weights are exact in bfloat16, and so in the packed form. All else is float32.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.quant.linear import LinearWeight
from services.executor.models.spread import SpreadExperts


@dataclass(frozen=True)
class HyperWeights:
    """Hyper-connection of one sublayer, and the norm behind its collapse."""

    norm: Tensor  # [hidden]
    fn: LinearWeight  # hc · hidden -> (2 + hc) · hc
    base: Tensor  # [(2 + hc) · hc]
    scale: Tensor  # [3]


@dataclass(frozen=True)
class CompressorWeights:
    """Only in KV sources."""

    kv_gate: LinearWeight  # hidden -> head_dim, or 2 · head_dim (values | gates) at ratio 2
    norm: Tensor  # [head_dim]
    index_key: LinearWeight  # head_dim -> index_head_dim
    index_key_norm: Tensor  # [index_head_dim]


@dataclass(frozen=True)
class IndexerWeights:
    """Only in index sources."""

    query: LinearWeight  # q_lora -> index_heads · index_head_dim
    heads: LinearWeight  # hidden -> index_heads


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of one layer or draft stage."""

    sinks: Tensor  # [heads]
    down: LinearWeight  # hidden -> q_lora + head_dim: wq_a | wkv
    q_norm: Tensor  # [q_lora]
    kv_norm: Tensor  # [head_dim]
    query: LinearWeight  # q_lora -> heads · head_dim
    group_out: LinearWeight  # o_groups of heads · head_dim / o_groups -> o_lora
    out: LinearWeight  # o_groups · o_lora -> hidden
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MoeWeights:
    """Router, the experts that this rank owns, and the shared expert."""

    gate: LinearWeight  # hidden -> experts
    bias: Tensor  # [experts]
    spread: SpreadExperts
    w13: LinearWeight  # this rank's slots of hidden -> 2 · inter (w1 | w3)
    w2: LinearWeight  # this rank's slots of inter -> hidden
    shared_w13: LinearWeight  # hidden -> 2 · inter
    shared_w2: LinearWeight  # inter -> hidden


@dataclass(frozen=True)
class EngramWeights:
    """Table stays quantised, mapped from its file."""

    table: Tensor  # [rows, dim], float8_e4m3fn
    scales: Tensor  # [rows, dim / 32], UE8M0
    kv: LinearWeight  # rows_per_token · dim -> (hc + 1) · hidden: keys of the streams | value
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

    main_proj: LinearWeight  # targets · hidden -> hidden
    main_norm: Tensor  # [hidden]
    stages: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    markov_embed: Tensor  # [vocab, rank]
    markov_head: LinearWeight  # rank -> vocab
    confidence: LinearWeight  # hidden + rank -> 1


@dataclass(frozen=True)
class ModelWeights:
    """All that a rank holds."""

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: LinearWeight  # hidden -> vocab
    compressed_ids: Tensor  # [vocab], int64: Engram's id of every token id
    draft: DraftWeights | None
