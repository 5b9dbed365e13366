"""`deepmesh model memory`: what a model takes of GPUs and their host, and what it leaves for KV."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from rich.console import Console

    from services.executor.memory_plan import MemoryPlan

RANKS = (1, 2, 4, 8)
GB = 1_000_000_000


def memory(
    path: Annotated[
        Path | None, typer.Argument(help="Folder of the checkpoint; default: that of --config.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Shapes instead of a folder: v41-flash.")] = "",
    layers: Annotated[int | None, typer.Option(help="Of the preset: a slice.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share the experts; default: 1, 2, 4 and 8.")
    ] = None,
    card_gb: Annotated[float, typer.Option(help="Memory of a GPU, 10^9 bytes.")] = 141.0,
    host_gb: Annotated[
        float | None, typer.Option(help="Memory of the host; default: this one's.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show weights, working memory and room for context on each GPU; exit 1 if nothing fits."""
    import dataclasses
    import json

    from rich.console import Console

    from deepmesh.config import load_config
    from deepmesh.errors import UserError

    # As for `model inspect`: the sizes are the executor's.
    from services.executor.memory_advice import refusal
    from services.executor.memory_shapes import plans

    mesh = load_config(config)
    try:
        found = plans(
            mesh,
            path=path or Path(mesh.mesh.model),
            preset=preset,
            layers=layers,
            ranks=RANKS if ranks is None else (ranks,),
            card_bytes=round(card_gb * GB),
            host_bytes=None if host_gb is None else round(host_gb * GB),
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if as_json:
        cases = [
            {
                "ranks": plan.ranks,
                "cards": dataclasses.asdict(plan.cards),
                "weights": plan.weights,
                "working": plan.working,
                "host_bytes": plan.host_bytes,
                "pool_bytes": plan.pool_bytes,
                "context_tokens": plan.context_tokens,
                "longest": plan.longest,
                "fits": plan.fits,
                "refusal": refusal(plan),
            }
            for plan in found
        ]
        print(json.dumps({"cases": cases}, indent=2))
    else:
        draw(Console(highlight=False), found)
    if not any(plan.fits for plan in found):
        raise typer.Exit(1)


def draw(console: "Console", found: "list[MemoryPlan]") -> None:
    """A column for each number of ranks."""
    from rich import box
    from rich.table import Table

    from services.executor.memory_advice import gib, refusal

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("of each GPU")
    for plan in found:
        table.add_column(f"{plan.ranks} GPUs" if plan.ranks > 1 else "1 GPU", justify="right")
    for title in ("weights", "working"):
        for part in getattr(found[0], title):
            sizes = [gib(getattr(plan, title).get(part, 0)) for plan in found]
            table.add_row(part, *sizes)
        table.add_section()
    table.add_row("left for KV", *(gib(plan.pool_bytes) for plan in found))
    table.add_row("tokens of context", *(f"{plan.context_tokens:,}" for plan in found))
    table.add_row("longest request", *(f"{plan.longest:,}" for plan in found))
    table.add_row("host memory (Engram)", *(gib(plan.host_bytes) for plan in found))
    table.add_row("fits", *("yes" if plan.fits else "no" for plan in found))
    console.print(table)
    for plan in found:
        if words := refusal(plan):
            console.print(f"{plan.ranks}: {words}", style="dim", soft_wrap=True)
