"""A whole random checkpoint: `deepmesh model random`, and models for benchmarks. No torch."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.executor.compressed_ids import compressed_ids
from services.executor.model_config import parse_config
from services.executor.presets import preset_config
from services.executor.random_weights import random_pieces
from services.executor.shard_writer import write_shards
from services.executor.sized_tokenizer import sized_tokenizer
from services.executor.tensor_specs import tensor_specs

SPARE_BYTES = 256 << 20  # left free on the disk
GENERATION = 1  # changes with the bytes that a preset and a seed give
SHIPPED_TOKENIZER = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer.json"

OnBytes = Callable[[int, int], None]  # done, total


class RandomModelError(ValueError):
    """The checkpoint cannot be written there; the text says why."""


def write_random_model(
    out: Path,
    preset: str,
    *,
    layers: int | None = None,
    stages: int | None = None,
    seed: int = 0,
    tokenizer: Path = SHIPPED_TOKENIZER,
    on_bytes: OnBytes = lambda done, total: None,
) -> int:
    """Write a checkpoint of the released layout into the new folder `out`; returns its bytes.

    The same preset, slice and seed give the same bytes. The folder appears when it is complete.

    Raises:
        PresetError: see `preset_config`.
        TokenizerSizeError: the preset's vocabulary is too small for the tokenizer.
        RandomModelError: the folder is not empty, the disk too small, or there is no tokenizer.
    """
    raw = preset_config(preset, layers=layers, stages=stages)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RandomModelError(f"{out}: is there already; name a new folder")
    if not tokenizer.is_file():
        raise RandomModelError(f"{tokenizer}: no such file; name a tokenizer.json")
    text = raw["text_config"]
    text["engram_compressed_vocab_size"] = 1  # sizes do not depend on it
    total = sum(spec.num_bytes for spec in tensor_specs(parse_config(raw)))
    check_disk(out, total)
    partial_folder = out.with_name(out.name + ".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    try:
        partial_folder.mkdir(parents=True)
        file = partial_folder / "tokenizer.json"
        file.write_text(sized_tokenizer(tokenizer, text["vocab_size"]), "utf-8")
        text["engram_compressed_vocab_size"] = max(compressed_ids(file, text["vocab_size"])) + 1
        specs = tensor_specs(parse_config(raw))
        written = 0

        def tell(count: int) -> None:
            nonlocal written
            written += count
            on_bytes(written, total)

        write_shards(partial_folder, specs, partial(random_pieces, seed=seed), tell)
        (partial_folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
        if out.exists():
            out.rmdir()
        partial_folder.rename(out)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return total


def check_disk(out: Path, total: int) -> None:
    """Whether a folder of `total` bytes fits.

    Raises:
        RandomModelError: it does not.
    """
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < total + SPARE_BYTES:
        raise RandomModelError(
            f"{out}: {total / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free on that"
            " disk; fewer --layers take less"
        )
