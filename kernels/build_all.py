"""Compiles the CUDA kernels ahead of their first use: `python -m kernels.build_all`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from kernels import cuda, portable
from kernels.native import BuildError

EXACT_FAMILIES = ("sampling",)  # all of which have the CPU's bits
BOTH = (("comm", "exchange"),)  # loaded with and without these flags


def sources() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(family, name, flags) of every library that some function loads."""
    for path in sorted(Path(__file__).parent.glob("*/csrc/*.cu")):
        family, name = path.parents[1].name, path.stem
        is_exact = family in EXACT_FAMILIES or name.endswith("_portable")
        if is_exact or (family, name) in BOTH:
            yield family, name, portable.DEVICE_FLAGS
        if not is_exact:
            yield family, name, ()


def main() -> int:
    """1 if the compiler is missing or refuses a source."""
    try:
        for family, name, flags in sources():
            print(cuda.build(family, name, flags).name, flush=True)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
