"""Native kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native

ROOT = Path(__file__).parents[2]
FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUN = """
import sys, torch
from kernels import native
native.use(sys.argv[1], tuple(sys.argv[2:]))
from services.executor.weights import load_model
from tests.kernels.test_rows_alone import CASES
from tests.model.driving import FIXTURE, alone, random_ids
for rows, op in CASES.values():
    for part in (slice(None), slice(0, 1), slice(0, 0), slice(3, 20)):
        op(*[x[part].contiguous() for x in rows])
    torch.set_num_threads(2)
    op(*rows)
    torch.set_num_threads(1)
for numerics in ("exact", "bf16"):
    alone(load_model(FIXTURE, numerics), random_ids(90, seed=0))
print("clean")
"""


def runtime(name: str) -> str:
    """Path of a sanitizer's library."""
    command = [native.COMPILER, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", native.supported_levels())
def test_no_access_out_of_bounds_and_nothing_undefined(level: str) -> None:
    native.build_levels([level], FLAGS)  # here: below the sanitizers' libraries it takes longer
    libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    assert all(os.path.isabs(path) for path in libraries), "the compiler's sanitizers are missing"
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it allocates
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, level, *FLAGS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "clean"


@pytest.mark.timeout(100)
def test_ranks_that_write_to_each_other_never_touch_what_another_may_be_at(tmp_path: Path) -> None:
    """The one-sided exchange's protocol, under ThreadSanitizer."""
    program = tmp_path / "exchange"
    headers = (native.HEADERS, ROOT / "kernels" / "comm" / "csrc")
    command = [
        *(native.COMPILER, "-x", "c++", "-O1", "-g", "-std=c++17", "-fsanitize=thread"),
        *("-Wno-tsan", "-pthread", *(f"-I{folder}" for folder in headers)),
        *(str(Path(__file__).with_name("exchange_threads.cpp")), "-o", str(program)),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.strip() == "clean"
    assert "WARNING" not in done.stderr
