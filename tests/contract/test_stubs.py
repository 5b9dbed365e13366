"""Stubs and examples are foreign: no code of ours, and short enough to be read in one go."""

import ast
import sys
from pathlib import Path

import pytest

FOLDERS = (Path(__file__).parent / "stubs", Path(__file__).parents[2] / "examples")
PROGRAMS = sorted(p for folder in FOLDERS for p in folder.glob("*.py") if p.name[0] != "_")
ALLOWED = {"zmq", "msgpack", "link"}
MAX_LINES = 150


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_foreign_program_uses_pyzmq_and_msgpack_alone(path: Path) -> None:
    source = path.read_text()
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    store = {"redis"} if path.stem == "redis_kvstore" else set[str]()
    assert found - set(sys.stdlib_module_names) <= ALLOWED | store
    assert len([line for line in source.splitlines() if line.strip()]) < MAX_LINES


def test_the_raw_side_knows_nothing_of_ours() -> None:
    for name in ("raw.py", "raw_executor.py", "targets.py", "foreign.py"):
        tree = ast.parse((Path(__file__).parent / name).read_text())
        modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not [m for m in modules if m.startswith(("deepmesh", "services", "kernels"))]
