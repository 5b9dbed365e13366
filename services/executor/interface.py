"""What the service loop needs of an executor: five methods, any device."""

from typing import Protocol

from deepmesh.wire.messages import Capacity, GpuDone, Load, StepResult, SubmitStep


class Executor(Protocol):
    """Computes steps in the order submitted. Never decides what to compute."""

    def load(self, order: Load) -> Capacity:
        """Load this rank's shard of the weights; blocks until it is ready."""
        ...

    def submit(self, step: SubmitStep) -> None:
        """Queue a step on the device stream and return at once."""
        ...

    def poll(self, timeout_s: float) -> StepResult | GpuDone | None:
        """The oldest result not yet taken, or None after `timeout_s`."""
        ...

    def reset(self, engine_epoch: int) -> None:
        """Abandon all steps, keep the weights."""
        ...

    def close(self) -> None:
        """Give back the device."""
        ...
