"""What each parameter is: shape, released storage format, first values, and who updates it."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from models.tiny.training.config import engram_primes


class Storage(Enum):
    """How the released checkpoint stores a tensor."""

    FP8 = "fp8 in 32 x 32 blocks"
    FP8_ROW = "fp8 in runs of 32 along a row"
    FP4 = "fp4 in runs of 32 along a row"
    BF16 = "bf16"
    F32 = "fp32"


@dataclass(frozen=True)
class Parameter:
    """One trained tensor. Experts of one kind are stacked: [num_experts, out, in]."""

    shape: tuple[int, ...]
    storage: Storage
    std: float = 0.0
    mean: float = 0.0
    uses_muon: bool = False
    lr_scale: float = 0.5  # of the Adam learning rate


def _linear(
    rows: int, columns: int, gain: float = 1.0, storage: Storage = Storage.FP8
) -> Parameter:
    return Parameter((rows, columns), storage, std=gain * columns**-0.5, uses_muon=True)


def _norm(*shape: int) -> Parameter:
    return Parameter(shape, Storage.BF16, mean=1.0)


def _attention(c: dict[str, Any], layer: int) -> Iterator[tuple[str, Parameter]]:
    d, width = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    output_rank = c["o_groups"] * c["o_lora_rank"]
    yield "attn_sink", Parameter((c["num_attention_heads"],), Storage.F32)
    yield "wq_a.weight", _linear(c["q_lora_rank"], d)
    yield "q_norm.weight", _norm(c["q_lora_rank"])
    yield "wq_b.weight", _linear(width, c["q_lora_rank"])
    yield "wkv.weight", _linear(c["head_dim"], d)
    yield "kv_norm.weight", _norm(c["head_dim"])
    yield "wo_a.weight", _linear(output_rank, width // c["o_groups"])
    yield "wo_b.weight", _linear(d, output_rank, gain=0.25)
    if layer in c["kv_source_layer_ids"]:
        yield "compressor.wkv.weight", _linear(c["head_dim"], d, storage=Storage.BF16)
        yield "compressor.norm.weight", _norm(c["head_dim"])
        if c["compress_ratios"][layer] > 1:
            yield "compressor.wgate.weight", _linear(c["head_dim"], d, storage=Storage.BF16)
        std = c["head_dim"] ** -0.5
        yield (
            "indexer.wk.weight",
            Parameter((c["index_head_dim"], c["head_dim"]), Storage.BF16, std),
        )
        yield "indexer.k_norm.weight", _norm(c["index_head_dim"])
    if layer in c["index_source_layer_ids"]:
        index_width = c["index_n_heads"] * c["index_head_dim"]
        std = c["q_lora_rank"] ** -0.5
        yield "indexer.wq_b.weight", Parameter((index_width, c["q_lora_rank"]), Storage.FP8, std)
        yield (
            "indexer.weights_proj.weight",
            Parameter((c["index_n_heads"], d), Storage.BF16, d**-0.5),
        )


def _feed_forward(c: dict[str, Any], num_experts: int) -> Iterator[tuple[str, Parameter]]:
    d, inner = c["hidden_size"], c["moe_intermediate_size"]
    yield "gate.weight", Parameter((num_experts, d), Storage.BF16, d**-0.5)
    for name, rows, columns, gain in (
        ("w1", inner, d, 1.0),
        ("w3", inner, d, 1.0),
        ("w2", d, inner, 0.25),
    ):
        std = gain * columns**-0.5
        stacked = Parameter((num_experts, rows, columns), Storage.FP4, std, uses_muon=True)
        yield f"experts.{name}.weight", stacked
        yield f"shared_experts.{name}.weight", _linear(rows, columns, gain)


def _block(c: dict[str, Any], layer: int, num_experts: int) -> Iterator[tuple[str, Parameter]]:
    d, streams = c["hidden_size"], c["hc_mult"]
    num_mixes = (2 + streams) * streams
    yield "attn_norm.weight", _norm(d)
    yield "ffn_norm.weight", _norm(d)
    for site in ("attn", "ffn"):
        fan_in = streams * d
        yield f"hc_{site}_fn", Parameter((num_mixes, fan_in), Storage.F32, fan_in**-0.5)
        yield f"hc_{site}_base", Parameter((num_mixes,), Storage.F32)
        yield f"hc_{site}_scale", Parameter((3,), Storage.F32, mean=0.1)
    for name, parameter in _attention(c, layer):
        yield f"attn.{name}", parameter
    for name, parameter in _feed_forward(c, num_experts):
        yield f"ffn.{name}", parameter


def _engram(c: dict[str, Any], num_rows: int) -> Iterator[tuple[str, Parameter]]:
    d, streams = c["hidden_size"], c["hc_mult"]
    width = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
    table = (num_rows, c["engram_head_dim"])
    yield "embed.weight", Parameter(table, Storage.FP8_ROW, std=0.5, lr_scale=3.0)
    yield "wkv.weight", _linear((streams + 1) * d, width, gain=0.5)
    yield "q_weight", _norm(streams, d)
    yield "k_weight", _norm(streams, d)


def main_parameters(c: dict[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of the main model, by released name."""
    d, vocab = c["hidden_size"], c["vocab_size"]
    found = {
        "embed.weight": Parameter((vocab, d), Storage.BF16, std=0.5, lr_scale=1.0),
        "head.weight": Parameter((vocab, d), Storage.BF16, std=0.3 * d**-0.5, lr_scale=1.0),
        "norm.weight": _norm(d),
    }
    for layer in range(c["num_hidden_layers"]):
        block = dict(_block(c, layer, c["n_routed_experts"]))
        if layer in c["engram_layer_ids"]:
            rows = sum(engram_primes(c)[c["engram_layer_ids"].index(layer)])
            block |= {f"engram.{name}": p for name, p in _engram(c, rows)}
        found |= {f"layers.{layer}.{name}": parameter for name, parameter in block.items()}
    return found


def draft_parameters(c: dict[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of the DSpark stages, by released name."""
    d, vocab, rank = c["hidden_size"], c["vocab_size"], c["dspark_markov_rank"]
    num_stages = c["num_nextn_predict_layers"]
    found: dict[str, Parameter] = {}
    for stage in range(num_stages):
        block = _block(c, c["num_hidden_layers"] + stage, c["dspark_n_routed_experts"])
        found |= {f"mtp.{stage}.{name}": parameter for name, parameter in block}
    found["mtp.0.main_proj.weight"] = _linear(d, d * len(c["dspark_target_layer_ids"]))
    found["mtp.0.main_norm.weight"] = _norm(d)
    last = f"mtp.{num_stages - 1}."
    found[last + "norm.weight"] = _norm(d)
    found[last + "markov_head.embed.weight"] = Parameter(
        (vocab, rank), Storage.BF16, 0.3, lr_scale=1.0
    )
    head = Parameter((vocab, rank), Storage.BF16, 0.1 * rank**-0.5, lr_scale=1.0)
    found[last + "markov_head.head.weight"] = head
    found[last + "confidence_head.proj.weight"] = Parameter(
        (1, d + rank), Storage.BF16, lr_scale=0.1
    )
    return found


def _mix_base(c: dict[str, Any], sublayer: int) -> Tensor:
    """Favour one stream per sublayer when reading, and keep each stream to itself when mixing."""
    streams = c["hc_mult"]
    base = torch.zeros((2 + streams) * streams)
    base[:streams] = -2.0
    base[(sublayer + 1) % streams] = 0.6
    base[2 * streams :] = (3.0 * torch.eye(streams)).flatten()
    return base


def initial_values(
    c: dict[str, Any], parameters: dict[str, Parameter], seed: int
) -> dict[str, Tensor]:
    """Draw the first value of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for name, p in parameters.items():
        values[name] = p.mean + p.std * torch.randn(p.shape, generator=generator)
        if name.endswith("_base"):
            kind, layer = name.split(".")[:2]
            block = int(layer) + (c["num_hidden_layers"] if kind == "mtp" else 0)
            values[name] = _mix_base(c, 2 * block + ("hc_ffn" in name))
    return values


def routing_biases(c: dict[str, Any]) -> dict[str, Tensor]:
    """Return the router biases, which are balanced and not trained by gradient."""
    biases = {
        f"layers.{i}.ffn.gate.bias": c["n_routed_experts"] for i in range(c["num_hidden_layers"])
    }
    biases |= {
        f"mtp.{i}.ffn.gate.bias": c["dspark_n_routed_experts"]
        for i in range(c["num_nextn_predict_layers"])
    }
    return {name: torch.zeros(size) for name, size in biases.items()}
