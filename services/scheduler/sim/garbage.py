"""No search for reference cycles while a world runs: it would take as long as the run."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_cycle_search() -> Generator[None]:
    """Most of what a run makes lives to its end, and is looked through again and again for cycles
    otherwise."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
