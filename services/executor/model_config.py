"""config.json -> `ModelConfig`, checked; reads both spellings of the released model. No torch."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SIZE = 1 << 40  # of any number of a config.json
MAX_STAGES = 64
BLOCK_TOKENS = 64  # tokens of a global block and rows of a window block

# Flat spelling (inference/config.json) -> Hugging Face spelling.
ALIASES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "original_seq_len": "original_max_position_embeddings",
    "rope_factor": "factor",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "max_seq_len": "max_position_embeddings",
}
MODEL_TYPES = ("deepseek_v41", "deepseek_v4.1", "deepseek_v4_1")
# What the forward pass implements; any other value would be computed wrongly, so it is refused.
REQUIRED_VALUES = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}


class ModelConfigError(ValueError):
    """config.json cannot be served; the text names every key at fault."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass reads. Names are those of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # decoder layers, then draft stages
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    factor: float  # YaRN, layers with ratio > 0 only
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rms_norm_eps: float = 1e-20
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    gate_temp: float = 1.0  # router temperature; in no released config
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    weight_block_size: int = 32
    expert_dtype: str = "fp4"

    # ------------------------------------------------------------ roles (specification 1.2)

    @property
    def num_stages(self) -> int:
        """Draft stages; their window rows follow those of the decoder layers."""
        return self.num_nextn_predict_layers

    @property
    def max_model_len(self) -> int:
        """Positions that the model was made for."""
        return self.max_position_embeddings

    @property
    def context_ids(self) -> int:
        """Ids before a row's start that the Engram hash needs."""
        return self.engram_max_ngram_size - 1

    @property
    def pair_source_layer_ids(self) -> tuple[int, ...]:
        """KV sources of ratio 2: those with an open group between two tokens."""
        return tuple(i for i in self.kv_source_layer_ids if self.compress_ratios[i] == 2)

    def kv_source(self, layer: int) -> int | None:
        """Layer whose compressed rows `layer` reads; None in window-only layers."""
        return self._nearest(self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int | None:
        """Layer whose selection `layer` uses."""
        return self._nearest(self.index_source_layer_ids, layer)

    def uses_candidates(self, layer: int) -> bool:
        """An index source restricted to the candidate blocks of the candidate source."""
        return layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id

    def _nearest(self, sources: tuple[int, ...], layer: int) -> int | None:
        if self.compress_ratios[layer] == 0:
            return None
        return max((source for source in sources if source <= layer), default=None)


def load_config(path: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint folder (or the file itself).

    Raises:
        ModelConfigError: not readable, or keys missing or out of bounds; names every one.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file}: must be a JSON object")
    try:
        return parse_config(raw)
    except ModelConfigError as error:
        raise ModelConfigError(f"{file}: {error}") from error


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A checked `ModelConfig` from either spelling of config.json."""
    from services.executor.model_checks import config_problems

    model_type = str(raw.get("model_type", MODEL_TYPES[0]))
    if model_type not in MODEL_TYPES:
        raise ModelConfigError(f"model_type: {model_type!r} is not served; need {MODEL_TYPES[0]!r}")
    flat = _flatten(raw)
    problems = [
        f"{key}: {flat[key]!r} is not supported, only {value!r}"
        for key, value in REQUIRED_VALUES.items()
        if flat.get(key, value) != value
    ]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(ModelConfig):
        if field.name in flat:
            _convert(field, flat[field.name], values, problems)
        elif field.default is dataclasses.MISSING:
            problems.append(f"{field.name}: missing")
    if problems:
        raise ModelConfigError("; ".join(problems))
    config = _pad_ratios(ModelConfig(**values))
    problems = config_problems(config)
    if problems:
        raise ModelConfigError("; ".join(problems))
    return config


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys in Hugging Face spelling, whichever spelling came in."""
    nested = [raw]
    for key in ("text_config", "rope_scaling", "quantization_config"):
        inner = raw.get("text_config")
        part = raw.get(key)
        if key != "text_config" and isinstance(inner, Mapping):
            part = inner.get(key, part)
        if isinstance(part, Mapping):
            nested.append(part)
    merged: dict[str, Any] = {}
    for part in nested:
        merged.update({ALIASES.get(key, key): value for key, value in part.items()})
    block = merged.get("weight_block_size")
    if isinstance(block, list) and block and all(each == block[0] for each in block):
        merged["weight_block_size"] = block[0]
    if "max_position_embeddings" not in merged and "factor" in merged:
        original, factor = merged.get("original_max_position_embeddings", 0), merged["factor"]
        if type(original) is int and isinstance(factor, int | float) and 0 < factor < MAX_SIZE:
            merged["max_position_embeddings"] = int(original * factor)
    return merged


def _convert(
    field: "dataclasses.Field[Any]", value: object, values: dict[str, Any], problems: list[str]
) -> None:
    """Put `value` into `values` as the field's type, or say what is wrong with it."""
    kind = str(field.type if isinstance(field.type, str) else getattr(field.type, "__name__", ""))
    match kind, value:
        case "str", str():
            values[field.name] = value
        case "int" | "float", bool():
            problems.append(f"{field.name}: must be a number, not {value!r}")
        case "int" | "float", int() | float() if not abs(value) <= MAX_SIZE:
            problems.append(f"{field.name}: {value!r} is out of all bounds")
        case "int", int():
            values[field.name] = value
        case "int", float() if value.is_integer():
            values[field.name] = int(value)
        case "float", int() | float():
            values[field.name] = float(value)
        case _, list() if kind.startswith("tuple") and all(type(item) is int for item in value):
            values[field.name] = tuple(value)
        case _:
            kind = "a list of integers" if kind.startswith("tuple") else f"of type {kind}"
            problems.append(f"{field.name}: must be {kind}, not {value!r}")


def _pad_ratios(config: ModelConfig) -> ModelConfig:
    """Some files list the decoder layers only; draft stages always have ratio 0."""
    missing = config.num_hidden_layers + config.num_stages - len(config.compress_ratios)
    if not 0 < missing <= min(config.num_stages, MAX_STAGES):
        return config
    return dataclasses.replace(config, compress_ratios=config.compress_ratios + (0,) * missing)
