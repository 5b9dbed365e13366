"""Which processes of this machine hang: they no longer show that their loops turn."""

import os
from pathlib import Path

from deepmesh.health import ready_path

MAX_NAP_S = 1.0  # a watcher that was away for longer knows nothing of the others' time


class HangWatch:
    """Looks at the files that ready services keep touching (deepmesh.health).

    Only a change is looked for, by the watcher's own clock: wall clocks may be set. A process
    that is not ready yet, or not any more, is not judged: loading may take any time.
    """

    def __init__(self, run_dir: Path, hang_s: float) -> None:
        """`hang_s`: without a sign for so long is a hang; 0: nobody is judged."""
        self._run_dir, self._hang_s = run_dir, hang_s
        self._seen: dict[str, tuple[int, int, float]] = {}  # pid, time of the file, seen first
        self._paths: dict[str, str] = {}  # as text: a Path a look fills the table of its parts
        self._looked_at = 0.0

    def started(self, name: str) -> None:
        """A new process of that name: what the one before has left does not count."""
        ready_path(self._run_dir, name).unlink(missing_ok=True)
        self._seen.pop(name, None)

    def hung(self, pids: dict[str, int], now: float) -> list[str]:
        """Names of those that hang at `now` (monotonic, s); call it several times a second."""
        if now - self._looked_at > MAX_NAP_S:  # the machine slept, or we hung
            self._seen.clear()
        self._looked_at = now
        return [name for name, pid in pids.items() if pid and self._hangs(name, pid, now)]

    def _hangs(self, name: str, pid: int, now: float) -> bool:
        path = self._paths.get(name) or str(ready_path(self._run_dir, name))
        self._paths[name] = path
        try:
            touched = os.stat(path).st_mtime_ns
        except OSError:
            self._seen.pop(name, None)
            return False
        seen = self._seen.get(name)
        if seen is None or seen[:2] != (pid, touched):
            self._seen[name] = (pid, touched, now)
            return False
        return 0 < self._hang_s <= now - seen[2]
