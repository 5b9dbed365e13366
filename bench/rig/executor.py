"""The executor's process of a GPU, with its waits for the device counted.

`python -m bench.rig.executor --out FILE …`: in all else it is `python -m services.executor …`.
Once the model is loaded, torch reports every call in which the host waits for the device; their
number is written to FILE when the process ends.
"""

import sys
import warnings
from pathlib import Path

import torch

import services.executor.gpu.engine as gpu
from deepmesh.wire.messages import Capacity, Load
from services.executor.__main__ import main as run
from services.executor.interface import OnProgress

WORDS = "synchroniz"  # of torch's warning


class CountedEngine(gpu.GpuEngine):
    """The engine, with torch told to report."""

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """See `GpuEngine`; what loading waits for does not count."""
        torch.cuda.set_sync_debug_mode("default")
        capacity = super().load(order, on_progress)
        torch.cuda.set_sync_debug_mode("warn")
        return capacity


def main() -> int:
    """What the executor exits with."""
    at = sys.argv.index("--out")
    out = Path(sys.argv[at + 1])
    del sys.argv[at : at + 2]
    found: list[str] = []

    def note(message: Warning | str, *_: object) -> None:
        if WORDS in str(message):
            found.append(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = note
    gpu.GpuEngine = CountedEngine
    try:
        return run()
    finally:
        calls = [words for words in found if "prototype" not in words]
        out.write_text("\n".join([str(len(calls)), *calls[:20]]))


if __name__ == "__main__":
    sys.exit(main())
