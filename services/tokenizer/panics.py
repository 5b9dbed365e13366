"""A panic inside deepseek-recipe: Rust's word for a failed assertion, raised as a BaseException."""

from types import TracebackType


class PanicsAsErrors:
    """Turns a panic into a RuntimeError: it fails the request that caused it, not the process.

    The library's objects belong to one request each, so no other is touched by what it left. A
    class, since entering a generator costs as much as a token's text.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Any other exception passes."""
        # pyo3 makes the class of it; nothing exports it
        if error is not None and type(error).__name__ == "PanicException":
            raise RuntimeError(f"deepseek-recipe panicked: {error}") from error


_GUARD = PanicsAsErrors()


def panics_as_errors() -> PanicsAsErrors:
    """The guard, for a `with` statement."""
    return _GUARD
