"""Checkpoint folder: shards, their headers, and the check of every tensor. No torch."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from services.executor.tensor_specs import IGNORED_PREFIXES, TensorSpec

SAME_DTYPE = {"F8_E8M0": ("F8_E8M0", "U8"), "I8": ("I8", "U8")}  # how other tools label them


MAX_HEADER_BYTES = 100 << 20  # as safetensors itself has it
_BAD_JSON = (ValueError, KeyError, AttributeError, TypeError, RecursionError)
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_decoder = msgspec.json.Decoder(_Entry)


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
        except _BAD_JSON as error:
            raise CheckpointError(f"{index}: not a safetensors index") from error
        outside = [name for name in names if not _is_file_name(name)]
        if outside:
            raise CheckpointError(f"{index}: {outside[0]!r} is no file of this folder")
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
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: a header of {length} bytes is none")
        text = stream.read(length)
    try:
        tensors = _tensors(text)
    except _BAD_JSON as error:
        raise CheckpointError(f"{file}: its header is no safetensors header: {error}") from error
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if end > size - 8 - length:
        raise CheckpointError(f"{file}: cut short, {end + 8 + length - size} bytes missing")
    return {
        name: StoredTensor(file, tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    }


def _is_file_name(name: object) -> bool:
    """No path: an index must not lead to files elsewhere."""
    if not isinstance(name, str) or len(name.encode("utf-8", "surrogatepass")) > 255:
        return False
    return name == Path(name).name and bool(name.strip(".")) and "\0" not in name


def _tensors(text: bytes) -> dict[str, _Entry]:
    header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    return {name: _decoder.decode(entry) for name, entry in header.items()}


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
