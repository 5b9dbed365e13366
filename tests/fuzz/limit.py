"""One input, within its time."""

import time

from tests.fuzz.targets import TARGETS

LIMIT_S = 1.0  # of one input, in CPU time: other processes have their share of the machine


def cpu_s(name: str, data: bytes) -> float:
    """What an input takes of this process."""
    began = time.process_time()
    TARGETS[name](data)
    return time.process_time() - began


def run(name: str, data: bytes) -> None:
    """Raises: AssertionError: it takes too long."""
    took_s = cpu_s(name, data)
    assert took_s < LIMIT_S, f"{took_s:.2f} s for {data.hex()}"
