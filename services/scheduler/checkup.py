"""The invariants of the core, looked at in production, too: at idle and now and then under load."""

import logging
import time
from collections.abc import Callable

from .core.audit import AuditError, audit
from .core.scheduler import Scheduler

_log = logging.getLogger(__name__)
EVERY_STEPS = 256
MAX_RESIDENTS = 64  # under load: beyond them it would take longer than a step
SHARE = 0.01  # of the time, at most
# what a look at a broken state may raise beside the audit's own word
_BROKEN = (AuditError, LookupError, ValueError)


class Checkup:
    """Looks, says and counts; repairs nothing, because nobody knows what else is wrong."""

    def __init__(self, core: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failed = 0
        self._core = core
        self._clock = clock
        self._seen = self._course()
        self._not_before = 0.0

    def look(self) -> None:
        """Call it after every event; most calls cost nothing."""
        if not self._is_due():
            return
        began = self._clock()
        self._seen = self._course()
        try:
            audit(self._core)
        except _BROKEN as error:
            self.num_failed += 1
            _log.error(
                "audit failed at group step %d (failure %d): %s: %s",
                self._core.group.group_step,
                self.num_failed,
                type(error).__name__,
                error,
            )
        ended = self._clock()
        self._not_before = ended + (ended - began) / SHARE

    def _is_due(self) -> bool:
        core = self._core
        if core.config.audit or self._seen == (course := self._course()):
            return False  # the core does it after every event; or nothing has happened
        residents = len(core.registry.live) - len(core.waiting)
        if core.registry.live or core.group.unresolved:
            is_long_ago = course[0] - self._seen[0] >= EVERY_STEPS
            if not is_long_ago or residents > MAX_RESIDENTS:
                return False
        return self._clock() >= self._not_before

    def _course(self) -> tuple[int, int]:
        registry = self._core.registry
        return self._core.group.group_step, registry.num_finished + registry.num_failed
