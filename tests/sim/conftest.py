"""Prints what the scheduler's cases and runs have reached, also when all is well."""

import pytest

COVERAGE = pytest.StashKey[list[str]]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(COVERAGE, None)
    if lines:
        terminalreporter.section("scheduler: what its cases and runs have reached")
        for line in lines:
            terminalreporter.write_line(line)
