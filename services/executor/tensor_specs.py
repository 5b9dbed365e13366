"""Every tensor of the released checkpoint layout: name, shape, dtype. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.executor.model_config import ModelConfig

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}
# Vision tensors of the released files; the text model neither needs nor reads them.
IGNORED_PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must look like; dtype is safetensors' name of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        size = DTYPE_BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size

    @property
    def num_parameters(self) -> int:
        """Weights that it holds: two in a byte of packed FP4, none in scales."""
        if self.dtype == "F8_E8M0":
            return 0
        return self.num_bytes // DTYPE_BYTES[self.dtype] * (2 if self.dtype == "I8" else 1)

    @property
    def expert(self) -> int | None:
        """Routed expert that it belongs to."""
        parts = self.name.split(".experts.")
        return int(parts[1].split(".")[0]) if len(parts) == 2 else None


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """All tensors of the text model and its draft stages, in forward order."""
    return list(_all(config))


def rank_experts(num_experts: int, rank: int, ranks: int) -> range:
    """Routed experts that a rank owns: contiguous, sizes differ by at most one."""
    return range(rank * num_experts // ranks, (rank + 1) * num_experts // ranks)


def _all(config: ModelConfig) -> Iterator[TensorSpec]:
    yield TensorSpec("embed.weight", (config.vocab_size, config.hidden_size), "BF16")
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        if layer in config.engram_layer_ids:
            yield from _engram(config, prefix + "engram.", layer)
        yield from _block(config, prefix, layer, config.n_routed_experts)
    yield TensorSpec("norm.weight", (config.hidden_size,), "BF16")
    yield TensorSpec("head.weight", (config.vocab_size, config.hidden_size), "BF16")
    for stage in range(config.num_stages):
        yield from _stage(config, stage)


def _block(config: ModelConfig, prefix: str, layer: int, experts: int) -> Iterator[TensorSpec]:
    hc, hidden = config.hc_mult, config.hidden_size
    for site in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}{site}_norm.weight", (hidden,), "BF16")
        yield TensorSpec(f"{prefix}hc_{site}_fn", ((2 + hc) * hc, hc * hidden), "F32")
        yield TensorSpec(f"{prefix}hc_{site}_base", ((2 + hc) * hc,), "F32")
        yield TensorSpec(f"{prefix}hc_{site}_scale", (3,), "F32")
    yield from _attention(config, prefix + "attn.", layer)
    yield from _ffn(config, prefix + "ffn.", experts)


def _attention(config: ModelConfig, prefix: str, layer: int) -> Iterator[TensorSpec]:
    hidden, dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    yield TensorSpec(prefix + "attn_sink", (heads,), "F32")
    yield TensorSpec(prefix + "q_norm.weight", (config.q_lora_rank,), "BF16")
    yield TensorSpec(prefix + "kv_norm.weight", (dim,), "BF16")
    yield from _fp8(prefix + "wq_a", config.q_lora_rank, hidden)
    yield from _fp8(prefix + "wq_b", heads * dim, config.q_lora_rank)
    yield from _fp8(prefix + "wkv", dim, hidden)
    o_rank = config.o_groups * config.o_lora_rank
    yield from _fp8(prefix + "wo_a", o_rank, heads * dim // config.o_groups)
    yield from _fp8(prefix + "wo_b", hidden, o_rank)
    index_dim = config.index_head_dim
    if layer in config.kv_source_layer_ids:
        yield TensorSpec(prefix + "compressor.wkv.weight", (dim, hidden), "BF16")
        yield TensorSpec(prefix + "compressor.norm.weight", (dim,), "BF16")
        if config.compress_ratios[layer] == 2:
            yield TensorSpec(prefix + "compressor.wgate.weight", (dim, hidden), "BF16")
        yield TensorSpec(prefix + "indexer.wk.weight", (index_dim, dim), "BF16")
        yield TensorSpec(prefix + "indexer.k_norm.weight", (index_dim,), "BF16")
    if layer in config.index_source_layer_ids:
        yield from _fp8(
            prefix + "indexer.wq_b", config.index_n_heads * index_dim, config.q_lora_rank
        )
        yield TensorSpec(
            prefix + "indexer.weights_proj.weight", (config.index_n_heads, hidden), "BF16"
        )


def _ffn(config: ModelConfig, prefix: str, experts: int) -> Iterator[TensorSpec]:
    hidden, inter = config.hidden_size, config.moe_intermediate_size
    yield TensorSpec(prefix + "gate.weight", (experts, hidden), "BF16")
    yield TensorSpec(prefix + "gate.bias", (experts,), "F32")
    yield TensorSpec(prefix + "gate.bias_vl", (experts,), "F32")
    shapes = (("w1", inter, hidden), ("w2", hidden, inter), ("w3", inter, hidden))
    for expert in range(experts):
        for name, rows, cols in shapes:
            base = f"{prefix}experts.{expert}.{name}"
            yield TensorSpec(base + ".weight", (rows, cols // 2), "I8")
            yield TensorSpec(base + ".scale", (rows, cols // 32), "F8_E8M0")
    for name, rows, cols in shapes:
        yield from _fp8(f"{prefix}shared_experts.{name}", rows, cols)


def _engram(config: ModelConfig, prefix: str, layer: int) -> Iterator[TensorSpec]:
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    dim, hc = config.engram_head_dim, config.hc_mult
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    yield TensorSpec(prefix + "embed.weight", (rows, dim), "F8_E4M3")
    yield TensorSpec(prefix + "embed.scale", (rows, dim // 32), "F8_E8M0")
    yield from _fp8(prefix + "wkv", config.hidden_size * (hc + 1), columns * dim)
    yield TensorSpec(prefix + "q_weight", (hc, config.hidden_size), "BF16")
    yield TensorSpec(prefix + "k_weight", (hc, config.hidden_size), "BF16")


def _stage(config: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    prefix, hidden = f"mtp.{stage}.", config.hidden_size
    if stage == 0:
        yield from _fp8(prefix + "main_proj", hidden, hidden * len(config.dspark_target_layer_ids))
        yield TensorSpec(prefix + "main_norm.weight", (hidden,), "BF16")
    layer = config.num_hidden_layers + stage
    yield from _block(config, prefix, layer, config.dspark_n_routed_experts)
    if stage == config.num_stages - 1:
        rank = config.dspark_markov_rank
        yield TensorSpec(prefix + "norm.weight", (hidden,), "BF16")
        for name in ("embed", "head"):
            shape = (config.vocab_size, rank)
            yield TensorSpec(f"{prefix}markov_head.{name}.weight", shape, "BF16")
        yield TensorSpec(prefix + "confidence_head.proj.weight", (1, hidden + rank), "BF16")


def _fp8(name: str, rows: int, cols: int) -> Iterator[TensorSpec]:
    yield TensorSpec(name + ".weight", (rows, cols), "F8_E4M3")
    yield TensorSpec(name + ".scale", (-(-rows // 32), -(-cols // 32)), "F8_E8M0")
