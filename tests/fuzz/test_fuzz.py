"""Every target: inputs of former finds, and structure-aware ones that Hypothesis makes up."""

import random
import resource
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import corpus
from tests.fuzz.limit import run
from tests.fuzz.services import logging_nothing
from tests.fuzz.source import Source
from tests.fuzz.targets import TARGETS
from tests.fuzz.trees import VALUES, damaged

BUDGET_S = 2.0  # of a target; the corpus comes first, and always whole
MEMORY_KB = 400 << 10  # that all inputs of a target may add to what the process has used


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    with logging_nothing():
        yield


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_nothing_escapes_hangs_or_grows(name: str) -> None:
    TARGETS[name](b"")  # imports, caches, seeds of its own
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in corpus.read(name):
        run(name, data)
    until = time.process_time() + BUDGET_S

    @settings(
        max_examples=300,
        derandomize=True,  # `make fuzz` looks for what is new
        phases=(Phase.generate,),  # shrinking takes minutes, and bytes say little
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(max_size=160))
    def explore(data: bytes) -> None:
        if time.process_time() < until:
            run(name, data)

    explore()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KB


def test_damage_is_done_to_copies() -> None:
    """What one input changes would be found changed by the next: no find could be repeated."""
    draw, before = random.Random(1), repr(VALUES)
    for _ in range(3000):
        damaged([True, b"x", [False, [b"y"]], {"a": True}], Source(draw.randbytes(24)))
    assert repr(VALUES) == before
