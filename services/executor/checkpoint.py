"""Checkpoint folder: shards, their headers, and the check of every tensor. No torch."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.executor.tensor_specs import IGNORED_PREFIXES, TensorSpec

SAME_DTYPE = {"F8_E8M0": ("F8_E8M0", "U8"), "I8": ("I8", "U8")}  # how other tools label them


class CheckpointError(ValueError):
    """The weights do not fit config.json; the text lists every tensor at fault."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its file says about it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder's shards, by name; reads headers only.

    Raises:
        CheckpointError: no weights, a shard of the index is missing, or a file is cut short.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index") from error
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no model.safetensors and no index")
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(f"{folder}: shards missing: {', '.join(absent)}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(_read_header(file))
    return tensors


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise CheckpointError(f"{file}: not a safetensors file, or cut short")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size - 8 - length:
        raise CheckpointError(f"{file}: cut short, {end + 8 + length - size} bytes missing")
    return {
        name: StoredTensor(file, tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }


def check_tensors(specs: Iterable[TensorSpec], stored: dict[str, StoredTensor]) -> None:
    """Compare what there is with what there must be.

    Raises:
        CheckpointError: lists all missing, surplus, wrong-shape and wrong-dtype tensors.
    """
    expected = {spec.name: spec for spec in specs}
    missing = [name for name in expected if name not in stored]
    surplus = [n for n in stored if n not in expected and not n.startswith(IGNORED_PREFIXES)]
    shapes: list[str] = []
    dtypes: list[str] = []
    for name, spec in expected.items():
        found = stored.get(name)
        if found is None:
            continue
        if found.shape != spec.shape:
            shapes.append(f"{name} {list(found.shape)}, need {list(spec.shape)}")
        if found.dtype not in SAME_DTYPE.get(spec.dtype, (spec.dtype,)):
            dtypes.append(f"{name} {found.dtype}, need {spec.dtype}")
    lists = {"missing": missing, "surplus": surplus, "wrong shape": shapes, "wrong dtype": dtypes}
    faults = [f"{len(names)} {kind}: {'; '.join(names)}" for kind, names in lists.items() if names]
    if faults:
        raise CheckpointError("weights do not fit config.json\n" + "\n".join(faults))
