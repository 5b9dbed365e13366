"""The scheduler process of the simulation: its inbox, the real core, and what watches the core."""

from collections.abc import Callable, Sequence

from deepmesh.wire.messages import Abort, StepResult

from ..core.audit import audit
from ..core.events import Event, Mail, RequestEnded, Send, StepEnded, StepResults, Tick
from ..core.scheduler import Scheduler
from .clock import Clock, Times
from .coverage import Coverage, state_of
from .device import Device
from .writer import ExternalWriter

Report = RequestEnded | StepEnded


class SchedulerProcess:
    """Takes all mail that is there, then plans; while it computes, mail gathers."""

    def __init__(
        self,
        clock: Clock,
        times: Times,
        *,
        coverage: Coverage,
        audit_every: int,
        post: Callable[[Send, int], None],
        devices: Callable[[], Sequence[Device]],
    ) -> None:
        self.core: Scheduler | None = None  # none while it is down
        self.writer = ExternalWriter()
        self.skew_ns = 0  # of its wall clock
        self.num_wakes = 0
        self.on_report: Callable[[Report], None] = lambda _: None
        self.behind: Callable[[], None] = lambda: None  # called after each look at the mail
        self._clock, self._times = clock, times
        self._coverage = coverage
        self._audit_every = audit_every
        self._post, self._devices = post, devices
        self._inbox: list[Event] = []
        self._life = 0
        self._busy_until = 0
        self._is_due = False

    def start(self, core: Scheduler) -> None:
        """A new process."""
        self.core = core
        self._life += 1
        self._is_due, self._busy_until = False, self._clock.now

    def kill(self) -> None:
        """It dies with its mail."""
        self.core = None
        self._life += 1
        self._inbox.clear()

    def feed(self, event: Event) -> None:
        """Something arrives; it is seen when the process is free."""
        if self.core is None:
            return
        self._inbox.append(event)
        if not self._is_due:
            self._is_due = True
            life = self._life
            self._clock.at(self._busy_until - self._clock.now, lambda: self._wake(life))

    def _wake(self, life: int) -> None:
        if life != self._life or self.core is None:
            return
        core, self._is_due = self.core, False
        events, self._inbox = _gathered(self._inbox), []
        self.num_wakes += 1
        for event in events:
            if isinstance(event, StepResults):
                self._compute(self._times.cpu_rank * len(event.results))
            self._handle(core, event)
        self.writer.observe(core, self._devices())  # blocks are taken by the Tick only
        self._compute(self._times.cpu)
        self._handle(core, Tick())
        if self._audit_every and self.num_wakes % self._audit_every == 0:
            audit(core)
        self.behind()

    def _compute(self, cpu_ns: int) -> None:
        """What leaves from here on leaves so much later."""
        self._busy_until = max(self._busy_until, self._clock.now) + cpu_ns

    def _handle(self, core: Scheduler, event: Event) -> None:
        if isinstance(event, Mail) and isinstance(event.message, Abort):
            self._coverage.add(f"abort: {state_of(core, event.message.rid)}")
        for action in core.handle(event, self._clock.now + self.skew_ns):
            if isinstance(action, Send):
                self._clock.trace("send", action.peer, type(action.message).__name__)
                self._post(action, max(0, self._busy_until - self._clock.now))
            elif isinstance(action, RequestEnded | StepEnded):
                self.on_report(action)


def _gathered(events: list[Event]) -> list[Event]:
    """All results of steps in one event, where the first of them was."""
    results: list[tuple[str, StepResult]] = []
    gathered: list[Event] = []
    for event in events:
        if isinstance(event, Mail) and isinstance(event.message, StepResult):
            if not results:
                gathered.append(StepResults(results))
            results.append((event.peer, event.message))
        else:
            gathered.append(event)
    return gathered
