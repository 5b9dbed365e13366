"""The executor's process of a GPU, with its waits for the device counted and its launches timed.

`python -m bench.rig.executor --out FILE [--make-weights] …`: in all else it is
`python -m services.executor …`. Once the model is loaded, torch reports every call in which the
host waits for the device. FILE holds `Notes` when the process ends.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import services.executor.gpu.engine as gpu
from deepmesh.wire.messages import Capacity, Load
from services.executor.__main__ import main as run
from services.executor.flights import Flight, Settling
from services.executor.gpu.group import DeviceGroup
from services.executor.gpu.model import DeviceModel
from services.executor.gpu.random_model import random_device_parts
from services.executor.interface import OnProgress

WORDS = "synchroniz"  # of torch's warning
NOT_A_CALL = "prototype"  # of the warning that the warnings are new


class Launch(msgspec.Struct):
    """When the launching thread was busy with a step; wall clock, ns."""

    step_id: int
    begin_ns: int
    end_ns: int


class Notes(msgspec.Struct):
    """What the process has seen."""

    waits: list[str] = []  # for the device: torch's words
    launches: list[Launch] = []


class NotedEngine(gpu.GpuEngine):
    """The engine, observed."""

    notes = Notes()
    makes_weights = False  # instead of reading them: of a folder that holds none

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """See `GpuEngine`; what loading waits for does not count."""
        is_cuda = self.kind == "cuda"
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")
        capacity = super().load(order, on_progress)
        self.notes.launches.clear()  # those that measured what steps cost
        if is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        return capacity

    def launch(self, settling: Settling, behind: Callable[[], None]) -> Flight:
        """See `GpuEngine`."""
        begin = time.time_ns()
        flight = super().launch(settling, behind)
        self.notes.launches.append(Launch(settling.turn.step.step_id, begin, time.time_ns()))
        return flight

    def _read_model(
        self,
        path: Path,
        order: Load,
        on_progress: OnProgress,
        group: DeviceGroup | None,
        redundant: int,
    ) -> DeviceModel:
        if not self.makes_weights:
            return super()._read_model(path, order, on_progress, group, redundant)
        assert redundant == 0, "there is no second copy of what is made"
        raw = json.loads((path / "config.json").read_text())
        exchange = None if group is None else group.exchange
        model, _ = random_device_parts(
            raw, numerics=order.numerics, device=self.device, exchange=exchange
        )
        return model


def main() -> int:
    """What the executor exits with."""
    at = sys.argv.index("--out")
    out = Path(sys.argv[at + 1])
    del sys.argv[at : at + 2]
    if "--make-weights" in sys.argv:
        sys.argv.remove("--make-weights")
        NotedEngine.makes_weights = True
    notes = NotedEngine.notes

    def note(message: Warning | str, *_: object) -> None:
        words = str(message)
        if WORDS in words and NOT_A_CALL not in words:
            notes.waits.append(words)

    warnings.simplefilter("always")
    warnings.showwarning = note
    gpu.GpuEngine = NotedEngine
    try:
        return run()
    finally:
        out.write_bytes(msgspec.json.encode(notes))


if __name__ == "__main__":
    sys.exit(main())
