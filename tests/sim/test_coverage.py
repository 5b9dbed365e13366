"""The suite reaches what it must reach: otherwise it proves nothing about it."""

import pytest

from tests.sim import gate

TITLE = "scheduler: what its cases and runs have reached"


@pytest.mark.timeout(1800)
def test_small_cases_and_long_runs_hold_and_reach_everything(
    closing_tables: dict[str, list[str]],
) -> None:
    reached = gate.run_all()
    closing_tables[TITLE] = gate.table(reached)
    assert gate.shortfalls(reached) == []
