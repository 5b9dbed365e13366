"""Who used the CPU while something was measured."""

import os
from dataclasses import dataclass
from pathlib import Path

from deepmesh.report import Steal


@dataclass(frozen=True)
class Load:
    """Between two looks."""

    steal: float  # share of the machine's CPU time that its hypervisor took away
    cpu_ms: dict[str, float]  # of each watched process, per step
    others: float | None  # share that processes took which nobody watched; None: not known


class Meter:
    """Looks when it is made, and again at `stop`."""

    def __init__(self, pids: dict[str, int]) -> None:
        """`pids`: the processes to watch, by name."""
        self._pids, self._steal = pids, Steal()
        self._cpu_ms, self._machine_ms = self._watched_ms(), _machine_ms()
        self._stolen, self._others = 0.0, None

    def stop(self, **ended_ms: float) -> None:
        """Look again; `ended_ms`: CPU time of processes that began and ended meanwhile."""
        self._stolen, now, machine = self._steal.take(), self._watched_ms(), _machine_ms()
        self._cpu_ms = {name: now[name] - self._cpu_ms[name] for name in now} | ended_ms
        busy, whole = (b - a for a, b in zip(self._machine_ms, machine, strict=True))
        if whole > 0:
            self._others = max(0.0, busy - sum(self._cpu_ms.values())) / whole

    def load(self, steps: int) -> Load:
        """What happened between the two looks, during which so many steps ran."""
        per_step = {name: ms / steps for name, ms in self._cpu_ms.items()}
        return Load(self._stolen, per_step, self._others)

    def _watched_ms(self) -> dict[str, float]:
        return {name: _process_ms(pid) for name, pid in self._pids.items()}


def _process_ms(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e6


def _machine_ms() -> tuple[float, float]:
    """CPU time of all processes so far, and all there was."""
    tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, wait, irq, soft, *_ = (int(n) * tick_ms for n in line.split()[1:])
    busy = user + nice + system + irq + soft
    return busy, busy + idle + wait
