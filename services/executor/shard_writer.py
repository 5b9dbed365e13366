"""Checkpoint shards written tensor by tensor: nothing larger than a piece is ever in memory."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.executor.tensor_specs import DTYPE_BYTES, TensorSpec

SHARD_BYTES = 2 << 30  # parts of the model are gathered up to here; a larger part is one shard
INDEX = "model.safetensors.index.json"

Pieces = Callable[[TensorSpec], Iterable[NDArray[np.uint8]]]


def write_shards(
    folder: Path, specs: list[TensorSpec], pieces: Pieces, on_bytes: Callable[[int], None]
) -> None:
    """Write all tensors and their index in the released form: a layer lies in one file.

    Args:
        pieces: the bytes of a tensor, in order.
        on_bytes: told of every so many bytes written.
    """
    shards = list(gather(specs))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / name, shard, pieces, on_bytes)
        weight_map.update({spec.name: name for spec in shard})
    total = sum(spec.num_bytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=0) + "\n")


def gather(specs: list[TensorSpec], limit: int = SHARD_BYTES) -> Iterator[list[TensorSpec]]:
    """Tensors by shard: neighbouring parts of the model, up to `limit` bytes together."""
    parts: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parts.setdefault(_part(spec.name), []).append(spec)
    shard: list[TensorSpec] = []
    for part in parts.values():
        if shard and _size(shard) + _size(part) > limit:
            yield shard
            shard = []
        shard = shard + part
    if shard:
        yield shard


def _part(name: str) -> str:
    """A layer, a draft stage, an Engram table, or what stands alone."""
    if ".engram.embed." in name:
        return name.rsplit(".", 1)[0]
    return ".".join(name.split(".")[: 2 if name.startswith(("layers.", "mtp.")) else 1])


def _size(specs: list[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)


def _write(
    file: Path, specs: list[TensorSpec], pieces: Pieces, on_bytes: Callable[[int], None]
) -> None:
    specs = sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])  # keeps all of them aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for spec in specs:
            written = 0
            for piece in pieces(spec):
                written += stream.write(piece.data)
                on_bytes(len(piece))
            assert written == spec.num_bytes, f"{spec.name}: {written} of {spec.num_bytes} bytes"
