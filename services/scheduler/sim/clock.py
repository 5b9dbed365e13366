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
    step: int = 1 * MS
    token: int = 5 * US
    tail: int = 300 * US
    load: int = 5 * MS


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


class Link:
    """A FIFO link with jitter between the scheduler and one peer; a cut loses what is on it."""

    def __init__(self, clock: Clock, times: Times) -> None:
        self.is_up = False
        self.duplicates = 0.0  # share of messages to the scheduler that arrive twice
        self._clock, self._times = clock, times
        self._session = 0
        self._free = {"there": 0, "back": 0}

    def open(self) -> None:
        """A new session."""
        self.is_up = True
        self._session += 1

    def cut(self) -> None:
        """Both sides lose the session and all that is on its way."""
        self.is_up = False
        self._session += 1

    def send(self, way: str, deliver: Callable[[], None]) -> None:
        """Deliver after the delay, in order, unless the session ends before."""
        if not self.is_up:
            return
        clock, session = self._clock, self._session
        delay = self._times.link + clock.random.randrange(self._times.jitter + 1)
        arrival = max(self._free[way], clock.now + delay)
        self._free[way] = arrival

        def arrive() -> None:
            if self._session == session:
                deliver()

        clock.at(arrival - clock.now, arrive)
        if way == "back" and clock.random.random() < self.duplicates:
            clock.at(arrival - clock.now, arrive)
