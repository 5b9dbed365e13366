"""The suite reaches what it must reach: otherwise it proves nothing about it."""

import pytest

from tests.sim import gate
from tests.sim.conftest import COVERAGE


@pytest.mark.timeout(900)
def test_small_cases_and_long_runs_hold_and_reach_everything(
    request: pytest.FixtureRequest,
) -> None:
    reached = gate.run_all()
    request.config.stash[COVERAGE] = gate.table(reached)
    assert gate.shortfalls(reached) == []
