"""The cycle collector of a service that runs for weeks and makes few cycles."""

import gc

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 50  # Python's 700, 10, 10 look at every request's state again


def settle() -> None:
    """Call it when the service is set up: what is there now stays, so that no later collection
    looks at it, and collections are rare; nearly everything goes by its reference count."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
