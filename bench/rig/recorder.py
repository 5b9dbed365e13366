"""The scheduler's process with a recorder around its core, and CPU work on request.

`python -m bench.rig.recorder --config mesh.toml --out FILE`: in all else it is
`python -m services.scheduler`. FILE is written when the process ends.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

import msgspec

from deepmesh import log, telemetry
from deepmesh.config import load_config
from deepmesh.wire.messages import StepResult, SubmitStep
from services.scheduler.core.events import Action, Event, Mail, Send, StepResults
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.service import SchedulerService


class Recording(msgspec.Struct):
    """What rank 0 was sent and what it answered, in order."""

    submits: list[SubmitStep] = []
    results: list[StepResult] = []


class RecordedCore:
    """Hands everything on to the core, and keeps the steps that pass."""

    def __init__(self, core: Scheduler, work_s: float) -> None:
        """`work_s`: CPU time that is burnt before each step leaves."""
        self.recording = Recording()
        self._core, self._work_s = core, work_s

    def handle(self, event: Event, now: int) -> list[Action]:
        """See `Scheduler`."""
        match event:
            case Mail(message=StepResult() as result):
                self._note(result)
            case StepResults(results):
                for _, result in results:
                    self._note(result)
            case _:
                pass
        actions = self._core.handle(event, now)
        for action in actions:
            match action:
                case Send(peer, SubmitStep() as step) if peer.endswith("-0"):
                    self.recording.submits.append(step)
                    burn(self._work_s)
                case _:
                    pass
        return actions

    def _note(self, result: StepResult) -> None:
        if result.rank == 0:
            self.recording.results.append(result)

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)


def burn(seconds: float) -> None:
    """Keep this core busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def main() -> int:
    """Run until SIGTERM; a second one ends at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    log.setup("scheduler-0", config.mesh.log_level)
    tracer = telemetry.setup("scheduler", "scheduler-0", config)
    service = SchedulerService(config, index=0, tracer=tracer)
    core = RecordedCore(service.core, arguments.work_ms / 1000)
    service.core = core  # type: ignore[assignment]  # it has everything that the core has
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    try:
        service.run()
    finally:
        tracer.shutdown()
        arguments.out.write_bytes(msgspec.msgpack.encode(core.recording))
    return 0


if __name__ == "__main__":
    sys.exit(main())
