"""The trainable DeepSeek-V4.1 forward: all tokens at once, dense masks, every mechanism."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.tiny.training import layers
from models.tiny.training.config import CompressedVocabulary, engram_multipliers, engram_primes
from models.tiny.training.indexer import Indexer, IndexLoss, IndexQuery
from models.tiny.training.parameters import Parameter, Storage
from models.tiny.training.quantise import as_stored

Weights = dict[str, Tensor]
SMALL_FP32 = (".gate.weight", "q_weight", "k_weight", "embed.weight")


@dataclass(frozen=True)
class Mode:
    """How a forward runs: its type, its roundings, and a dense or a sparse selection."""

    dtype: torch.dtype = torch.float32
    is_sparse: bool = True
    rounds_weights: bool = False
    rounds_activations: bool = False
    random_index: bool = False  # the ablation: scores are noise


@dataclass(frozen=True)
class Rows:
    """A batch of token rows: ids, where each token's document starts, and window widths."""

    ids: Tensor
    starts: Tensor
    span: Tensor


@dataclass
class Output:
    """What a forward returns besides the hidden states before the head."""

    hidden: Tensor
    features: Tensor
    index_loss: Tensor
    loads: dict[str, Tensor] = field(default_factory=dict)


def effective_weights(
    values: dict[str, Tensor], parameters: dict[str, Parameter], mode: Mode
) -> Weights:
    """Return the weights as a forward reads them, routed and shared experts together."""
    weights: Weights = {}
    for name, parameter in parameters.items():
        value = values[name]
        if mode.rounds_weights:
            value = as_stored(value, parameter)
        is_matrix = value.dim() > 1 and parameter.storage is not Storage.F32
        is_wide = is_matrix and not name.endswith(SMALL_FP32)
        weights[name] = value.to(mode.dtype) if is_wide else value
    for name in [name for name in weights if ".experts." in name]:
        shared = weights.pop(name.replace(".experts.", ".shared_experts."))
        weights[name] = torch.cat((weights[name], shared[None]))
    return weights


def rope_tables(
    config: dict[str, Any], num_positions: int, is_compressed: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, rope / 2]; layers with compressed rows use YaRN."""
    width = config["qk_rope_head_dim"]
    base = config["compress_rope_theta"] if is_compressed else config["rope_theta"]
    index = torch.arange(width // 2, dtype=torch.float32)
    frequency = base ** (-2 * index / width)
    if is_compressed:
        yarn = config["rope_scaling"]

        def channel(beta: float) -> float:
            turns = yarn["original_max_position_embeddings"] / (2 * math.pi * beta)
            return width * math.log(turns) / (2 * math.log(base))

        low = max(math.floor(channel(yarn["beta_fast"])), 0)
        high = min(math.ceil(channel(yarn["beta_slow"])), width - 1)
        ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        frequency = frequency / yarn["factor"] * ramp + frequency * (1 - ramp)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency
    return angles.cos().to(device), angles.sin().to(device)


class Hasher:
    """Turns token ids into rows of the Engram tables."""

    def __init__(
        self, config: dict[str, Any], vocabulary: CompressedVocabulary, device: torch.device
    ) -> None:
        self._order, self._num_heads = config["engram_max_ngram_size"], config["engram_n_heads"]
        self._compressed_id = torch.from_numpy(vocabulary.compressed_id).to(device)
        self._pad = int(vocabulary.compressed_id[config["engram_pad_token_id"]])
        self._primes = engram_primes(config)
        self._multipliers = [
            engram_multipliers(layer, vocabulary.size, self._order)
            for layer in config["engram_layer_ids"]
        ]

    def __call__(self, ids: Tensor, starts: Tensor) -> list[Tensor]:
        """Return the rows [batch, tokens, rows] of each Engram layer."""
        num_tokens = ids.shape[1]
        positions = torch.arange(num_tokens, device=ids.device)
        compressed = self._compressed_id[ids]
        recent = [
            F.pad(compressed, (back, 0), value=self._pad)[:, :num_tokens].where(
                positions - back >= starts, self._pad
            )
            for back in range(self._order)
        ]
        return [
            self._rows(recent, *pair) for pair in zip(self._multipliers, self._primes, strict=True)
        ]

    def _rows(self, recent: list[Tensor], multipliers: list[int], primes: list[int]) -> Tensor:
        rows: list[Tensor] = []
        mixed = recent[0] * multipliers[0]
        for order in range(1, self._order):
            mixed = mixed ^ (recent[order] * multipliers[order])
            for _ in range(self._num_heads):
                index = len(rows)
                rows.append(mixed % primes[index] + sum(primes[:index]))
        return torch.stack(rows, -1)


class Forward:
    """The main model's forward over weights that are passed in."""

    def __init__(
        self, config: dict[str, Any], vocabulary: CompressedVocabulary, device: torch.device
    ) -> None:
        self.config, self.device = config, device
        self._hasher = Hasher(config, vocabulary, device)
        self._tables: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def tables(self, num_positions: int, is_compressed: bool) -> tuple[Tensor, Tensor]:
        """Return the rotation tables, made once for each length."""
        key = (num_positions, is_compressed)
        if key not in self._tables:
            self._tables[key] = rope_tables(self.config, *key, self.device)
        return self._tables[key]

    def mix(
        self, weights: Weights, prefix: str, site: str, streams: Tensor, pre: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a sublayer's input and its pre, post and comb."""
        c = self.config
        names = (f"hc_{site}_fn", f"hc_{site}_base", f"hc_{site}_scale", f"{site}_norm.weight")
        fn, base, scale, norm = (weights[prefix + name] for name in names)
        limits = (c["rms_norm_eps"], c["hc_eps"], c["hc_sinkhorn_iters"])
        return layers.mix(streams, pre, fn, base, scale, norm, *limits)

    def feed(
        self, weights: Weights, prefix: str, u: Tensor, num_chosen: int, mode: Mode
    ) -> tuple[Tensor, Tensor]:
        """Return the output of a block's experts and their loads."""
        c, p = self.config, prefix + "ffn."
        experts = [weights[f"{p}experts.{name}.weight"] for name in ("w1", "w3", "w2")]
        limits = (
            num_chosen,
            c["swiglu_limit"],
            c["routed_scaling_factor"],
            mode.rounds_activations,
        )
        return layers.route_and_feed(
            u, weights[p + "gate.weight"], weights[p + "gate.bias"], *experts, *limits
        )

    def attention_weights(self, weights: Weights, prefix: str) -> list[Tensor]:
        """Return the weights of the query and key-and-value projections, in reading order."""
        names = ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm")
        return [weights[f"{prefix}attn.{name}.weight"] for name in names]

    def first_pre(self, shape: torch.Size) -> Tensor:
        """Return the one-hot `pre` of the first sublayer."""
        pre = torch.zeros(*shape, self.config["hc_mult"], device=self.device)
        pre[..., 0] = 1
        return pre

    def __call__(
        self, weights: Weights, rows: Rows, mode: Mode, index_rows: Tensor | None = None
    ) -> Output:
        """Run the model; with `index_rows`, also the index loss over those query positions."""
        return _Pass(self, weights, rows, mode, index_rows).run()


class _Pass:
    """One forward: what is carried from layer to layer."""

    def __init__(
        self, forward: Forward, weights: Weights, rows: Rows, mode: Mode, index_rows: Tensor | None
    ) -> None:
        self.forward, self.config = forward, forward.config
        self.weights, self.rows, self.mode = weights, rows, mode
        self.positions = torch.arange(rows.ids.shape[1], device=rows.ids.device)
        self.indexer = Indexer(forward.config, weights, mode, rows.starts, self.positions)
        self.index_loss = IndexLoss(self.indexer, index_rows) if index_rows is not None else None
        self.compressed: Tensor | None = None
        self.loads: dict[str, Tensor] = {}

    def run(self) -> Output:
        c, weights, ids = self.config, self.weights, self.rows.ids
        hashed = self.forward._hasher(ids, self.rows.starts)
        streams = layers.embed(ids, weights["embed.weight"], c["hc_mult"], self.mode.dtype)
        pre = self.forward.first_pre(ids.shape)
        features: list[Tensor] = []
        for layer in range(c["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            if layer in c["engram_layer_ids"]:
                streams = self._engram(prefix, streams, hashed[c["engram_layer_ids"].index(layer)])
            if layer in c["dspark_target_layer_ids"]:
                features.append(streams.float().mean(-2).to(self.mode.dtype))
            u, own_pre, post, comb = self.forward.mix(weights, prefix, "attn", streams, pre)
            streams = layers.expand(streams, self._attention(layer, u), post, comb)
            u, pre, post, comb = self.forward.mix(weights, prefix, "ffn", streams, own_pre)
            fed, self.loads[prefix] = self.forward.feed(
                weights, prefix, u, c["num_experts_per_tok"], self.mode
            )
            streams = layers.expand(streams, fed, post, comb)
        hidden = layers.fold(streams, pre, weights["norm.weight"], c["rms_norm_eps"])
        loss = self.index_loss.total() if self.index_loss else hidden.new_zeros(())
        return Output(hidden, torch.cat(features, -1), loss, self.loads)

    def _engram(self, prefix: str, streams: Tensor, rows: Tensor) -> Tensor:
        names = ("embed.weight", "wkv.weight", "q_weight", "k_weight")
        tensors = (self.weights[f"{prefix}engram.{name}"] for name in names)
        return layers.add_ngrams(
            streams, rows, *tensors, self.config["rms_norm_eps"], self.mode.rounds_activations
        )

    def _attention(self, layer: int, u: Tensor) -> Tensor:
        c, weights, prefix = self.config, self.weights, f"layers.{layer}."
        eps, rounds = c["rms_norm_eps"], self.mode.rounds_activations
        ratio = c["compress_ratios"][layer]
        cos, sin = self.forward.tables(len(self.positions), ratio > 0)
        projections = self.forward.attention_weights(weights, prefix)
        query, window_rows, low_rank = layers.project(
            u, *projections, cos, sin, c["num_attention_heads"], eps, rounds
        )
        if layer in c["kv_source_layer_ids"]:
            a = prefix + "attn."
            self.compressed, self.indexer.keys = layers.compress(
                u,
                weights[a + "compressor.wkv.weight"],
                weights.get(a + "compressor.wgate.weight"),
                weights[a + "compressor.norm.weight"],
                weights[a + "indexer.wk.weight"],
                weights[a + "indexer.k_norm.weight"],
                cos[::ratio],
                sin[::ratio],
                eps,
                rounds,
            )
        if layer in c["index_source_layer_ids"]:
            self.indexer.select(layer, IndexQuery(low_rank.detach(), u.detach(), cos, sin))
        reads = (self.compressed, self.indexer.selected) if ratio else (None, None)
        where = (self.positions, self.rows.starts, self.rows.span)
        sink = weights[prefix + "attn.attn_sink"]
        output, normaliser = layers.attend(
            query, window_rows, sink, *where, *reads, c["sliding_window"]
        )
        if ratio and self.index_loss:
            assert self.compressed is not None
            self.index_loss.watch(layer, query, self.compressed, normaliser)
        wo_a, wo_b = weights[prefix + "attn.wo_a.weight"], weights[prefix + "attn.wo_b.weight"]
        return layers.project_out(output, cos, sin, wo_a, wo_b, c["o_groups"], rounds)
