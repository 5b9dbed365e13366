"""`deepmesh model inspect`: what a checkpoint is and needs, without loading it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from services.executor.inspect import ModelSummary


def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of the checkpoint, or its config.json.")],
    ranks: Annotated[int, typer.Option(min=1, help="Executors that share the experts.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Show configuration, sizes, KV bytes a token and memory per rank; weights may be absent."""
    import dataclasses
    import json

    from rich.console import Console

    from deepmesh.errors import UserError

    # The one place where the command line reaches into a service: its formats are the executor's.
    from services.executor.inspect import describe

    try:
        summary = describe(path, ranks)
    except ValueError as error:  # config.json is not there, or not one that can be served
        raise UserError(str(error)) from error
    if as_json:
        totals = {
            "num_tensors": summary.num_tensors,
            "num_parameters": summary.num_parameters,
            "num_bytes": summary.num_bytes,
        }
        print(json.dumps({**dataclasses.asdict(summary), **totals}, indent=2))
    else:
        draw(Console(highlight=False), summary)
    if summary.problems:
        raise typer.Exit(1)


def draw(console: "Console", summary: "ModelSummary") -> None:
    """Everything as tables."""
    config, kv = summary.config, summary.kv
    console.print(f"[bold]{summary.path}[/bold]  {number(summary.num_parameters)} parameters")
    rows = [
        ("layers", f"{config.num_hidden_layers}, and {config.num_stages} draft stages"),
        ("hidden size", str(config.hidden_size)),
        ("heads", f"{config.num_attention_heads} of {config.head_dim}"),
        ("experts", f"{config.n_routed_experts}, {config.num_experts_per_tok} a token"),
        ("window", f"{config.sliding_window} tokens"),
        ("compress ratios", " ".join(map(str, config.compress_ratios))),
        ("index top-k", str(config.index_topk)),
        ("Engram layers", " ".join(map(str, config.engram_layer_ids)) or "none"),
        ("longest context", f"{config.max_model_len} tokens"),
        ("vocabulary", str(config.vocab_size)),
    ]
    console.print(_table(("configuration", ""), rows))
    parts = [
        (part.name, str(part.num_tensors), number(part.num_parameters), size(part.num_bytes))
        for part in summary.parts
    ]
    total = str(summary.num_tensors), number(summary.num_parameters), size(summary.num_bytes)
    parts.append(("all", *total))
    console.print(_table(("weights as stored", "tensors", "parameters", "bytes"), parts))
    cache = [
        ("a token of context", size(kv.per_token)),
        ("global block (64 tokens)", size(kv.global_block)),
        ("window block (64 tokens)", size(kv.window_block)),
        ("state of a request", size(kv.state_block)),
        ("resumable point", size(kv.resumable_point)),
        ("halo: recomputed without a point", f"{summary.halo_tokens} tokens"),
    ]
    console.print(_table(("KV cache", ""), cache))
    ranks = [
        (str(rank.rank), str(rank.num_experts), size(rank.device_bytes), size(rank.host_bytes))
        for rank in summary.ranks
    ]
    console.print(_table(("rank", "experts a layer", "device", "host (mapped)"), ranks))
    console.print(_verdict(summary), style="red" if summary.problems else "dim")


def _verdict(summary: "ModelSummary") -> str:
    if summary.problems:
        return summary.problems
    if summary.has_weights:
        return "weights: all tensors are there, with the right shapes and dtypes"
    return "weights: not here; sizes are those of the configuration"


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def size(num_bytes: int) -> str:
    """Bytes for people."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def number(count: int) -> str:
    """A count for people."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T")).rstrip()


def _scaled(value: int, base: int, units: tuple[str, ...]) -> str:
    scaled, unit = float(value), 0
    while scaled >= base and unit < len(units) - 1:
        scaled, unit = scaled / base, unit + 1
    return f"{scaled:.2f} {units[unit]}" if unit else f"{value} {units[0]}"
