"""Virtual time: one heap, one seeded generator, one event log."""

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Times:
    """The time model, in ns."""

    link: int = 100 * US
    jitter: int = 80 * US
    step: int = 1 * MS  # a step of any kind, and for each ...
    token: int = 5 * US  # ... prefill token of a rank
    row: int = 5 * US  # ... position that a decode row computes
    context: int = 0  # ... 1,000 positions that decode rows attend to
    straggle: float = 0.25  # most that one rank needs longer than another for the same
    tail: int = 300 * US
    load: int = 5 * MS
    compile: int = 0  # of a grammar that is new to an executor
    cpu: int = 0  # of the scheduler, each time that it looks at its mail, and for each ...
    cpu_rank: int = 0  # ... result of a rank


class Clock:
    """Events in order of (time, sequence); equal seeds give equal logs."""

    def __init__(self, seed: int) -> None:
        self.now = 0
        self.random = random.Random(seed)
        self.num_events = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._log = hashlib.sha256()

    def at(self, delay: int, action: Callable[[], None]) -> None:
        """Do something `delay` ns from now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + max(0, delay), self._sequence, action))

    def step(self) -> bool:
        """Run the next event; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.num_events += 1
        action()
        return True

    def trace(self, *words: object) -> None:
        """A line of the event log."""
        self._log.update(f"{self.now} {words}\n".encode())

    @property
    def digest(self) -> str:
        """Hash of the event log so far."""
        return self._log.hexdigest()
