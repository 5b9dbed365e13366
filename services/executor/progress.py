"""Shows how far loading is: a bar on a terminal, a log line per stage elsewhere."""

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_log = logging.getLogger(__name__)


class LoadDisplay:
    """Call `update` from the service's thread; `close` leaves the terminal as it was."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def update(self, stage: str, done: int, total: int) -> None:
        """One more bit is there."""
        if not sys.stderr.isatty():
            if stage != self._stage:
                _log.info("loading: %s (%d)", stage, total)
                self._stage = stage
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        if stage != self._stage or self._task is None:
            self._task, self._stage = self._bar.add_task(stage, total=total), stage
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Loading is over, one way or the other."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._task, self._stage = None, None, ""
