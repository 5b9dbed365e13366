"""`deepmesh model inspect`: what a checkpoint is and needs, without loading it."""

from pathlib import Path
from typing import Annotated

import typer

from deepmesh.cli.options import JsonOption


def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of the checkpoint, or its config.json.")],
    ranks: Annotated[int, typer.Option(min=1, help="Executors that share the experts.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Show configuration, sizes, KV bytes a token, and memory per rank; weights may be absent."""
