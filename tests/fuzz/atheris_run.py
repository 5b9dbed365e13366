"""One target under atheris: python -m tests.fuzz.atheris_run TARGET SLOW [options of libFuzzer]

Inputs that take longer than `limit.LIMIT_S` are left in the folder SLOW: what is instrumented is
several times slower, so whoever started this tries them again.
"""

import hashlib
import sys
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]: of the extra [fuzz]
import zmq


def main() -> None:
    """Import under instrumentation, then fuzz until libFuzzer ends the process."""
    name, slow = sys.argv.pop(1), Path(sys.argv.pop(1))
    with atheris.instrument_imports(include=["deepmesh", "services"]):
        from tests.fuzz.limit import LIMIT_S, cpu_s
        from tests.fuzz.services import logging_nothing

    def run(data: bytes) -> None:
        if cpu_s(name, data) > LIMIT_S:
            (slow / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)

    # On a busy machine closed sockets wait for the thread that frees them.
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 16_384)
    atheris.Setup(sys.argv, run)
    with logging_nothing():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
