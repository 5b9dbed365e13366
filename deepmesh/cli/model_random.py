"""`deepmesh model random`: a checkpoint of random weights, for timing and tests."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress


def random(
    out: Annotated[Path, typer.Option(help="New folder for the checkpoint.")],
    preset: Annotated[
        str, typer.Option(help="Shapes: v41-medium (0.8 GB), v41-flash, v41-nano (for tests).")
    ] = "v41-medium",
    layers: Annotated[
        int | None,
        typer.Option(help="Only so many layers, of full size and of every kind; default: all."),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(help="Draft stages; default: all, or none with --layers."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json to cut or pad; default: that of models/tiny."),
    ] = None,
) -> None:
    """Write random weights in the released layout; nothing sensible is ever answered."""
    from rich.console import Console

    from deepmesh.cli.model import size
    from deepmesh.errors import UserError

    # As for `model inspect`: the formats are the executor's.
    from services.executor.random_model import SHIPPED_TOKENIZER, write_random_model

    with bytes_bar() as bar:
        task = bar.add_task(f"writing {out}", total=None)
        try:
            num_bytes = write_random_model(
                out,
                preset,
                layers=layers,
                stages=stages,
                seed=seed,
                tokenizer=tokenizer or SHIPPED_TOKENIZER,
                on_bytes=lambda done, total: bar.update(task, completed=done, total=total),
            )
        except (ValueError, OSError) as error:  # of the options, the folder or the disk
            raise UserError(str(error)) from error
    Console(stderr=True, highlight=False).print(
        f"{out}: {size(num_bytes)} of random weights; look at it with"
        f" [bold]deepmesh model inspect {out}[/bold]"
    )


def bytes_bar() -> "Progress":
    """A bar on stderr that counts bytes; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
