"""Write and read checkpoints in the released layout, as one shard and its index."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.tiny.training.config import released_config
from models.tiny.training.parameters import (
    Parameter,
    Storage,
    draft_parameters,
    main_parameters,
    routing_biases,
)
from models.tiny.training.quantise import pack_fp4, pack_fp8, unpack

SHARD = "model.safetensors"


def all_parameters(config: dict[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of the main model and of the draft stages."""
    return main_parameters(config) | draft_parameters(config)


def _stored(name: str, value: Tensor, storage: Storage) -> dict[str, Tensor]:
    scale_name = name.removesuffix("weight") + "scale"
    match storage:
        case Storage.FP8 | Storage.FP8_ROW:
            packed, scale = pack_fp8(value, 32 if storage is Storage.FP8 else 1)
            return {name: packed, scale_name: scale}
        case Storage.FP4:
            stored: dict[str, Tensor] = {}
            for expert, weight in enumerate(value):
                own = name.replace(".experts.", f".experts.{expert}.")
                stored[own], stored[own.removesuffix("weight") + "scale"] = pack_fp4(weight)
            return stored
        case Storage.BF16:
            return {name: value.bfloat16()}
        case Storage.F32:
            return {name: value.float()}


def released_tensors(config: dict[str, Any], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors; `values` holds the parameters and the routing biases."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in all_parameters(config).items():
        value = values[name].detach().float().cpu()
        assert torch.isfinite(value).all(), name
        tensors |= _stored(name, value, parameter.storage)
    for name in routing_biases(config):
        tensors[name] = values[name].detach().float().cpu()
        tensors[name + "_vl"] = tensors[name].clone()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write(folder: Path, config: dict[str, Any], values: dict[str, Tensor]) -> int:
    """Write config, shard and index into `folder`; return the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = released_tensors(config, values)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), SHARD)}
    (folder / f"{SHARD}.index.json").write_text(json.dumps(index, indent=0) + "\n")
    (folder / "config.json").write_text(json.dumps(released_config(config), indent=1) + "\n")
    return total


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the text configuration and the values of a released checkpoint, in fp32."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = load_file(folder / SHARD)
    values: dict[str, Tensor] = {}
    for name, parameter in all_parameters(config).items():
        scale_name = name.removesuffix("weight") + "scale"
        if parameter.storage is Storage.FP4:
            own = [name.replace(".experts.", f".experts.{e}.") for e in range(parameter.shape[0])]
            scales = [tensors[each.removesuffix("weight") + "scale"] for each in own]
            pairs = zip(own, scales, strict=True)
            values[name] = torch.stack([unpack(tensors[each], scale) for each, scale in pairs])
        else:
            has_scale = parameter.storage in (Storage.FP8, Storage.FP8_ROW)
            values[name] = unpack(tensors[name], tensors[scale_name] if has_scale else None)
    for name in routing_biases(config):
        values[name] = tensors[name]
    return config, values
