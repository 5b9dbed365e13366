"""Builds and loads the native CPU kernels: one C++ file per family, compiled at first use.

The library's name holds a hash of sources, flags and compiler, so that a change of any of them
builds anew and parallel processes share one file. Without a compiler, or on one that fails, the
caller falls back to the torch reference; the log says so once.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

ADDRESS, COUNT, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float  # argument types
Native = Callable[..., None]

_log = logging.getLogger(__name__)
_KERNELS = Path(__file__).parent
HEADERS = _KERNELS / "csrc"
COMPILER = "g++"
BUILDERS = 2  # compilers at once
# No contraction: a fused multiply-add is where the source says so, so that all levels and
# compilers round alike.
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"),
)
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_NEEDS: dict[str, tuple[str, ...]] = {  # as /proc/cpuinfo calls them; best first
    "amx": (*_AVX512, "amx_tile", "amx_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "scalar": (),
}
LEVELS: dict[str, tuple[str, ...]] = {
    level: tuple(f"-m{need.replace('_', '-')}" for need in needs)
    + (("-mprefer-vector-width=512",) if "avx512f" in needs else ())
    for level, needs in _NEEDS.items()
}


REFERENCE = "reference"  # for `use`: no native kernels
_choice: tuple[str, tuple[str, ...]] = ("", ())  # level (empty: the best), further flags
_bound: list[list[Native]] = []  # what `lazy` has looked up


class BuildError(RuntimeError):
    """The compiler is missing or refused the source; the text says which and why."""


@functools.cache
def supported_levels() -> tuple[str, ...]:
    """Instruction levels that this CPU runs, best first."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":")[1].split())
                break
    except OSError:
        pass
    return tuple(level for level, needs in _NEEDS.items() if flags.issuperset(needs))


FAMILIES = tuple(sorted(source.stem for source in _KERNELS.glob("*/csrc/*.cpp")))


def build_levels(levels: Iterable[str], extra_flags: tuple[str, ...] = ()) -> None:
    """Build all families for these levels, which need not be this CPU's.

    Raises:
        BuildError: as of `load`.
    """
    with ThreadPoolExecutor(BUILDERS) as builders:
        every = [(*each, extra_flags) for each in product(FAMILIES, levels)]
        for _ in builders.map(build, *zip(*every, strict=True)):
            pass


def prepare(on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Build what is not there yet: a minute's work of the first start, not of the first step."""
    on_progress(0, len(FAMILIES))
    with ThreadPoolExecutor(BUILDERS) as builders:
        for done, _ in enumerate(builders.map(library, FAMILIES), start=1):
            on_progress(done, len(FAMILIES))


@functools.cache
def library(family: str) -> ctypes.CDLL | None:
    """The native kernels of a family, or None: use the reference."""
    level, extra_flags = _choice
    if level == REFERENCE:
        return None
    problem = ""
    for option in (level,) if level else supported_levels():
        try:
            return load(family, option, extra_flags)
        except BuildError as error:  # an older compiler may not know the newest instructions
            problem = problem or str(error)
    _say_once(problem)
    return None


def use(level: str = "", extra_flags: tuple[str, ...] = ()) -> None:
    """From now on run kernels of this level, or REFERENCE: for tests and benchmarks.

    Weights packed before do not fit if one of the two is REFERENCE.
    """
    global _choice
    _choice = (level, extra_flags)
    library.cache_clear()
    load.cache_clear()
    for ready in _bound:
        ready.clear()


@functools.cache
def _say_once(problem: str) -> None:
    _log.warning("no native CPU kernels, the much slower torch references run instead: %s", problem)


@functools.cache
def load(family: str, level: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Build `kernels/FAMILY/csrc/FAMILY.cpp` for a level unless it is there, and load it.

    Raises:
        BuildError: no compiler, or it refused the source.
    """
    return ctypes.CDLL(str(build(family, level, extra_flags)))


def function(lib: ctypes.CDLL, name: str, argument_types: Sequence[type]) -> Native:
    """A function of a library, which returns nothing."""
    found = getattr(lib, name)
    found.argtypes, found.restype = list(argument_types), None
    return found


def lazy(family: str, name: str, argument_types: Sequence[type]) -> Native:
    """Like `function`, but the library is loaded by the first call."""
    ready: list[Native] = []
    _bound.append(ready)

    def call(*arguments: object) -> None:
        if not ready:
            lib = library(family)
            assert lib is not None, f"no native kernels of {family}: the caller must not get here"
            ready.append(function(lib, name, argument_types))
        ready[0](*arguments)

    return call


def entry(family: str, name: str) -> tuple[int, int]:
    """Address of a CALLABLE operation (csrc/program.h), and how many arguments it takes."""
    lib = library(family)
    assert lib is not None, f"no native kernels of {family}: the caller must not get here"
    arity = getattr(lib, f"{name}_arity")
    arity.restype = COUNT
    address = ctypes.cast(getattr(lib, f"{name}_call"), ctypes.c_void_p).value
    assert address is not None
    return address, int(arity())


def build(family: str, level: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """Path of the built library. See `load`."""
    source = _KERNELS / family / "csrc" / f"{family}.cpp"
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise BuildError(f"{COMPILER} is not installed (Debian: apt-get install g++)")
    flags = (*FLAGS, *LEVELS[level], *extra_flags)
    name = f"{family}-{level}-{_digest(source, compiler, flags)}.so"
    shipped = _KERNELS / "build" / name  # of an image, which nobody can write to
    target = shipped if shipped.exists() else _cache_folder() / name
    if not target.exists():
        compile_library(compiler, flags, source, target)
    return target


def _digest(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(_version(compiler).encode())
    digest.update("\0".join(flags).encode())
    for file in (source, *sorted(source.parent.glob("*.h")), *sorted(HEADERS.glob("*.h"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


@contextmanager
def _alone(target: Path) -> Generator[None]:
    """Processes that start together wait for one compiler instead of running one each."""
    path = target.with_suffix(".lock")
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:  # who waits for the removed file finds the library when it is its turn
            path.unlink(missing_ok=True)


def compile_library(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    """Into a file of our own, then renamed: another process never sees half a library.

    Raises:
        BuildError: the compiler refused the source.
    """
    with _alone(target):
        if target.exists():  # another process made it meanwhile
            return
        handle, partial = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        try:
            command = [compiler, *flags, f"-I{HEADERS}", str(source), "-o", partial]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
            os.chmod(partial, 0o755)
            os.replace(partial, target)
        finally:
            Path(partial).unlink(missing_ok=True)


@functools.cache
def _cache_folder() -> Path:
    """`kernels/build`, or a folder of this user below the temporary one if that is read-only."""
    beside = _KERNELS / "build"
    try:
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:
        pass
    own = Path(tempfile.gettempdir()) / f"deepmesh-kernels-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    state = own.lstat()
    if not own.is_dir() or own.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise BuildError(f"{own}: is not a folder of this user alone; remove it")
    return own


if __name__ == "__main__":  # before tests, which run at all levels of this CPU
    build_levels(supported_levels())
