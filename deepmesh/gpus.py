"""The GPUs of this machine, as its driver names them; CUDA is not started for it.

`python -m deepmesh.gpus --least 2` is what containers wait for (compose/compose.gpu.yaml).
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FIELDS = ("name", "compute_cap", "memory.total", "memory.free", "driver_version")
ANSWER_S = 20.0  # a driver that wakes up takes seconds
MIB = 1 << 20
DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder a card; containers without GPUs see it, too
HOPPER = "9.0"  # what the fast kernels are compiled for


@dataclass(frozen=True)
class Gpu:
    """One card."""

    name: str
    compute_capability: str  # "9.0"
    total_bytes: int
    free_bytes: int
    driver: str


class NoGpus(Exception):
    """There are none; the text says what is missing."""


def found_gpus(program: str = "nvidia-smi") -> list[Gpu]:
    """All that processes of this machine (or container) see.

    Raises:
        NoGpus: no driver, or no card.
    """
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ANSWER_S
        )
    except FileNotFoundError as error:
        raise NoGpus(
            f"{program} is not there: no NVIDIA driver, or a container without GPUs"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpus(f"{program}: {error}") from error
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise NoGpus(f"{program}: {said.splitlines()[0] if said else done.returncode}")
    gpus = [_gpu(line) for line in done.stdout.splitlines() if line.strip()]
    if not gpus:
        raise NoGpus(f"{program} lists no GPU")
    return gpus


def _gpu(line: str) -> Gpu:
    name, capability, total, free, driver = (part.strip() for part in line.split(","))
    try:
        return Gpu(name, capability, int(total) * MIB, int(free) * MIB, driver)
    except ValueError as error:
        raise NoGpus(f"nvidia-smi says of a GPU: {line.strip()}") from error


def missing_gpus(least: int, driver: Path = DRIVER) -> str:
    """Why this host cannot run so many executors on GPUs, and what to do; empty: it can."""
    if not driver.is_dir():
        return (
            "this host has no NVIDIA driver (/proc/driver/nvidia is not there): install it and the"
            " NVIDIA Container Toolkit, or leave compose.gpu.yaml out and run on CPUs"
        )
    found = sum(1 for _ in driver.iterdir())
    if found < least:
        return (
            f"this host has {found} GPUs where {least} are asked for: run `python3 compose/gpus.py"
            f" --replicas {found}`, which writes compose.gpu.yaml and mesh.gpu.toml for so many"
        )
    return ""


def main() -> int:
    """0 if there are enough; else 1 and why, on stderr."""
    parser = argparse.ArgumentParser(prog="python -m deepmesh.gpus", description=__doc__)
    parser.add_argument("--least", type=int, default=1, help="GPUs that the host must have")
    words = missing_gpus(parser.parse_args().least)
    if words:
        print(words, file=sys.stderr)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
