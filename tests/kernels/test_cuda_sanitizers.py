"""CUDA kernels under compute-sanitizer: no access out of bounds, no race in shared memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["decode", "prefill", "sample"])
@pytest.mark.parametrize("tool", CLEAN)
def test_kernels_are_clean(tool: str, part: str) -> None:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    assert Path(program).is_file(), "compute-sanitizer is missing: it comes with the CUDA toolkit"
    done = subprocess.run(
        [
            *(program, "--tool", tool, "--error-exitcode", "9"),
            *(sys.executable, "-m", "tests.kernels.small_forwards", part),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert CLEAN[tool] in said, said[-2000:]
