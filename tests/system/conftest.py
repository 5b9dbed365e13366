"""Times that are worth a line, printed at the end."""

import pytest

TIMES = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIMES] = {}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Also when all is well."""
    for what, took in config.stash[TIMES].items():
        terminalreporter.write_line(f"{what:<32} {took}")
