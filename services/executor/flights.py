"""Steps that were launched and not settled yet, and the thread that waits for them."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from services.executor.interface import LiveRows, Sampled
from services.executor.slots import SlotTable
from services.executor.turn import Turn


class Settling:
    """A turn at the table of settled steps, taken by whoever needs its rows first: the thread that
    settles, or the one that launches while it waits for all steps before."""

    def __init__(self, turn: Turn, slots: SlotTable) -> None:
        self.turn, self.slots = turn, slots
        self._live: LiveRows | None = None
        self._error: Exception | None = None

    def live(self) -> LiveRows:
        """The rows that compute something, exactly. All steps before are settled.

        Raises:
            Exception: the step is wrong; the same one each time.
        """
        if self._live is None and self._error is None:
            try:
                self.turn.enter(self.slots)
                self._live = self.slots.resolve(self.turn.rows)
            except Exception as error:  # kept for the thread that reports the step
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._live is not None
        return self._live


class Flight(Protocol):
    """A step on the device."""

    tail_status: int  # of operations behind its rows: 0, or 1 if they failed

    def wait(self) -> tuple[int, int]:
        """Until its tokens are there (TOKENS_READY): when it began and ended (wall clock, ns).

        Raises:
            Exception: the device failed.
        """
        ...

    def sampled(self, live: LiveRows) -> Sampled:
        """What the rows sampled.

        Raises:
            RuntimeError: the device did not compute one of them.
        """
        ...

    def settled(self, live: LiveRows, result: NDArray[np.void]) -> None:
        """What the host made of it (packed.RESULT of all rows), for rows that are launched next."""
        ...

    def failed(self) -> None:
        """The host gave it up: nothing can be built on its rows."""
        ...

    def wait_tail(self) -> None:
        """Until the end of its tail (GPU_DONE)."""
        ...

    def land(self) -> None:
        """It is settled, or given up: its memory may serve another one."""
        ...


@runtime_checkable
class LaunchEngine(Protocol):
    """An engine whose steps begin before those before them are known to have ended."""

    def launch(self, settling: Settling, behind: Callable[[], None]) -> Flight:
        """Put a step on the device, with its operations before and behind, and return.

        Args:
            settling: the step; slots of another table begin another engine epoch.
            behind: waits until all steps before are settled.
        Raises:
            Exception: the step is wrong, or the device failed; nothing of its rows is computed.
        """
        ...

    def is_lost(self) -> bool:
        """Whether the device does not work any more; asked when a step failed."""
        ...


class Flights:
    """Settles steps in the order in which they were launched, on a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="device-settle", daemon=True)
        self._thread.start()

    def add(self, settle: Callable[[], None]) -> None:
        """One more step was launched: `settle` waits for it."""
        with self._changed:
            self._waiting.append(settle)
            self._changed.notify_all()

    def wait_settled(self) -> None:
        """Until all that were added are settled."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or not (self._waiting or self._is_busy))

    def close(self, timeout_s: float) -> bool:
        """End the thread behind the step that it waits for; False if that does not end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    return
                settle = self._waiting.popleft()
                self._is_busy = True
            settle()
