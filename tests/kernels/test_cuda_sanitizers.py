"""CUDA kernels under compute-sanitizer: no access out of bounds, no race in shared memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}
PARTS = (
    *("attention_decode", "attention_of_prompts", "exchange", "experts_decode", "experts_prefill"),
    *(
        "forward_of_any_shape",
        "index_decode",
        "index_of_prompts",
        "linear_bf16_codes",
        "linear_bf16_weights",
    ),
    *("linear_fp8", "linear_fp8_wide", "linear_of_prompts", "router", "rows_between_products"),
    *("rows_of_prompts", "sampler", "seam_decode", "seam_of_prompts", "stored_rows"),
)


def test_every_family_is_among_the_parts() -> None:
    text = (ROOT / "tests/kernels/small_kernels.py").read_text()
    found = [piece.partition("(")[0] for piece in text.split("@part\ndef ")[1:]]
    assert sorted(found) == sorted(PARTS)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("tool", CLEAN)
def test_kernels_are_clean(tool: str, part: str) -> None:
    """Several at once: `pytest -m "gpu and long" -n 12`; each takes well under a minute."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    assert Path(program).is_file(), "compute-sanitizer is missing: it comes with the CUDA toolkit"
    done = subprocess.run(
        [
            *(program, "--tool", tool, "--error-exitcode", "9"),
            *(sys.executable, "-m", "tests.kernels.small_kernels", part),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert CLEAN[tool] in said, said[-2000:]
