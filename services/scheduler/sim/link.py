"""A link of the simulation: FIFO with jitter, numbered messages, and what may happen to them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .clock import MS, SECOND, Clock, Times

MAX_HELD = 16  # messages that wait for one that is late; more mean that it is lost
HEARTBEAT_NS = SECOND  # carries the number of the last message, so a lost one shows
LATE_NS = 3 * MS
Way = str  # "there" (from the scheduler) or "back"
WAYS: tuple[Way, Way] = ("there", "back")
MISHAPS = ("lose", "repeat", "overtake", "delay")


@dataclass(slots=True)
class _Lane:
    """One direction of one session."""

    next_out: int = 0
    next_in: int = 0
    free_ns: int = 0
    held: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])


class Link:
    """Between the scheduler and one peer. A cut loses what is on its way.

    Each message has a number: a repeated one is dropped, one that comes too early is held back,
    and a gap that does not close breaks the link (`on_broken`).
    """

    def __init__(self, clock: Clock, times: Times) -> None:
        self.is_up = False
        self.duplicates = 0.0  # share of messages to the scheduler that its peer says twice
        self.on_broken: Callable[[], None] = lambda: None
        self.num_repeated = self.num_broken = 0
        self._clock, self._times = clock, times
        self._session = 0
        self._lanes = {way: _Lane() for way in WAYS}
        self._mishaps: dict[Way, deque[str]] = {way: deque() for way in WAYS}

    def open(self) -> None:
        """A new session, numbered from 0 again."""
        self.is_up = True
        self._session += 1
        self._lanes = {way: _Lane() for way in WAYS}

    def cut(self) -> None:
        """Both sides lose the session and all that is on its way."""
        self.is_up = False
        self._session += 1

    def spoil(self, way: Way, mishap: str) -> None:
        """A fault: lose, repeat, delay the next message, or let those behind it overtake it."""
        assert mishap in MISHAPS
        self._mishaps[way].append(mishap)

    def send(self, way: Way, deliver: Callable[[], None], *, after_ns: int = 0) -> None:
        """Deliver in order after the delay, unless the session ends before.

        `after_ns` from now the sender lets go of it.
        """
        if not self.is_up:
            return
        clock, lane, number = self._clock, self._lanes[way], self._lanes[way].next_out
        lane.next_out += 1
        delay = after_ns + self._times.link + clock.random.randrange(self._times.jitter + 1)
        arrival = max(lane.free_ns, clock.now + delay)
        mishap = self._mishaps[way].popleft() if self._mishaps[way] else ""
        if mishap == "delay":
            arrival += LATE_NS
        lane.free_ns = arrival
        if mishap == "overtake":
            arrival += LATE_NS
        arrive = partial(self._arrive, way, self._session, number, deliver)
        if mishap == "lose":
            gap = partial(self._look_for_gap, way, self._session, number)
            clock.at(HEARTBEAT_NS, gap)
            return
        clock.at(arrival - clock.now, arrive)
        if mishap == "repeat":
            clock.at(arrival - clock.now + self._times.link, arrive)
        if way == "back" and self.duplicates and clock.random.random() < self.duplicates:
            self.send(way, deliver)

    def _arrive(self, way: Way, session: int, number: int, deliver: Callable[[], None]) -> None:
        if session != self._session:
            return
        lane = self._lanes[way]
        if number < lane.next_in:
            self.num_repeated += 1
            return
        lane.held[number] = deliver
        while (ready := lane.held.pop(lane.next_in, None)) is not None:
            lane.next_in += 1
            ready()
            if session != self._session:
                return
        if len(lane.held) > MAX_HELD:
            self._break()

    def _look_for_gap(self, way: Way, session: int, number: int) -> None:
        if session == self._session and self._lanes[way].next_in <= number:
            self._break()

    def _break(self) -> None:
        self.num_broken += 1
        self.on_broken()
