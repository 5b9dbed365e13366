"""Memory of a service that runs for weeks: few cycles to collect, one arena for malloc."""

import contextlib
import ctypes
import gc

_M_ARENA_MAX = -8  # of malloc.h
_YOUNG, _MIDDLE, _OLD = 20_000, 20, 50  # Python's 700, 10, 10 look at every request's state again


def settle() -> None:
    """Call it when the service is set up: what is there now stays, so that no later collection
    looks at it, and collections are rare; nearly everything goes by its reference count."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def share_arena() -> None:
    """Call it before any thread is there: all of them have one arena of malloc's (of glibc).

    Else each gets its own, which keeps the most that its thread has ever had at once: what a step
    frees is of no use to a transfer, and the sum of all peaks looks like a leak for hours.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
