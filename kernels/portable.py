"""Kernels of any shape (`csrc/each.cuh`): one source that runs on a GPU and, for tests, on a host.

Both compute the same bits, which are those of the native CPU kernels: no contraction, one order of
sums. They are what a GPU runs where no kernel of `*_cuda.py` has code for a shape or a precision.
"""

import ctypes
import functools
import hashlib
import shutil
from pathlib import Path

import torch
from torch import Tensor

from kernels import cuda
from kernels.native import COMPILER, HEADERS, LEVELS, BuildError, compile_library, supported_levels

_KERNELS = Path(__file__).parent
_HOST_FLAGS = (
    *("-x", "c++", "-O2", "-std=c++17", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-Wno-unknown-pragmas"),
)
DEVICE_FLAGS = ("-fmad=false",)

Argument = Tensor | int | float | None


def run(family: str, source: str, function: str, *arguments: Argument) -> None:
    """Call `function` of `kernels/FAMILY/csrc/SOURCE.cu` on the device of its first tensor.

    Tensors are contiguous and go as addresses, numbers as int64 or float; the stream comes last.

    Raises:
        CudaError: the launch failed.
        BuildError: the compiler is missing or refused the source.
    """
    first = next(argument for argument in arguments if isinstance(argument, Tensor))
    called = getattr(library(family, source, is_cuda=first.is_cuda), function)
    stream = torch.cuda.current_stream(first.device).cuda_stream if first.is_cuda else None
    converted = [_converted(x, first) for x in arguments]
    cuda.check(called(*converted, ctypes.c_void_p(stream)))


def library(family: str, source: str, *, is_cuda: bool) -> ctypes.CDLL:
    """The device's or the host's build of `kernels/FAMILY/csrc/SOURCE.cu`. See `run`."""
    return cuda.load(family, source, DEVICE_FLAGS) if is_cuda else _host_library(family, source)


def _converted(x: Argument, first: Tensor) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if x is None:
        return ctypes.c_void_p()
    if isinstance(x, Tensor):
        assert x.is_contiguous(), f"a tensor {tuple(x.shape)} is not contiguous"
        assert x.device == first.device, f"tensors on {first.device} and {x.device}"
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(x)


@functools.cache
def _host_library(family: str, name: str) -> ctypes.CDLL:
    source = _KERNELS / family / "csrc" / f"{name}.cu"
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise BuildError(f"{COMPILER} is not installed (Debian: apt-get install g++)")
    flags = (*_HOST_FLAGS, *(LEVELS["avx2"] if "avx2" in supported_levels() else ()))
    digest = hashlib.sha256("\0".join(flags).encode())
    for file in (source, *sorted(source.parent.glob("*.cuh")), HEADERS / "each.cuh"):
        digest.update(file.read_bytes())
    target = _KERNELS / "build" / f"{family}-{name}-host-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        compile_library(compiler, flags, source, target)
    return ctypes.CDLL(str(target))
