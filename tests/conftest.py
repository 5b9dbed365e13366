"""What all tests share: order over workers, tables at the end of a run, words where no GPU is."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

NO_GPU = "no CUDA device is here: a GPU of compute capability 9.0 (H100, H200) is needed"
# Files that take longest, to begin with: a worker that takes one last works alone at the end.
LONGEST = (
    "tests/sim/test_coverage.py",
    "tests/kernels/test_sanitizers.py",
    "tests/sim/test_large_groups.py",
    "tests/sim/test_speculation.py",
    "tests/e2e/test_kvstore_mesh.py",
    "tests/e2e/test_rank_kills.py",
    "tests/e2e/test_kill_each.py",
    "tests/e2e/test_expert_moves.py",
    "tests/e2e/test_handover.py",
    "tests/sim/test_handover.py",
    "tests/e2e/test_ranks.py",
    "tests/services/test_same_tokens.py",
    "tests/sim/test_world.py",
    "tests/kernels/test_rows_alone.py",
    "tests/services/test_executor_gpu.py",
)
ROOT = Path(__file__).parents[1]

if "CI" not in os.environ:  # with it, Hypothesis's own: the same examples each time
    settings.register_profile(
        "by hand", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("by hand")  # a busy machine is no bug


def _spread_over_gpus() -> None:
    """Workers of pytest-xdist begin to count GPUs at one of their own; each sees them all."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if worker.isdecimal() and count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        order = ((int(worker) + at) % count for at in range(count))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))


_spread_over_gpus()  # before anything asks CUDA what there is

Tables = dict[str, list[str]]  # lines by title
CLOSING = pytest.StashKey[Tables]()


@pytest.hookimpl(tryfirst=True)  # before pytest takes the folder for `tmp_path`
def pytest_configure(config: pytest.Config) -> None:
    config.stash[CLOSING] = {}
    if hasattr(config, "workerinput"):  # sockets lie below it: 107 bytes at most for their paths
        config.option.basetemp = config.option.basetemp.replace("popen-gw", "")


@pytest.fixture(scope="session")
def closing_tables(pytestconfig: pytest.Config) -> Tables:
    """Lines put here under a title are printed at the end of the run, also when all is well."""
    return pytestconfig.stash[CLOSING]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands its tables to the process that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["closing_tables"] = session.config.stash[CLOSING]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Of pytest-xdist, in the process that prints."""
    tables: Tables = getattr(node, "workeroutput", {}).get("closing_tables", {})
    config: pytest.Config = getattr(node, "config")  # noqa: B009 (xdist brings no types)
    for title, lines in tables.items():
        config.stash[CLOSING].setdefault(title, []).extend(lines)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for title, lines in config.stash[CLOSING].items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)  # when those that are not asked for are gone: torch takes a second
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {ROOT / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
