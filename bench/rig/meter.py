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
    """Looks now, and again at `read`."""

    def __init__(self, **pids: int) -> None:
        """Without `pids` only the steal is known."""
        self._pids, self._steal = pids, Steal()
        self._before, self._machine = self._cpu_ms(), _machine_ms()

    def read(self, steps: int) -> Load:
        """What happened since; per step where it says so."""
        steal, now, machine = self._steal.take(), self._cpu_ms(), _machine_ms()
        used = {name: now[name] - self._before[name] for name in now}
        others = None
        if used and machine[1] > self._machine[1]:
            busy, whole = (b - a for a, b in zip(self._machine, machine, strict=True))
            others = max(0.0, busy - sum(used.values())) / whole
        return Load(steal, {name: ms / steps for name, ms in used.items()}, others)

    def _cpu_ms(self) -> dict[str, float]:
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
