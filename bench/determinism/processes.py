"""Groups of the check that are real processes, and how long each took."""

import time
from collections.abc import Callable, Iterator

from bench.determinism.caches import cache_groups
from bench.determinism.groups import Outputs, Setting
from bench.determinism.mesh import killed_executor
from bench.determinism.rank_processes import rank_groups
from bench.determinism.split import GROUP, split_group

Ran = tuple[str, Outputs, float]  # name, what came of each request, seconds
Run = Callable[[Setting], Iterator[tuple[str, Outputs]]]


def _killed(setting: Setting) -> Iterator[tuple[str, Outputs]]:
    yield "killed_executor_process", killed_executor(setting)


def _split(setting: Setting) -> Iterator[tuple[str, Outputs]]:
    yield GROUP, split_group(setting)


# None uses what another one does: they may run at the same time.
PROCESSES: dict[str, Run] = {
    "killed": _killed,
    "split": _split,
    "caches": cache_groups,
    "ranks": rank_groups,
}


def ran(run: Run, setting: Setting) -> list[Ran]:
    """Run it to its end."""
    found: list[Ran] = []
    began = time.monotonic()
    for name, outputs in run(setting):
        now = time.monotonic()
        found.append((name, outputs, now - began))
        began = now
    return found
