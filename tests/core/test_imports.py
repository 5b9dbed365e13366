"""The layering of docs/architecture.md, read from the imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = [
    *sorted((ROOT / "services/scheduler/core").glob("*.py")),
    *sorted((ROOT / "services/scheduler/sim").glob("*.py")),
    *(
        ROOT / f"services/router/{name}.py"
        for name in ("policy", "placements", "replicas", "loads", "prefixes", "stats")
    ),
    ROOT / "deepmesh/wire/messages.py",
]
OURS = [
    p for top in ("deepmesh", "services", "kernels") for p in sorted((ROOT / top).rglob("*.py"))
]
WITHOUT_TENSORS = ["gateway", "tokenizer", "router", "scheduler"]


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.parent.relative_to(ROOT).parts if node.level else ()
            base = ".".join(package[: len(package) - node.level + 1])
            yield ".".join(filter(None, (base, node.module)))


def layer(path: Path) -> str:
    """deepmesh, kernels, or services.NAME."""
    parts = path.relative_to(ROOT).parts
    return ".".join(parts[:2]) if parts[0] == "services" else parts[0]


def allowed(importer: str, imported: str) -> bool:
    if imported.split(".")[0] not in ("deepmesh", "services", "kernels"):
        return True
    same = imported == importer or imported.startswith(importer + ".")
    match importer:
        case "deepmesh" | "kernels":
            return same
        case "services.executor":
            return same or imported.startswith(("deepmesh", "kernels"))
        case _:
            return same or imported.startswith("deepmesh")


# Some commands look into a service: `deepmesh model inspect` shows what the loader knows, `deepmesh
# model memory` and `deepmesh doctor` what fits on a GPU, `deepmesh model random` writes what the
# loader reads, `deepmesh simulate` runs the scheduler's simulator.
EXCEPTIONS = {
    ("deepmesh/cli/doctor.py", "services.executor.memory_checks"),
    *(
        ("deepmesh/cli/model_memory.py", f"services.executor.{name}")
        for name in ("memory_advice", "memory_plan", "memory_shapes")
    ),
    ("deepmesh/cli/model.py", "services.executor.inspect"),
    ("deepmesh/cli/model_random.py", "services.executor.random_model"),
    *(
        ("deepmesh/cli/simulate.py", f"services.scheduler.sim.{name}")
        for name in ("baselines", "picture", "requests", "simulate", "traffic", "workload_file")
    ),
    ("deepmesh/cli/simulate.py", "services.scheduler.sim.capacity"),
    ("deepmesh/cli/simulate_capacity.py", "services.scheduler.sim.capacity"),
    ("deepmesh/cli/simulate_soak.py", "services.scheduler.sim.soak"),
}


@pytest.mark.parametrize("path", OURS, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    wrong = [
        name
        for name in imports(path)
        if not allowed(layer(path), name) and (str(path.relative_to(ROOT)), name) not in EXCEPTIONS
    ]
    assert wrong == []


@pytest.mark.parametrize("path", PURE, ids=lambda p: str(p.relative_to(ROOT)))
def test_pure_parts_do_no_io(path: Path) -> None:
    banned = {"torch", "zmq", "asyncio", "socket", "threading", "time", "os", "subprocess"}
    assert {name.split(".")[0] for name in imports(path)} & banned == set()


@pytest.mark.parametrize("service", WITHOUT_TENSORS)
def test_services_without_tensors_never_import_torch(service: str) -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import services.{service}.__main__"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    modules = {line.rsplit("|", 1)[-1].strip() for line in run.stderr.splitlines()}
    assert f"services.{service}.__main__" in modules
    assert modules & {"torch", "triton", "transformers", "safetensors"} == set()


def test_kernels_shows_no_version() -> None:
    """transformers probes for a PyPI package called `kernels` and would take ours for it."""
    assert (ROOT / "kernels/__init__.py").read_text() == ""
