"""Images compile exactly the CUDA libraries that the functions of kernels/ load."""

import ast
from collections.abc import Iterator
from pathlib import Path

from kernels import portable
from kernels.build_all import sources

KERNELS = Path(__file__).parents[2] / "kernels"
LOADERS = {"load": "cuda", "library": "portable", "run": "portable"}


def loaded() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Calls of cuda.load, portable.library and portable.run that name their library."""
    for path in KERNELS.glob("*/*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id.endswith("FLAGS")
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            module, called = node.func.value, node.func.attr
            if not isinstance(module, ast.Name) or LOADERS.get(called) != module.id:
                continue
            words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
            if len(words) < 2:
                continue  # named by a variable
            flags = portable.DEVICE_FLAGS if module.id == "portable" else ()
            if module.id == "cuda" and len(node.args) > 2:
                given = node.args[2]
                is_name = isinstance(given, ast.Name)
                flags = constants[given.id] if is_name else ast.literal_eval(given)
            yield str(words[0]), str(words[1]), flags


def test_every_library_is_compiled_ahead_with_the_flags_that_it_is_loaded_with() -> None:
    ahead, wanted = set(sources()), set(loaded())
    assert len(wanted) >= 20
    assert wanted <= ahead
    assert {(family, name) for family, name, _ in ahead} == {
        (path.parents[1].name, path.stem) for path in KERNELS.glob("*/csrc/*.cu")
    }
