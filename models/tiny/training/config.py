"""The configuration of the tiny model, and what follows from it alone."""

import math
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

VOCAB_SIZE = 4096
NUM_DRAFT_STAGES = 3


def text_config() -> dict[str, Any]:
    """Return the shipped `text_config`, without the sizes that the tokenizer decides."""
    config: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 2048,
        },
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 64,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1] + [0] * NUM_DRAFT_STAGES,
        "compress_rope_theta": 160000.0,
        "kv_source_layer_ids": [1, 3, 4],
        "index_source_layer_ids": [1, 3, 4, 6],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 3],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 1024,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": NUM_DRAFT_STAGES,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 5,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }
    config["engram_num_embeddings"] = [sum(primes) for primes in engram_primes(config)]
    return config


def released_config(text: dict[str, Any]) -> dict[str, Any]:
    """Return the whole `config.json` around a `text_config`."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 10,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
    }


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def engram_primes(config: dict[str, Any]) -> list[list[int]]:
    """Return the hash moduli of each Engram layer by order and head, all distinct."""
    used: set[int] = set()
    layers: list[list[int]] = []
    for _ in config["engram_layer_ids"]:
        primes: list[int] = []
        for _ in range(config["engram_max_ngram_size"] - 1):
            candidate = config["engram_vocab_size"] - 1  # each order starts anew
            for _ in range(config["engram_n_heads"]):
                candidate += 1
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        layers.append(primes)
    return layers


def engram_multipliers(layer_id: int, compressed_vocab_size: int, order: int) -> list[int]:
    """Return the odd multipliers of the n-gram hash of one layer."""
    bound = max(1, ((2**63 - 1) // compressed_vocab_size) // 2)
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, size=order, dtype=np.int64)
    return [int(value) * 2 + 1 for value in drawn]


def _folded(text: str) -> str:
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.combining(c)).lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


@dataclass(frozen=True)
class CompressedVocabulary:
    """Token ids with case, accents and blanks folded away, which the Engram hash reads."""

    compressed_id: np.ndarray
    size: int


def compress_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> CompressedVocabulary:
    """Give every token id the id of its folded text, in order of first appearance."""
    ids: dict[str, int] = {}
    compressed: list[int] = []
    for token_id in range(vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        is_broken = "\ufffd" in text  # part of a character
        key = tokenizer.id_to_token(token_id) if is_broken else _folded(text) or text
        assert key is not None
        compressed.append(ids.setdefault(key, len(ids)))
    return CompressedVocabulary(np.array(compressed, np.int64), len(ids))
