"""Released layout -> plain float32 weights, experts stacked: for peers that read nothing else."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kernels.quant.unpack import unpack_fp4, unpack_fp8
from services.executor.checkpoint import StoredTensor, read_headers
from services.executor.model_config import ModelConfig

DONE = "converted"  # the last file that is written
SKIPPED = ("mtp.", ".engram.", "bias_vl")


def converted(
    source: Path, config: ModelConfig, target: Path, on_part: Callable[[int, int], None]
) -> Path:
    """The folder of `source` without Engram and draft stages, in float32; made if it is not there.

    `on_part` is told how many layers of how many are done.
    """
    if (target / DONE).exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    stored = read_headers(source)
    parts: dict[str, list[str]] = {}
    for name in stored:
        if not any(word in name for word in SKIPPED) and not name.endswith(".scale"):
            parts.setdefault(_part(name), []).append(name)
    for number, (part, names) in enumerate(sorted(parts.items())):
        on_part(number, len(parts))
        save_file(dict(_tensors(stored, names, config)), target / f"{part}.safetensors")
    on_part(len(parts), len(parts))
    raw = json.loads((source / "config.json").read_text())
    raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    (target / "config.json").write_text(json.dumps(raw))
    (target / DONE).write_text("")
    return target


def _part(name: str) -> str:
    return "-".join(name.split(".")[:2]) if name.startswith("layers.") else "others"


def _tensors(
    stored: dict[str, StoredTensor], names: list[str], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    stacks: dict[str, list[Tensor]] = {}
    for name in names:
        if ".experts." in name:
            prefix, rest = name.split(".experts.")
            key = f"{prefix}.experts.{rest.split('.', 1)[1]}"
            stack = stacks.setdefault(key, [torch.empty(0)] * config.n_routed_experts)
            stack[int(rest.split(".", 1)[0])] = _plain(stored, name)
            continue
        value = _plain(stored, name)
        if name.endswith("attn.wo_a.weight"):
            value = value.unflatten(0, (config.o_groups, -1))
        yield name, value.contiguous()
    for key, stack in stacks.items():
        yield key, torch.stack(stack)


def _plain(stored: dict[str, StoredTensor], name: str) -> Tensor:
    value = _read(stored, name)
    scale = name.removesuffix("weight") + "scale"
    if not name.endswith(".weight") or scale not in stored:
        return value.float()
    unpack = unpack_fp4 if stored[name].dtype in ("I8", "U8") else unpack_fp8
    return unpack(value, _read(stored, scale))


def _read(stored: dict[str, StoredTensor], name: str) -> Tensor:
    with safe_open(str(stored[name].file), framework="pt") as file:
        return file.get_tensor(name)
