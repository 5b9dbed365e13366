"""One target under atheris: python -m tests.fuzz.atheris_run TARGET [options of libFuzzer]"""

import sys

import atheris  # pyright: ignore[reportMissingImports]: of the extra [fuzz]


def main() -> None:
    """Import under instrumentation, then fuzz until libFuzzer ends the process."""
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["deepmesh", "services"]):
        from tests.fuzz.services import logging_nothing
        from tests.fuzz.targets import TARGETS
    atheris.Setup(sys.argv, TARGETS[name])
    with logging_nothing():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
