"""`deepmesh bench NAME …`: the benchmarks of bench/, one file (or folder) per question."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

_FOLDER = Path(__file__).parents[2] / "bench"


def bench(context: typer.Context, name: Annotated[str, typer.Argument()] = "") -> None:
    """Measure one thing; without a name, what there is. `deepmesh bench NAME --help`: its options.

    Raises:
        typer.Exit: no such benchmark, or what it exits with.
    """
    modules = benchmarks()
    if not name and modules:
        for known, file in sorted(modules.items()):
            print(f"{known:14} {_question(file)}")
        return
    if name not in modules:
        known = ", ".join(modules) if modules else "none: run it from a checkout of the project"
        print(f"no benchmark {name!r}; there are: {known}", file=sys.stderr)
        raise typer.Exit(2)
    sys.path.insert(0, str(_FOLDER.parent))
    sys.argv = [f"deepmesh bench {name}", *context.args]
    module = importlib.import_module(modules[name])
    raise typer.Exit(module.main() or 0)


def _question(module: str) -> str:
    """The first line of its docstring; nothing is imported for it."""
    path = _FOLDER.parent / Path(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    return doc.partition("\n")[0]


def benchmarks() -> dict[str, str]:
    """Modules with a command line of their own, by name."""
    files = [*_FOLDER.glob("[a-z]*.py"), *_FOLDER.glob("*/__main__.py")]
    found = {
        file.parent.name if file.stem == "__main__" else file.stem: file
        for file in files
        if "def main(" in file.read_text()
    }
    return {
        name: ".".join(found[name].relative_to(_FOLDER.parent).with_suffix("").parts)
        for name in sorted(found)
    }
