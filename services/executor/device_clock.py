"""When a step begins and ends on the device, and how its stream learns of it."""

import threading
import time
from typing import Protocol


class DeviceClock(Protocol):
    """One device's time: asked by the stream's thread for one step after another."""

    @property
    def is_host(self) -> bool:
        """Whether steps are computed by the stream's thread itself."""
        ...

    @property
    def has_tail(self) -> bool:
        """Whether a step goes on behind its tokens."""
        ...

    def begin(self, enqueued_ns: int) -> int:
        """The next step, enqueued at that time, has begun; says when (wall clock, ns)."""
        ...

    def end(self) -> int:
        """Wait until the step's tokens are there (TOKENS_READY); says since when (ns)."""
        ...

    def finish(self) -> None:
        """Wait for the end of the step's tail (GPU_DONE)."""
        ...


class WorkerClock:
    """The stream's own thread is the device: a step runs while it is computed."""

    is_host = True
    has_tail = False

    def begin(self, enqueued_ns: int) -> int:
        """Now."""
        return time.time_ns()

    def end(self) -> int:
        """Now."""
        return time.time_ns()

    def finish(self) -> None:
        """Nothing runs behind the tokens."""


class TimedClock:
    """A device beside the host: steps take a set time, the host waits for them on a timer.

    A step begins at the end of the one before, or when it was enqueued if that was later: the
    host's own work delays nothing as long as it is done before the device is.
    """

    is_host = False

    def __init__(self, step_s: float, tail_s: float = 0.0, *, hang_step: int = 0) -> None:
        """
        Args:
            step_s: until the tokens are there.
            tail_s: from there to the end of the step.
            hang_step: the device never ends this step, counted from 1; 0: it never hangs.
        """
        self.has_tail = tail_s > 0
        self.begin_ns = self.ends_ns = 0  # of the step that runs, if the host keeps up
        self._step_ns, self._tail_ns = round(step_s * 1e9), round(tail_s * 1e9)
        self._hang_step, self._num_steps = hang_step, 0
        self._free_ns = 0
        self._closing = threading.Event()

    def begin(self, enqueued_ns: int) -> int:
        """See `DeviceClock`."""
        self._num_steps += 1
        # not in the future, which only a wall clock that was set back could say
        self.begin_ns = min(time.time_ns(), max(enqueued_ns, self._free_ns))
        self.ends_ns = self.begin_ns + self._step_ns
        return self.begin_ns

    def end(self) -> int:
        """See `DeviceClock`. A host that computed for longer than the step prolongs it."""
        if self._num_steps == self._hang_step:
            threading.Event().wait()
        self.ends_ns = max(self.ends_ns, time.time_ns())
        self._free_ns = self.ends_ns + self._tail_ns
        self._wait_until(self.ends_ns)
        return self.ends_ns

    def finish(self) -> None:
        """See `DeviceClock`."""
        self._wait_until(self._free_ns)

    def close(self) -> None:
        """What waits here ends now."""
        self._closing.set()

    def _wait_until(self, moment_ns: int) -> None:
        left_ns = moment_ns - time.time_ns()
        if left_ns > 0:
            self._closing.wait(left_ns / 1e9)
