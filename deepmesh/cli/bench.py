"""`deepmesh bench NAME …`: the benchmarks of bench/, one file per question."""

import importlib
import sys
from pathlib import Path

import typer

_FOLDER = Path(__file__).parents[2] / "bench"


def bench(context: typer.Context, name: str) -> None:
    """Measure one thing; `deepmesh bench NAME --help` shows its options.

    Raises:
        typer.Exit: no such benchmark, or what it exits with.
    """
    names = sorted(p.stem for p in _FOLDER.glob("[a-z]*.py") if "def main(" in p.read_text())
    if name not in names:
        known = ", ".join(names) if names else "none: run it from a checkout of the project"
        print(f"no benchmark {name!r}; there are: {known}", file=sys.stderr)
        raise typer.Exit(2)
    sys.path.insert(0, str(_FOLDER.parent))
    sys.argv = [f"deepmesh bench {name}", *context.args]
    module = importlib.import_module(f"bench.{name}")
    raise typer.Exit(module.main() or 0)
