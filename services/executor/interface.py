"""What the service loop needs of an executor, and an executor of its arithmetic."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import BlockOp, Capacity, GpuDone, Load, Pool, StepResult, SubmitStep
from services.executor.kv_copy import BlockCopy, Bytes

if TYPE_CHECKING:
    from services.executor.slots import SlotTable

OnProgress = Callable[[str, int, int], None]  # stage, done, total


class GroupLost(Exception):
    """A peer of the EP group is gone, or this rank has left it: nothing came of the step.

    `Executor.poll` raises it when the group stays lost and nobody has begun a new engine epoch.
    """


class Executor(Protocol):
    """Computes steps in the order submitted. Never decides what to compute."""

    def load(self, order: Load) -> Capacity:
        """Load this rank's shard of the weights; blocks until it is ready."""
        ...

    def submit(self, step: SubmitStep | BlockCopy) -> None:
        """Queue a step, or a copy of blocks, on the device stream and return at once."""
        ...

    def poll(self, timeout_s: float) -> StepResult | GpuDone | None:
        """The oldest result not yet taken, or None after `timeout_s`.

        Raises:
            GroupLost: steps wait for peers that do not come back; only a new epoch helps.
        """
        ...

    def reset(self, engine_epoch: int) -> None:
        """Abandon all steps, keep the weights."""
        ...

    def close(self) -> None:
        """Give back the device."""
        ...


class LiveRows(NamedTuple):
    """The rows of a step that are not null rows, one array element each."""

    rows: NDArray[np.int64]  # index in the step
    slots: NDArray[np.int64]
    starts: NDArray[np.int64]  # first position
    counts: NDArray[np.int64]  # positions to compute, at least 1
    samples: NDArray[np.bool_]  # whether a token is sampled behind the last position


class Sampled(NamedTuple):
    """What a step sampled; one element per live row, meaningful where the row samples."""

    tokens: NDArray[np.int32]
    finite: NDArray[np.bool_]  # the logits were; if not, the request ends
    logprobs: NDArray[np.float32]
    top_ids: Sequence[NDArray[np.int32]]  # as many as the row's n_logprobs
    top_logprobs: Sequence[NDArray[np.float32]]


class Engine(Protocol):
    """The arithmetic of one device.

    `load`, `begin_epoch` and `close` may be called from any thread, the others only from that of
    the device stream.
    """

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """Load the weights, unless these are there already, and make empty KV pools."""
        ...

    def begin_epoch(self, engine_epoch: int) -> None:
        """Steps of this epoch may come; a `compute` of another that waits for peers ends."""
        ...

    def leave(self, engine_epoch: int) -> None:
        """A step failed here: take no part in further steps of this epoch's group."""
        ...

    def run_ops(self, ops: Sequence[BlockOp]) -> None:
        """Copy and clear blocks."""
        ...

    def export_block(self, pool: Pool, block: int, out: Bytes) -> None:
        """Copy a block to host memory; `Capacity.block_bytes` says how long it is.

        Raises:
            IndexError: there is no such block.
        """
        ...

    def import_block(self, pool: Pool, block: int, data: Bytes) -> None:
        """Fill a block with what `export_block` gave.

        Raises:
            IndexError: there is no such block.
        """
        ...

    def compute(self, live: LiveRows, slots: "SlotTable", step: SubmitStep) -> Sampled:
        """Run the model over the rows, writing their KV, and sample behind those that ask.

        In a group of several ranks a step without live rows is computed, too: the others wait
        for this rank's part of it.

        Raises:
            GroupLost: a peer is gone, or the step's epoch is over.
        """
        ...

    def close(self) -> None:
        """Give memory back; ends a `compute` that merely waits."""
        ...
