"""What the device can do at best: the steps of a run once more, all queued in advance."""

import time
from collections.abc import Callable, Sequence

from deepmesh.config import Config
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import Capacity, Load, ServiceStats, StepResult, SubmitStep
from deepmesh.wire.sockets import Identity, LinkEvent, Listener, Mail, PeerUp

PATIENCE_S = 60.0


class ReplayError(RuntimeError):
    """The executor did not answer every step."""


def replay(config: Config, submits: Sequence[SubmitStep]) -> list[StepResult]:
    """Results of `submits`, a run's steps from the first of its engine epoch on.

    The executor of the run is there and dials in, as to a scheduler that was restarted.

    Raises:
        ReplayError: see there.
    """
    me = Identity.new("scheduler", "scheduler-0", config)
    ready = ServiceStats(ready=True)
    listener = Listener(config.scheduler_address(0), me, config.links, lambda: ready)
    inbox = Inbox(listener)
    try:
        return _Replay(config, listener, inbox, submits).run()
    finally:
        inbox.close()


class _Replay:
    def __init__(
        self, config: Config, listener: Listener, inbox: Inbox, submits: Sequence[SubmitStep]
    ) -> None:
        self._config, self._listener, self._inbox = config, listener, inbox
        self._submits = submits
        self._peer = ""
        self._loaded = False
        self._results: list[StepResult] = []

    def run(self) -> list[StepResult]:
        self._wait(lambda: bool(self._peer), "no executor dials in")
        model, numerics = self._config.mesh.model, self._config.executor.numerics
        self._listener.send(self._peer, Load(self._submits[0].engine_epoch, 0, 1, model, numerics))
        self._wait(lambda: self._loaded, "the executor does not load")
        for step in self._submits:
            self._listener.send(self._peer, step)
        self._wait(lambda: len(self._results) == len(self._submits), "steps without a result")
        return self._results

    def _wait(self, what: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            for event in self._inbox.wait(1.0):
                self._take(event)
            if time.monotonic() > deadline:
                raise ReplayError(failure)

    def _take(self, event: LinkEvent) -> None:
        match event:
            case PeerUp(peer) if peer.service == "executor":
                self._peer = peer.name
            case Mail(message=Capacity()):
                self._loaded = True
            case Mail(message=StepResult() as result):
                self._results.append(result)
            case _:
                pass
