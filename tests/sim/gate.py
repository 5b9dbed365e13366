"""Many small cases and long runs of the scheduler, in processes, and what they have reached."""

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from services.scheduler.sim.hunts import draw_crowd, draw_hunt
from services.scheduler.sim.soak import RANKS, draw_world
from tests.property.test_scheduler import SchedulerMachine

Reached = Counter[tuple[int, int, str]]  # by depth, ranks and name
WORKERS = 2
SMALL_CASES = 10_000
EXAMPLES = 8_800  # Hypothesis begins some of them more than once
FAULTS = 3
FIRST_SEED = 50_000
CELLS = [(depth, ranks) for ranks in RANKS for depth in (1, 2, 3)]
SOAKS, CROWDS = 2 * len(CELLS), 102
NAMES = {
    "preemptions": 5_000,
    "external writes behind a fence": 2_000,
    "rejected drafts": 1_000,
    "attaches": 300,
}
LEAST_ABORTS = 500  # in each state
HUNTS = {  # worlds that lead their requests into a state to be aborted in it
    "waiting": 24,
    "waiting for a prefix": 102,
    "waiting for a kvstore": 30,
    "loading": 57,
    "prefill": 75,
    "prefill in flight": 36,
    "decode": 48,
    "decode in flight": 21,
    "preempt pending": 63,
    "preempted": 63,
    "without an engine": 24,
    "parked": 36,
    "orphaned": 24,
    "ended": 18,
}


def small_cases(seed: int, count: int) -> Reached:
    """Cases of the state machine; the same ones for the same seed.

    Raises:
        AssertionError: whatever is wrong, with the shortest case that shows it.
    """
    SchedulerMachine.reached.clear()
    run_state_machine_as_test(
        hypothesis.seed(seed)(SchedulerMachine),
        settings=settings(
            max_examples=count,
            stateful_step_count=9,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    counts = SchedulerMachine.reached.items()
    return Counter({(depth, 1, name): count for (depth, name), count in counts})


@dataclass(frozen=True, slots=True)
class LongRun:
    """One world, by its kind (a state to abort in, "crowd" or "soak") and number."""

    kind: str
    number: int

    def run(self) -> Reached:
        """Draw, run and verify it.

        Raises:
            AssertionError: says how to run it again.
        """
        seed, depth, ranks = FIRST_SEED + self.number, 1 + self.number % 3, 1
        if self.kind == "preempt pending":  # with one step in flight nothing is left to wait for
            depth = 2 + self.number % 2
        try:
            if self.kind == "soak":
                depth, ranks = CELLS[self.number % len(CELLS)]
                world = draw_world(seed, faults=FAULTS, ranks=ranks, depth=depth)
            elif self.kind == "crowd":
                world = draw_crowd(seed, depth=depth)
            else:
                world = draw_hunt(seed, self.kind, depth=depth)
            world.run()
            world.verify()
        except AssertionError as error:
            raise AssertionError(f"{error}; again: {self!r}.run() of tests.sim.gate") from error
        counts = world.covered().counts.items()
        return Counter({(depth, ranks, name): count for name, count in counts})


def all_long_runs() -> list[LongRun]:
    """In the order in which they run."""
    hunts = [LongRun(state, at) for state, count in HUNTS.items() for at in range(count)]
    crowds = [LongRun("crowd", at) for at in range(CROWDS)]
    return [*hunts, *crowds, *(LongRun("soak", at) for at in range(SOAKS))]


def work(worker: int) -> Reached:
    """One worker's part."""
    reached = small_cases(worker, EXAMPLES // WORKERS)
    for run in all_long_runs()[worker::WORKERS]:
        reached.update(run.run())
    return reached


def run_all() -> Reached:
    """All of it, on as many cores as there are workers."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        return sum(pool.map(work, range(WORKERS)), start=Counter())


def minima() -> dict[str, int]:
    """What must have been reached, over all depths and ranks."""
    aborts = {f"abort: {state}": LEAST_ABORTS for state in HUNTS}
    return {"cases": SMALL_CASES, "runs": 200, **NAMES, **aborts}


def table(reached: Reached) -> list[str]:
    """Lines for people: totals, and how they split over depths and ranks."""
    head = [
        "",
        "total",
        "least",
        *(f"depth {d}" for d in (1, 2, 3)),
        *(f"{r} ranks" for r in RANKS),
    ]
    lines = ["".join(f"{text:>12}" if at else f"{text:<34}" for at, text in enumerate(head))]
    for name, least in minima().items():
        by_depth = [_sum(reached, name, depth=depth) for depth in (1, 2, 3)]
        by_ranks = [_sum(reached, name, ranks=ranks) for ranks in RANKS]
        numbers = [_sum(reached, name), least, *by_depth, *by_ranks]
        lines.append(f"{name:<34}" + "".join(f"{number:>12,}" for number in numbers))
    return lines


def shortfalls(reached: Reached) -> list[str]:
    """Minima that were missed, and depths or ranks on which something never happened."""
    missed: list[str] = []
    for name, least in minima().items():
        if (total := _sum(reached, name)) < least:
            missed.append(f"{name}: {total} of {least}")
        if name in NAMES:
            cells = {f"depth {d}": _sum(reached, name, depth=d) for d in (1, 2, 3)}
            cells |= {f"{r} ranks": _sum(reached, name, ranks=r) for r in RANKS}
            missed += [f"{name}: never at {cell}" for cell, count in cells.items() if not count]
    return missed


def _sum(reached: Reached, name: str, *, depth: int = 0, ranks: int = 0) -> int:
    return sum(
        count
        for (at_depth, at_ranks, key), count in reached.items()
        if key == name and depth in (0, at_depth) and ranks in (0, at_ranks)
    )
