"""CPU time of processes, from /proc/PID/stat."""

import os
from collections.abc import Mapping
from pathlib import Path

TICKS_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all threads; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_S


class CpuMeter:
    """CPU seconds by name since it was made."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """`pids`: the processes to watch, by name."""
        self._pids = dict(pids)
        self._before = self._look()

    def take(self) -> dict[str, float]:
        """Since it was made."""
        return {name: now - self._before[name] for name, now in self._look().items()}

    def _look(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._pids.items()}
