"""Tables and progress of benchmarks, on stderr."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deepmesh.report import Json

CONSOLE = Console(stderr=True, width=None if sys.stderr.isatty() else 160)


def show(title: str, keys: Sequence[str], cases: Sequence[dict[str, Json]]) -> None:
    """One row a case; `peers.NAME` is an entry of its peers. "key=heading" renames a column."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, key in enumerate(keys):
        heading = key.rpartition("=")[2]
        table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for case in cases:
        table.add_row(*(_cell(_value(case, key.partition("=")[0])) for key in keys))
    CONSOLE.print(table)


def _value(case: dict[str, Json], key: str) -> Json:
    head, _, rest = key.partition(".")
    inner = case.get(head)
    if rest and isinstance(inner, dict):
        return inner.get(rest)
    return inner


def _cell(value: Json) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def bar() -> Progress:
    """How many of how many, and what is measured now."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=CONSOLE,
        refresh_per_second=2,
        transient=True,
        disable=not CONSOLE.is_terminal,
    )
