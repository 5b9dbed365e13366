"""Builds and loads the CUDA kernels: one source per operation, compiled by nvcc at first use.

As for the CPU kernels, the library's name holds a hash of source, flags and compiler. There is no
fallback on a GPU: without nvcc and without a library that was built before, the error says so.
"""

import ctypes
import functools
import hashlib
import re
import shutil
from pathlib import Path

import torch

from kernels.native import HEADERS, BuildError, compile_library

_KERNELS = Path(__file__).parent
_BUILD = _KERNELS / "build"
FLAGS = (
    *("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"),
    *("-Xcompiler", "-fPIC", "-shared"),
)


class CudaError(RuntimeError):
    """A launch failed; the number is a cudaError_t."""


@functools.cache
def load(family: str, name: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Build `kernels/FAMILY/csrc/NAME.cu` for sm_90a unless it is there, and load it.

    Raises:
        BuildError: no nvcc, or it refused the source.
    """
    return ctypes.CDLL(str(build(family, name, extra_flags)))


def build(family: str, name: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """Path of the built library. See `load`."""
    source, flags = _KERNELS / family / "csrc" / f"{name}.cu", (*FLAGS, *extra_flags)
    digest = hashlib.sha256("\0".join(flags).encode())
    headers = (*sorted(source.parent.glob("*.cuh")), *sorted(HEADERS.glob("*.cuh")))
    for file in (source, *headers, *_of_other_families(source)):
        digest.update(file.read_bytes())
    target = _BUILD / f"{family}-{name}-sm90a-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise BuildError(f"nvcc is not installed, and {target.name} was not built before")
    _BUILD.mkdir(exist_ok=True)
    compile_library(nvcc, flags, source, target)
    return target


def _of_other_families(source: Path) -> list[Path]:
    """Headers that it includes by their path and that are not everybody's."""
    paths = re.findall(r'#include "(\.\./[^"]+)"', source.read_text())
    found = [(source.parent / path).resolve() for path in paths]
    return [file for file in found if file.parent != HEADERS.resolve()]


def check(code: int) -> None:
    """Raise for what a launcher returned.

    Raises:
        CudaError: it is not cudaSuccess.
    """
    if code:
        raise CudaError(f"CUDA error {code}")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks run at once, of kernels that fill a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
