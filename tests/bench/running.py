"""Runs a benchmark as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bench(name: str, *options: str, results: Path | None = None) -> tuple[dict, str]:
    """What it printed, and what it said on stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    store = ["--no-store"]
    if results is not None:
        environment["DEEPMESH_RESULTS"], store = str(results), []
    done = subprocess.run(
        [sys.executable, "-m", "deepmesh.cli", "bench", name, "--json", *store, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout), done.stderr
