"""The core's time: the wall clock's as it was at the start, whatever is done to that clock since.

Deadlines, hangs and pauses are differences of the core's time. Whoever sets the wall clock must not
end requests by it, so the core never sees that; what it reports is told in the new time.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from .core.events import HandedOver, RequestEnded, StepEnded

STEP_NS = 1_000_000_000  # less is the two clocks' reading one after the other
# Of these reports, what is the core's time; `begin_ns` and `end_ns` of a step are an executor's.
TIMES = {
    StepEnded: ("planned_ns", "applied_ns", "ready_ns"),
    RequestEnded: ("received_ns", "admitted_ns", "first_token_ns", "ended_ns"),
    HandedOver: ("asked_ns", "offered_ns", "ended_ns"),
}
_Report = TypeVar("_Report", StepEnded, RequestEnded, HandedOver)


class SteadyClock:
    """Nanoseconds of the wall clock, without its steps."""

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall_ns, self._monotonic_ns = wall_ns, monotonic_ns
        self._began_ns = wall_ns() - monotonic_ns()

    def now_ns(self) -> int:
        """The core's time."""
        return self._monotonic_ns() + self._began_ns

    def stepped_ns(self) -> int:
        """How far the wall clock has been set ahead of the core's time since the start."""
        ahead_ns = self._wall_ns() - self.now_ns()
        return ahead_ns if abs(ahead_ns) >= STEP_NS else 0

    def on_wall(self, report: _Report) -> _Report:
        """A report of the core, in the wall clock's time of now."""
        stepped_ns = self.stepped_ns()
        if not stepped_ns:
            return report
        times = {name: at for name in TIMES[type(report)] if (at := getattr(report, name))}
        return replace(report, **{name: at + stepped_ns for name, at in times.items()})
