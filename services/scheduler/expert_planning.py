"""Plans of expert placements in a process of their own, so that no step waits for one.

`python -m services.scheduler.expert_planning` reads one order from stdin and writes the plan.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from deepmesh.experts import pack_places, unpack_places

from .core.expert_orders import ExpertsPlanned, PlanExperts, plan_experts
from .core.expert_planner import PlanOptions

_log = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
NICE = 10
LONGEST_S = 120.0


class _Order(msgspec.Struct, array_like=True):
    """`PlanExperts` as bytes."""

    number: int
    shape: tuple[int, int, int]
    counts: bytes  # int64
    steps: bytes  # int64
    ranks: int
    places: list[bytes]
    options: PlanOptions


class _Planned(msgspec.Struct, array_like=True):
    """`ExpertsPlanned` as bytes."""

    number: int
    layers: list[tuple[int, bytes]]


class ExpertPlanning:
    """One plan at a time."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called by another thread when `take` has something."""
        self._wake = wake
        self._lock = threading.Lock()
        self._found: ExpertsPlanned | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, order: PlanExperts) -> None:
        """Begin to plan; what is being planned at present is given up."""
        self.close()
        ranks = len(order.places[0])
        data = msgspec.msgpack.encode(
            _Order(
                order.number,
                order.counts.shape,
                order.counts.tobytes(),
                order.steps.tobytes(),
                ranks,
                [pack_places(places) for places in order.places],
                order.options,
            )
        )
        command = [sys.executable, "-m", "services.scheduler.expert_planning"]
        # numpy would spin on every core for products of a few hundred numbers
        one_core = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **one_core},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._thread = threading.Thread(
            target=self._run, args=(process, data, order), name="expert-plan", daemon=True
        )
        self._thread.start()

    def take(self) -> ExpertsPlanned | None:
        """A plan that is ready, once."""
        with self._lock:
            found, self._found = self._found, None
            return found

    def close(self) -> None:
        """Give up what is being planned."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self, process: "subprocess.Popen[bytes]", data: bytes, order: PlanExperts) -> None:
        """A plan that fails changes nothing, and another one is asked for in its time."""
        found = ExpertsPlanned(order.number, [])
        try:
            answer, _ = process.communicate(data, LONGEST_S)
            planned = msgspec.msgpack.decode(answer, type=_Planned)
            ranks = len(order.places[0])
            layers = [(layer, unpack_places(places, ranks)) for layer, places in planned.layers]
            found = ExpertsPlanned(planned.number, layers)
        except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
            _log.warning("no plan for experts: %s (exit status %s)", error, process.poll())
        finally:
            process.kill()
            process.wait()
        with self._lock:
            self._found = found
        self._wake()


def main() -> None:
    """One order, one plan."""
    os.nice(NICE)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Order)
    counts = np.frombuffer(order.counts, np.int64).reshape(order.shape)
    places = [unpack_places(data, order.ranks) for data in order.places]
    steps = np.frombuffer(order.steps, np.int64)
    planned = plan_experts(PlanExperts(order.number, counts, steps, places, order.options))
    layers = [(layer, pack_places(new)) for layer, new in planned.layers]
    sys.stdout.buffer.write(msgspec.msgpack.encode(_Planned(planned.number, layers)))


if __name__ == "__main__":
    main()
