"""The checkpoint that a benchmark runs on: a folder, or a preset that is made on first use."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.floor import cache_folder
from deepmesh.cli.model_random import bytes_bar
from services.executor.model_config import ModelConfig, load_config
from services.executor.presets import PRESETS
from services.executor.random_model import GENERATION, write_random_model

TINY = Path(__file__).parents[1] / "models" / "tiny"


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and what to call it in a report."""

    name: str
    folder: Path
    config: ModelConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    """--preset, --model and --cache."""
    names = ["tiny", *PRESETS]
    parser.add_argument("--preset", choices=names, default="v41-medium")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint, instead of a preset")
    parser.add_argument(
        "--cache", type=Path, default=cache_folder(), help="where presets and peers are kept"
    )


def open_checkpoint(arguments: argparse.Namespace) -> Checkpoint:
    """What the options ask for; random weights are written once, seed 0."""
    if arguments.model is not None:
        folder = arguments.model
        return Checkpoint(folder.resolve().name, folder, load_config(folder))
    name: str = arguments.preset
    folder = TINY if name == "tiny" else _made(name, arguments.cache)
    return Checkpoint(name, folder, load_config(folder))


def _made(preset: str, cache: Path) -> Path:
    folder = cache / "models" / f"{preset}-{GENERATION}"
    if not (folder / "config.json").exists():
        with bytes_bar() as bar:
            task = bar.add_task(f"writing {preset}", total=None)
            write_random_model(
                folder,
                preset,
                on_bytes=lambda done, total: bar.update(task, completed=done, total=total),
            )
    return folder
