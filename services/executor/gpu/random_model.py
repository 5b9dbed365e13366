"""Models of real shape with random weights made on the device: for benchmarks and tests."""

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.comm.one_sided import OneSidedExchange
from services.executor.gpu.linears import Device
from services.executor.gpu.model import DeviceModel
from services.executor.gpu.stored import STORED
from services.executor.model_config import ModelConfig, parse_config
from services.executor.models.numerics import Numerics
from services.executor.random_weights import value_table
from services.executor.tensor_specs import tensor_specs
from services.executor.weights import Reader

_TYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}


def random_device_model(
    raw: dict[str, Any],
    *,
    numerics: str = "bf16",
    device: str = "cuda",
    seed: int = 0,
    fast: bool = True,
    drafts: bool = False,
) -> DeviceModel:
    """A model of any shape; values as `random_weights` draws them.

    Args:
        raw: config.json, perhaps of `preset_config`; Engram takes every id for itself.
        drafts: see `DeviceModel`.
    """
    model, _ = random_device_parts(
        raw, numerics=numerics, device=device, seed=seed, fast=fast, drafts=drafts
    )
    return model


def random_device_parts(
    raw: dict[str, Any],
    *,
    numerics: str = "bf16",
    device: str = "cuda",
    seed: int = 0,
    fast: bool = True,
    drafts: bool = False,
    exchange: OneSidedExchange | None = None,
) -> tuple[DeviceModel, list[Tensor]]:
    """`random_device_model`, and the biases of its routers by layer, which it looks at anew in
    each step.

    Args:
        exchange: of a rank that has a part of the experts, the same as they are elsewhere.
    """
    config, name = random_config(raw), torch.device(device)
    rank, ranks = (0, 1) if exchange is None else (exchange.rank, exchange.ranks)
    weights = RandomReader(config, name, seed, rank=rank, ranks=ranks).model(Path())
    how = Device(name, Numerics.named(numerics), fast and name.type == "cuda")
    biases = [layer.moe.bias for layer in weights.layers]
    return DeviceModel(config, weights, numerics, how, exchange, drafts=drafts), biases


def random_config(raw: dict[str, Any]) -> ModelConfig:
    """Of such a model."""
    text = raw["text_config"]
    text = text | {"engram_compressed_vocab_size": text["vocab_size"]}
    return parse_config(raw | {"text_config": text})


class RandomReader(Reader):
    """Draws tensors where others read them; never zeros."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        seed: int,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__({}, config, rank, ranks, lambda stage, done, total: None, STORED)
        self._specs = {spec.name: spec for spec in tensor_specs(config)}
        self._vocab_size, self._device, self._seed = config.vocab_size, device, seed
        self._tables: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def raw(self, name: str) -> Tensor:
        """A function of name, shape and seed alone, on the device; a table of rows on the host."""
        spec = self._specs[name]
        device = torch.device("cpu") if ".engram.embed." in name else self._device
        key = re.sub(r"\d+", "", name), spec.shape  # of any layer and expert
        if key not in self._tables:
            held = value_table(spec)
            if held.dtype == np.uint16:  # of which torch can do little
                held = held.view(np.int16)
            self._tables[key] = torch.from_numpy(held).to(device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), self._seed))
        draws = torch.randint(
            0, 65536, spec.shape, dtype=torch.int32, generator=generator, device=device
        )
        return self._tables[key][draws].view(_TYPES[spec.dtype])

    def compressed_ids(self, file: Path) -> Tensor:
        """Each id its own."""
        return torch.arange(self._vocab_size)
