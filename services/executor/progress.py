"""Shows how far loading is: a bar on a terminal, a log line per tenth of a stage elsewhere."""

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
        self._tenth = 0  # of the stage, logged last

    def update(self, stage: str, done: int, total: int) -> None:
        """One more bit is there."""
        if not sys.stderr.isatty():
            tenth = 10 * done // max(total, 1)
            if stage != self._stage or tenth > self._tenth:
                _log.info("loading: %s %d of %d", stage, done, total)  # `deepmesh up` draws it
                self._stage, self._tenth = stage, tenth
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
