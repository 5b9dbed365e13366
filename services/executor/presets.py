"""Shapes of random checkpoints by name, as the released config.json spells them. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernels.engram.constants import table_primes

DECODER_KINDS = 3
DRAFT_TARGETS = 3  # the last so many layers feed the draft stages
SLICE_ENGRAM_BASE = 25_000  # rows of each table of a slice, at most: a token reads as many rows


class PresetError(ValueError):
    """There is no such preset, or it has no such slice."""


@dataclass(frozen=True)
class Preset:
    """What one model family has in common, whatever its number of layers."""

    text: dict[str, Any]  # keys of text_config that no other field decides
    num_layers: int
    kv_every: int  # layers between KV sources of the first half
    index_every: int  # layers between index sources of the second half
    engram_layers: tuple[int, ...]
    num_stages: int
    image_token_id: int = 10


def _rope(factor: int, original: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": factor * original,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": factor,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": original,
        },
    }


_COMMON: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "dspark_block_size": 5,
}

PRESETS: dict[str, Preset] = {
    "v41-nano": Preset(  # for tests: every mechanism, 1 MB
        _COMMON
        | {
            "vocab_size": 512,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_attention_heads": 4,
            "head_dim": 32,
            "qk_rope_head_dim": 16,
            "q_lora_rank": 32,
            "o_lora_rank": 32,
            "o_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "index_n_heads": 16,
            "index_head_dim": 32,
            "index_topk": 16,
            "candidate_topk_blocks": 8,
            "candidate_block_size": 4,
            "engram_vocab_size": 128,
            "engram_n_heads": 2,
            "engram_head_dim": 32,
            "dspark_noise_token_id": 5,
            "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 4,
            "dspark_num_experts_per_tok": 2,
            **_rope(4, 256),
        },
        num_layers=4,
        kv_every=2,
        index_every=1,
        engram_layers=(0, 1),
        num_stages=3,
    ),
    "v41-medium": Preset(  # for timing: large enough that memory bandwidth shows
        _COMMON
        | {
            "vocab_size": 8192,
            "hidden_size": 1024,
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "head_dim": 128,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 256,
            "o_lora_rank": 256,
            "o_groups": 4,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "sliding_window": 128,
            "index_n_heads": 16,
            "index_head_dim": 64,
            "index_topk": 128,
            "candidate_topk_blocks": 64,
            "candidate_block_size": 8,
            "engram_vocab_size": 16384,
            "engram_n_heads": 4,
            "engram_head_dim": 64,
            "dspark_noise_token_id": 5,
            "dspark_markov_rank": 64,
            "dspark_n_routed_experts": 16,
            "dspark_num_experts_per_tok": 3,
            **_rope(4, 8192),
        },
        num_layers=12,
        kv_every=2,
        index_every=3,
        engram_layers=(1, 4),
        num_stages=3,
    ),
    "v41-flash": Preset(  # the released shapes
        _COMMON
        | {
            "vocab_size": 129280,
            "hidden_size": 5120,
            "moe_intermediate_size": 2304,
            "num_attention_heads": 64,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 1280,
            "o_lora_rank": 1024,
            "o_groups": 8,
            "n_routed_experts": 384,
            "num_experts_per_tok": 6,
            "sliding_window": 128,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 512,
            "candidate_topk_blocks": 2048,
            "candidate_block_size": 8,
            "engram_vocab_size": 16_000_000,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
            "dspark_noise_token_id": 128799,
            "dspark_markov_rank": 256,
            "dspark_n_routed_experts": 128,
            "dspark_num_experts_per_tok": 3,
            **_rope(16, 65536),
        },
        num_layers=40,
        kv_every=6,
        index_every=4,
        engram_layers=(1, 14),
        num_stages=3,
        image_token_id=129264,
    ),
}

# The released shapes in width, of which the kernels for Hopper have code, with few small experts:
# for the executor and the mesh on a GPU, where a file of gigabytes would take minutes to load.
PRESETS["v41-thin"] = replace(
    PRESETS["v41-flash"],
    text=PRESETS["v41-flash"].text
    | {
        "vocab_size": 4096,
        "moe_intermediate_size": 256,
        "num_attention_heads": 16,
        "o_groups": 2,
        "n_routed_experts": 32,
        "candidate_topk_blocks": 128,
        "engram_vocab_size": 4096,
        "dspark_noise_token_id": 5,
    },
    num_layers=8,
    index_every=3,
    engram_layers=(1,),
    num_stages=0,
    image_token_id=10,
)


def preset_config(
    name: str, *, layers: int | None = None, stages: int | None = None
) -> dict[str, Any]:
    """The whole config.json of a preset, but for `engram_compressed_vocab_size` (0).

    With `layers`, a slice: layers of full size, of every kind that fits into so many, with
    Engram tables of fewer rows and without draft stages unless `stages` asks for them.

    Raises:
        PresetError: no such preset, or no such slice of it.
    """
    if name not in PRESETS:
        raise PresetError(f"preset {name!r}: not one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    count = preset.num_layers if layers is None else layers
    if not 2 <= count <= preset.num_layers:
        raise PresetError(f"layers: {count} is not within 2..{preset.num_layers} of {name}")
    if stages is None:
        stages = preset.num_stages if layers is None else 0
    if not 0 <= stages <= preset.num_stages:
        raise PresetError(f"stages: {stages} is not within 0..{preset.num_stages} of {name}")
    text = preset.text | _roles(preset, count, stages)
    if layers is not None:
        text["engram_vocab_size"] = min(text["engram_vocab_size"], SLICE_ENGRAM_BASE)
    text["engram_num_embeddings"] = _table_rows(text)
    return _around(text, preset.image_token_id)


def _roles(preset: Preset, layers: int, stages: int) -> dict[str, Any]:
    """What each layer is: window only, then ratio 2 in the encoder, ratio 1 in the decoder.

    In a slice, where there are layers for it, the decoder has its three kinds: the source of rows
    and candidates, one without an index of its own, one that chooses among the candidates.
    """
    decoder = layers // 2
    if layers < preset.num_layers:  # as many as the encoder has with compressed rows
        decoder = max(min(decoder, DECODER_KINDS), (layers - 2) // 2)
    middle = layers - decoder
    window_only = min(2, middle - 1)
    first_half: Sequence[int] = range(window_only, middle, preset.kv_every)
    ratios = [0] * window_only + [2] * (middle - window_only) + [1] * (layers - middle)
    index_sources = {*first_half, *range(middle, layers, preset.index_every)}
    if max(index_sources) == middle and decoder >= DECODER_KINDS:
        index_sources.add(layers - 1)
    return {
        "num_hidden_layers": layers,
        "compress_ratios": ratios + [0] * stages,
        "kv_source_layer_ids": [*first_half, middle],
        "index_source_layer_ids": sorted(index_sources),
        "candidate_source_layer_id": middle,
        "engram_layer_ids": [layer for layer in preset.engram_layers if layer < middle],
        "num_nextn_predict_layers": stages,
        "dspark_target_layer_ids": list(range(max(0, layers - DRAFT_TARGETS), layers)),
    }


def _table_rows(text: dict[str, Any]) -> list[int]:
    primes = table_primes(
        len(text["engram_layer_ids"]),
        text["engram_max_ngram_size"],
        text["engram_n_heads"],
        text["engram_vocab_size"],
    )
    return [sum(flat) for flat in primes]


def _around(text: dict[str, Any], image_token_id: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text | {"engram_compressed_vocab_size": 0},
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
    }
