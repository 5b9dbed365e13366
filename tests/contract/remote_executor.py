"""An executor service seen from its scheduler's side of the link, as an `Executor`."""

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from deepmesh.config import Config
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    AnyMessage,
    Capacity,
    GpuDone,
    Load,
    OpDone,
    Progress,
    Reset,
    ServiceStats,
    StepResult,
    SubmitStep,
)
from deepmesh.wire.sockets import Identity, Listener, Mail, PeerDown, PeerUp

WAIT_S = 30.0


class RemoteExecutor:
    """Listens where a scheduler would; one executor service dials in."""

    def __init__(self, config: Config, index: int = 0) -> None:
        me = Identity.new("scheduler", f"scheduler-{index}", config)
        self.listener = Listener(
            config.scheduler_address(index), me, config.links, lambda: ServiceStats(ready=True)
        )
        self.inbox = Inbox(self.listener)
        self.events: Counter[str] = Counter()
        self.progress: list[Progress] = []
        self.ops: list[OpDone] = []
        self.counters: Counter[str] = Counter()
        self._results: list[StepResult | GpuDone] = []
        self._capacity: Capacity | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def load(self, order: Load) -> Capacity:
        """Order it and wait for the answer."""
        self.wait_connected()
        self._capacity = None
        self._results.clear()
        self.send(order)
        self.wait(lambda: self._capacity is not None, "no Capacity")
        assert self._capacity is not None
        return self._capacity

    def submit(self, step: SubmitStep) -> None:
        """Send a step."""
        self.send(step)

    def poll(self, timeout_s: float) -> StepResult | GpuDone | None:
        """The oldest result that has arrived."""
        deadline = time.monotonic() + timeout_s
        while not self._results:
            self._take(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                break
        return self._results.pop(0) if self._results else None

    def reset(self, engine_epoch: int) -> None:
        """Results of older epochs that are on the way are dropped here, as a scheduler does."""
        self.send(Reset(engine_epoch))
        self._results.clear()

    def close(self) -> None:
        """Hang up."""
        self.inbox.close()

    def send(self, message: AnyMessage) -> None:
        """To whichever executor is connected."""
        (name,) = self.listener.peers
        assert self.listener.send(name, message)

    def wait_connected(self, times: int = 1) -> None:
        """Until an executor has dialled in so often."""
        self.wait(lambda: self.events["up"] >= times and bool(self.listener.peers), "nobody dials")

    def wait(self, what: Callable[[], bool], failure: str) -> None:
        """Take mail until `what()` holds."""
        deadline = time.monotonic() + WAIT_S
        while not what():
            self._take(0.5)
            assert time.monotonic() < deadline, failure

    def _take(self, timeout_s: float) -> None:
        for event in self.inbox.wait(timeout_s):
            match event:
                case PeerUp():
                    self.events["up"] += 1
                case PeerDown():
                    self.events["down"] += 1
                case Mail(message=Progress() as progress):
                    self.progress.append(progress)
                case Mail(message=Capacity() as capacity):
                    self._capacity = capacity
                case Mail(message=OpDone() as done):
                    self.ops.append(done)
                case Mail(message=(StepResult() | GpuDone()) as result):
                    self._results.append(result)
