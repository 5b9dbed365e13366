"""A panic inside deepseek-recipe: Rust's word for a failed assertion, raised as a BaseException."""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Turn a panic into a RuntimeError: it fails the request that caused it, not the process.

    The library's objects belong to one request each, so no other is touched by what it left.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # pyo3 makes the class; nothing exports it
            raise RuntimeError(f"deepseek-recipe panicked: {error}") from error
        raise
