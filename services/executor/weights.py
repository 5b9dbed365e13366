"""Released checkpoint layout -> `ModelWeights`; `load_model` is the way in."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from deepmesh.experts import first_places, slots_of
from kernels import native
from kernels.comm.comm import Exchange
from kernels.engram.constants import hash_multipliers, table_primes
from kernels.quant.linear import LinearWeight, pack_linear
from kernels.quant.pack import pack_fp4, pack_fp8, row_scales
from services.executor.checkpoint import (
    CheckpointError,
    StoredTensor,
    check_tensors,
    read_headers,
)
from services.executor.compressed_ids import compressed_ids
from services.executor.model_config import ModelConfig, load_config
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.models.parameters import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from services.executor.models.spread import SpreadExperts
from services.executor.tensor_specs import tensor_specs

ProgressCallback = Callable[[str, int, int], None]  # stage, done, total


class Packing(NamedTuple):
    """Makes of released weights, [out, in] or [groups, out, in], what a device multiplies with."""

    linear: Callable[[Tensor], LinearWeight]
    fp8: Callable[[Tensor, Tensor], LinearWeight]  # codes, scales of 32 positions of each row
    fp4: Callable[[Tensor, Tensor], LinearWeight]


NATIVE = Packing(pack_linear, pack_fp8, pack_fp4)


def load_model(
    path: Path | str,
    numerics: str,
    rank: int = 0,
    ranks: int = 1,
    exchange: Exchange | None = None,
    progress: ProgressCallback | None = None,
    redundant: int = 0,
) -> DeepseekV41:
    """The model of a checkpoint folder, with the routed experts of `rank` only.

    `exchange` reaches the other ranks; it is needed if there are any. `redundant`: copies of
    experts of a layer, over all ranks, for which there is room beside one of each.

    Raises:
        ModelConfigError: config.json is wrong.
        CheckpointError: weights are missing, surplus or of another shape or dtype; lists all.
    """
    folder = Path(path)
    config = load_config(folder)
    native.prepare(partial(progress or _silent, "kernels"))
    weights = load_weights(
        folder, config, rank=rank, ranks=ranks, progress=progress, redundant=redundant
    )
    return DeepseekV41(config, weights, numerics, exchange)


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    rank: int = 0,
    ranks: int = 1,
    progress: ProgressCallback | None = None,
    packing: Packing = NATIVE,
    redundant: int = 0,
) -> ModelWeights:
    """Check every tensor, then load layer by layer. See `load_model`."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not within 0..{ranks - 1}")
    if ranks > config.n_routed_experts:
        raise ValueError(
            f"executor.ranks: {ranks} ranks cannot share {config.n_routed_experts} experts a layer"
        )
    stored = read_headers(folder)
    check_tensors(tensor_specs(config), stored)
    reader = Reader(stored, config, rank, ranks, progress or _silent, packing, redundant)
    return reader.model(folder)


class ExpertReader:
    """Reads single experts of a checkpoint, whoever's they are, as this rank keeps its own."""

    def __init__(self, folder: Path, config: ModelConfig, packing: Packing = NATIVE) -> None:
        self._folder, self._config, self._packing = folder, config, packing
        self._reader: Reader | None = None  # files are opened when the first is wanted

    def read(self, layer: int, expert: int) -> tuple[LinearWeight, LinearWeight]:
        """w13 and w2 of a layer's expert, one group each."""
        if self._reader is None:
            stored = read_headers(self._folder)
            self._reader = Reader(stored, self._config, 0, 1, _silent, self._packing)
        return self._reader.expert(layer, expert)


class Reader:
    """Reads tensors by name and puts them into the forms of `models/parameters.py`."""

    def __init__(
        self,
        stored: dict[str, StoredTensor],
        config: ModelConfig,
        rank: int,
        ranks: int,
        progress: ProgressCallback,
        packing: Packing,
        redundant: int = 0,
    ) -> None:
        self._stored, self._config, self._packing = stored, config, packing
        self._redundant = redundant
        self._rank, self._ranks, self._progress = rank, ranks, progress
        self._files = {
            file: safe_open(str(file), framework="pt")
            for file in {tensor.file for tensor in stored.values()}
        }

    def model(self, folder: Path) -> ModelWeights:
        config = self._config
        total = config.num_hidden_layers + config.num_stages
        layers: list[LayerWeights] = []
        for layer in range(config.num_hidden_layers):
            self._progress("layers", layer, total)
            layers.append(self._layer(f"layers.{layer}.", layer, config.n_routed_experts))
        draft = self._draft(total) if config.num_stages else None
        ids = torch.arange(config.vocab_size)
        if config.engram_layer_ids:
            self._progress("engram ids", 0, 1)
            ids = self.compressed_ids(folder / "tokenizer.json")
        weights = ModelWeights(
            embed=self._plain("embed.weight"),
            layers=tuple(layers),
            norm=self._plain("norm.weight"),
            head=self._linear("head.weight"),
            compressed_ids=ids,
            draft=draft,
        )
        self._progress("layers", total, total)
        return weights

    def compressed_ids(self, file: Path) -> Tensor:
        """Engram's id of every token id."""
        if not file.exists():
            raise CheckpointError(f"{file}: missing; the Engram hash is made from it")
        ids = compressed_ids(file, self._config.vocab_size)
        wanted = self._config.engram_compressed_vocab_size
        if max(ids) + 1 != wanted:
            raise CheckpointError(
                f"{file}: {max(ids) + 1} compressed ids, but config.json says"
                f" engram_compressed_vocab_size {wanted}: not this model's tokenizer"
            )
        return torch.tensor(ids)

    def _draft(self, total: int) -> DraftWeights:
        config = self._config
        stages: list[LayerWeights] = []
        for stage in range(config.num_stages):
            layer = config.num_hidden_layers + stage
            self._progress("layers", layer, total)
            stages.append(self._layer(f"mtp.{stage}.", layer, config.dspark_n_routed_experts))
        last = f"mtp.{config.num_stages - 1}."
        return DraftWeights(
            main_proj=self._fp8_linear("mtp.0.main_proj"),
            main_norm=self._plain("mtp.0.main_norm.weight"),
            stages=tuple(stages),
            norm=self._plain(last + "norm.weight"),
            markov_embed=self._plain(last + "markov_head.embed.weight"),
            markov_head=self._linear(last + "markov_head.head.weight"),
            confidence=self._linear(last + "confidence_head.proj.weight"),
        )

    def _layer(self, prefix: str, layer: int, num_experts: int) -> LayerWeights:
        first_stage = self._config.num_hidden_layers
        return LayerWeights(
            attn_hyper=self._hyper(prefix, "attn"),
            ffn_hyper=self._hyper(prefix, "ffn"),
            attention=self._attention(prefix + "attn.", layer),
            moe=self._moe(prefix + "ffn.", num_experts, is_spread=layer < first_stage),
            engram=self._engram(prefix + "engram.", layer)
            if layer in self._config.engram_layer_ids
            else None,
        )

    def _hyper(self, prefix: str, site: str) -> HyperWeights:
        return HyperWeights(
            norm=self._plain(f"{prefix}{site}_norm.weight"),
            fn=self._linear(f"{prefix}hc_{site}_fn"),
            base=self._plain(f"{prefix}hc_{site}_base"),
            scale=self._plain(f"{prefix}hc_{site}_scale"),
        )

    def _attention(self, prefix: str, layer: int) -> AttentionWeights:
        config = self._config
        is_kv_source = layer in config.kv_source_layer_ids
        is_index_source = layer in config.index_source_layer_ids
        group_out = [
            part.unflatten(0, (config.o_groups, -1)) for part in self._fp8(prefix + "wo_a")
        ]
        return AttentionWeights(
            sinks=self._plain(prefix + "attn_sink"),
            down=self._fp8_linear(prefix + "wq_a", prefix + "wkv"),
            q_norm=self._plain(prefix + "q_norm.weight"),
            kv_norm=self._plain(prefix + "kv_norm.weight"),
            query=self._fp8_linear(prefix + "wq_b"),
            group_out=self._packing.fp8(*group_out),
            out=self._fp8_linear(prefix + "wo_b"),
            compressor=self._compressor(prefix, layer) if is_kv_source else None,
            indexer=IndexerWeights(
                query=self._fp8_linear(prefix + "indexer.wq_b"),
                heads=self._linear(prefix + "indexer.weights_proj.weight"),
            )
            if is_index_source
            else None,
        )

    def _compressor(self, prefix: str, layer: int) -> CompressorWeights:
        names = ["wkv", "wgate"] if self._config.compress_ratios[layer] == 2 else ["wkv"]
        parts = [self._plain(f"{prefix}compressor.{name}.weight") for name in names]
        return CompressorWeights(
            kv_gate=self._packing.linear(torch.cat(parts)),
            norm=self._plain(prefix + "compressor.norm.weight"),
            index_key=self._linear(prefix + "indexer.wk.weight"),
            index_key_norm=self._plain(prefix + "indexer.k_norm.weight"),
        )

    def _moe(self, prefix: str, num_experts: int, *, is_spread: bool) -> MoeWeights:
        """Experts of draft stages are on every rank: drafting needs no exchange."""
        ranks, rank = (self._ranks, self._rank) if is_spread else (1, 0)
        slots = slots_of(num_experts, ranks, self._redundant if is_spread else 0)
        places = first_places(num_experts, ranks, slots)
        own = places[rank]
        # a slot that holds nothing has the weights of the first expert, which nobody asks it for
        experts = [f"{prefix}experts.{max(expert, own[0])}." for expert in own.tolist()]
        shared = prefix + "shared_experts."
        return MoeWeights(
            gate=self._linear(prefix + "gate.weight"),
            bias=self._plain(prefix + "gate.bias"),
            spread=SpreadExperts(places, rank, num_experts),
            w13=self._fp4_linears(experts, "w1", "w3"),
            w2=self._fp4_linears(experts, "w2"),
            shared_w13=self._fp8_linear(shared + "w1", shared + "w3"),
            shared_w2=self._fp8_linear(shared + "w2"),
        )

    def expert(self, layer: int, expert: int) -> tuple[LinearWeight, LinearWeight]:
        """w13 and w2 of one routed expert of a layer of the main model."""
        prefix = [f"layers.{layer}.ffn.experts.{expert}."]
        return self._fp4_linears(prefix, "w1", "w3"), self._fp4_linears(prefix, "w2")

    def _engram(self, prefix: str, layer: int) -> EngramWeights:
        config = self._config
        order, heads = config.engram_max_ngram_size, config.engram_n_heads
        number = config.engram_layer_ids.index(layer)
        every = table_primes(len(config.engram_layer_ids), order, heads, config.engram_vocab_size)
        primes = torch.tensor(every[number])
        multipliers = hash_multipliers(layer, config.engram_compressed_vocab_size, order)
        return EngramWeights(
            table=self.raw(prefix + "embed.weight"),  # safetensors maps the file: not read here
            scales=self.raw(prefix + "embed.scale"),
            kv=self._fp8_linear(prefix + "wkv"),
            q_weight=self._plain(prefix + "q_weight"),
            k_weight=self._plain(prefix + "k_weight"),
            multipliers=torch.tensor(multipliers),
            primes=primes.unflatten(0, (-1, heads)),
            offsets=(primes.cumsum(0) - primes).unflatten(0, (-1, heads)),
        )

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        return self._files[self._stored[name].file].get_tensor(name)

    def _plain(self, name: str) -> Tensor:
        return self.raw(name).float()

    def _linear(self, name: str) -> LinearWeight:
        return self._packing.linear(self._plain(name))

    def _fp8(self, *names: str) -> tuple[Tensor, Tensor]:
        """Codes of linears of the same input, side by side, and the scales of their rows."""
        codes = [self.raw(name + ".weight").view(torch.uint8) for name in names]
        scales = [
            row_scales(self.raw(name + ".scale"), rows.shape[0])
            for name, rows in zip(names, codes, strict=True)
        ]
        return torch.cat(codes).view(torch.float8_e4m3fn), torch.cat(scales)

    def _fp8_linear(self, *names: str) -> LinearWeight:
        return self._packing.fp8(*self._fp8(*names))

    def _fp4_linears(self, prefixes: list[str], *names: str) -> LinearWeight:
        """One group for each prefix: linears of the same input, side by side."""
        codes, scales = (
            torch.stack(
                [
                    torch.cat(
                        [self.raw(f"{prefix}{name}.{part}").view(torch.uint8) for name in names]
                    )
                    for prefix in prefixes
                ]
            )
            for part in ("weight", "scale")
        )
        return self._packing.fp4(codes, scales)
