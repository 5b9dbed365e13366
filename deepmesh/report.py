"""The one JSON object that a benchmark, check or simulation prints with --json, and its record.

Progress and tables go to stderr; stdout holds the object and nothing else.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS_VARIABLE = "DEEPMESH_RESULTS"  # another folder for what is measured
MAX_STEAL = 0.02  # share of the time that a hypervisor took away, above which a run is not valid
_VERSIONS = ("deepmesh", "numpy", "pyzmq", "msgspec", "torch", "triton")

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Steal:
    """Share of CPU time stolen by the hypervisor between two looks at /proc/stat."""

    def __init__(self) -> None:
        self._last = _jiffies()

    def take(self) -> float:
        """Since the last call; 0 where the system does not say."""
        last, self._last = self._last, _jiffies()
        total = self._last[0] - last[0]
        return (self._last[1] - last[1]) / total if total > 0 else 0.0


def report(
    command: str,
    *,
    config: dict[str, Json],
    cases: list[dict[str, Json]],
    ok: bool,
    gpu: str | None = None,
) -> dict[str, Json]:
    """The object: what ran, on what, and what was measured."""
    return {
        "command": command,
        "commit": _commit(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count() or 1, "gpu": gpu},
        "versions": _versions(),
        "config": config,
        "cases": list(cases),
        "ok": ok,
    }


def publish(found: dict[str, Json], *, name: str, as_json: bool, store: bool = True) -> None:
    """Append the object to `bench/results/<name>.jsonl`, say so, and print it if asked."""
    line = json.dumps(found)
    results = Path(os.environ.get(RESULTS_VARIABLE, ROOT / "bench" / "results"))
    if store and results.parent.is_dir():
        results.mkdir(exist_ok=True)
        path = results / f"{name}.jsonl"
        with path.open("a") as file:
            file.write(line + "\n")
        print(f"appended to {path} ({RESULTS_VARIABLE} names another folder)", file=sys.stderr)
    if as_json:
        print(line)


def _jiffies() -> tuple[int, int]:
    """All of them, and the stolen ones."""
    try:
        fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(fields), fields[7] if len(fields) > 7 else 0


def _commit() -> str:
    """Short hash of the checkout, with + if something is not committed; empty without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> dict[str, Json]:
    found: dict[str, Json] = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
