"""`deepmesh check NAME …`: checks of what the mesh promises."""

import importlib
import sys
from pathlib import Path

import typer

_ROOT = Path(__file__).parents[2]
CHECKS = {"determinism": "bench.determinism.check"}


def check(context: typer.Context, name: str) -> None:
    """Check one promise; `deepmesh check NAME --help` shows its options. Checks: determinism.

    Raises:
        typer.Exit: no such check, or what it exits with.
    """
    if name not in CHECKS or not (_ROOT / "bench").is_dir():
        known = ", ".join(CHECKS) if (_ROOT / "bench").is_dir() else "none without a checkout"
        print(f"no check {name!r}; there are: {known}", file=sys.stderr)
        raise typer.Exit(2)
    sys.path.insert(0, str(_ROOT))
    raise typer.Exit(importlib.import_module(CHECKS[name]).main(context.args))
