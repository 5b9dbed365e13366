"""What the service loop needs of an executor, and an executor of its arithmetic."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    GpuDone,
    Load,
    Pool,
    PromptLogprobs,
    StepResult,
    SubmitStep,
)
from services.executor.device_clock import DeviceClock
from services.executor.kv_copy import BlockCopy, Bytes

if TYPE_CHECKING:
    from services.executor.slots import SlotTable

OnProgress = Callable[[str, int, int], None]  # stage, done, total
CLOSE_S = 3.0  # a device that does not end its step within this time is taken for hung


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

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Give back the device; False if it hangs, and only the end of the process can help."""
        ...


class LiveRows(NamedTuple):
    """The rows of a step that are not null rows, one array element each."""

    rows: NDArray[np.int64]  # index in the step
    slots: NDArray[np.int64]
    starts: NDArray[np.int64]  # first position
    counts: NDArray[np.int64]  # positions to compute, at least 1
    samples: NDArray[np.bool_]  # whether a token is sampled behind the last position
    drafted: NDArray[np.bool_]  # positions behind the first hold drafts that only we know
    masked: NDArray[np.bool_]  # may sample only under the mask of its grammar


class Sampled(NamedTuple):
    """What a step sampled.

    `finite` and `reasons` have an element per live row, the rest one per token, in the order of
    the rows; without `counts` that is one each, meaningful where the row samples.
    """

    tokens: NDArray[np.int32]
    finite: NDArray[np.bool_]  # the logits were, and left an id to sample; else the request ends
    logprobs: NDArray[np.float32]
    top_ids: Sequence[NDArray[np.int32]]  # as many as the row's n_logprobs
    top_logprobs: Sequence[NDArray[np.float32]]
    counts: NDArray[np.int64] | None = None  # tokens of each row
    # DoneReason behind the row's last token, as far as only the engine can see it: NULL for a row
    # that missed its mask, GRAMMAR, GRAMMAR_ERROR
    reasons: NDArray[np.uint8] | None = None
    confidence: bytes = b""  # StepResult.confidence
    prompt: Sequence[PromptLogprobs] = ()  # StepResult.prompt


class Engine(Protocol):
    """The arithmetic of one device.

    `load`, `begin_epoch` and `close` may be called from any thread, the others only from that of
    the device stream.
    """

    @property
    def clock(self) -> DeviceClock:
        """When its steps begin and end."""
        ...

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
