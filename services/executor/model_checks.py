"""What a `ModelConfig` must satisfy before its weights are worth reading."""

from kernels.engram.constants import table_primes
from services.executor.model_config import BLOCK_TOKENS, ModelConfig

POSITIVE = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank"),
    *("o_groups", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
    *("candidate_topk_blocks", "candidate_block_size", "n_routed_experts"),
    *("num_experts_per_tok", "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters"),
    *("engram_max_ngram_size", "factor", "original_max_position_embeddings"),
)
DRAFT_POSITIVE = (
    *("dspark_block_size", "dspark_markov_rank"),
    *("dspark_n_routed_experts", "dspark_num_experts_per_tok"),
)
ENGRAM_MOST = {"engram_max_ngram_size": 16, "engram_n_heads": 256, "engram_vocab_size": 1 << 31}


def config_problems(config: ModelConfig) -> list[str]:
    """Every constraint that does not hold, each text starting with the key at fault."""
    problems = _positive(config)
    if problems:  # the rest would divide by them
        return problems
    problems = _shapes(config) + _layers(config)
    if problems:  # roles of layers that do not exist
        return problems
    return _sources(config) + _engram(config) + _draft(config)


def _positive(config: ModelConfig) -> list[str]:
    return [f"{key}: must be positive" for key in POSITIVE if getattr(config, key) <= 0]


def _shapes(config: ModelConfig) -> list[str]:
    problems: list[str] = []
    quantised = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "q_lora_rank": config.q_lora_rank,
        "head_dim": config.head_dim,
        "index_head_dim": config.index_head_dim,
        "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
    }
    if config.engram_layer_ids:
        quantised["engram_head_dim"] = config.engram_head_dim
    for key, value in quantised.items():
        if value % 32:
            problems.append(f"{key}: {value} is not a multiple of 32")
    if config.num_attention_heads % config.o_groups:
        problems.append("o_groups: must divide num_attention_heads")
    elif config.num_attention_heads * config.head_dim // config.o_groups % 32:
        problems.append("o_groups: num_attention_heads * head_dim / o_groups must divide by 32")
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > min(config.head_dim, config.index_head_dim):
        problems.append("qk_rope_head_dim: must be even and at most head_dim and index_head_dim")
    if config.num_experts_per_tok > config.n_routed_experts:
        problems.append("num_experts_per_tok: more than n_routed_experts")
    if config.weight_block_size != 32:
        problems.append(f"weight_block_size: {config.weight_block_size} is not supported, only 32")
    if config.expert_dtype != "fp4":
        problems.append(f"expert_dtype: {config.expert_dtype!r} is not supported, only 'fp4'")
    reach = config.candidate_topk_blocks * config.candidate_block_size
    if reach - (config.candidate_block_size - 1) < config.index_topk:
        problems.append("candidate_topk_blocks: the candidate blocks hold fewer than index_topk")
    return problems


def _layers(config: ModelConfig) -> list[str]:
    problems: list[str] = []
    layers, stages = config.num_hidden_layers, config.num_stages
    if len(config.compress_ratios) != layers + stages:
        problems.append(
            f"compress_ratios: {len(config.compress_ratios)} entries, need {layers} layers"
            f" + {stages} draft stages"
        )
    bad = sorted({ratio for ratio in config.compress_ratios if ratio not in (0, 1, 2)})
    if bad:
        problems.append(f"compress_ratios: {bad} not supported, only 0, 1 and 2")
    if any(config.compress_ratios[layers:]):
        problems.append("compress_ratios: draft stages must have ratio 0")
    for key in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids = getattr(config, key)
        if any(not 0 <= i < layers for i in ids) or list(ids) != sorted(set(ids)):
            problems.append(f"{key}: must be ascending layers below {layers}, not {list(ids)}")
    return problems


def _sources(config: ModelConfig) -> list[str]:
    problems: list[str] = []
    ratios, kv_sources = config.compress_ratios, config.kv_source_layer_ids
    if not set(kv_sources) <= set(config.index_source_layer_ids):
        problems.append("kv_source_layer_ids: each must be in index_source_layer_ids, too")
    if any(ratios[i] == 0 for i in config.index_source_layer_ids):
        problems.append("index_source_layer_ids: a layer of ratio 0 is no source")
    for layer in range(config.num_hidden_layers):
        source = config.kv_source(layer)
        if ratios[layer] and source is None:
            problems.append(f"kv_source_layer_ids: no source at or below layer {layer}")
        elif source is not None and ratios[source] != ratios[layer]:
            problems.append(f"compress_ratios: layer {layer} differs from its source {source}")
    first = config.candidate_source_layer_id
    if first not in kv_sources:
        problems.append("candidate_source_layer_id: must be in kv_source_layer_ids")
    # The encoder/decoder split that prefill truncation rests on; released: half of the layers each.
    if any(ratio != 1 for ratio in ratios[first : config.num_hidden_layers]):
        problems.append(f"compress_ratios: layers from {first} on must have ratio 1")
    if any(i > first for i in kv_sources):
        problems.append(f"kv_source_layer_ids: none may lie above layer {first}")
    assert BLOCK_TOKENS % max(1, *ratios) == 0
    return problems


def _engram(config: ModelConfig) -> list[str]:
    layers, tables = config.engram_layer_ids, config.engram_num_embeddings
    if len(layers) != len(tables):
        return [f"engram_num_embeddings: {len(tables)} tables for {len(layers)} engram_layer_ids"]
    if not layers:
        return []
    keys = ("engram_vocab_size", "engram_n_heads", "engram_compressed_vocab_size")
    problems = [f"{key}: must be positive" for key in keys if getattr(config, key) <= 0]
    for key, most in ENGRAM_MOST.items():  # primes are looked for, one for each of these
        if getattr(config, key) > most:
            problems.append(f"{key}: {getattr(config, key)} is more than {most}")
    if max(layers) >= config.candidate_source_layer_id:
        problems.append("engram_layer_ids: must lie below candidate_source_layer_id")
    if not 0 <= config.engram_pad_token_id < config.vocab_size:
        problems.append("engram_pad_token_id: outside the vocabulary")
    if problems:
        return problems
    primes = table_primes(
        len(layers), config.engram_max_ngram_size, config.engram_n_heads, config.engram_vocab_size
    )
    wanted = tuple(sum(flat) for flat in primes)
    if tables != wanted:
        problems.append(
            f"engram_num_embeddings: {list(tables)}, the primes sum up to {list(wanted)}"
        )
    return problems


def _draft(config: ModelConfig) -> list[str]:
    if not config.num_stages:
        return []
    problems = [f"{key}: must be positive" for key in DRAFT_POSITIVE if getattr(config, key) <= 0]
    if not config.dspark_target_layer_ids:
        problems.append("dspark_target_layer_ids: must name at least one layer")
    if not 0 <= config.dspark_noise_token_id < config.vocab_size:
        problems.append("dspark_noise_token_id: outside the vocabulary")
    if config.dspark_num_experts_per_tok > config.dspark_n_routed_experts:
        problems.append("dspark_num_experts_per_tok: more than dspark_n_routed_experts")
    return problems
