"""What the service loop needs of an executor, and an executor of its arithmetic."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepmesh.recorder import Slice
from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    Drafting,
    ExpertsPlaced,
    GpuDone,
    Load,
    PlaceExperts,
    Pool,
    PromptLogprobs,
    StepResult,
    SubmitStep,
)
from services.executor.device_clock import DeviceClock
from services.executor.kv_copy import BlockCopy, Place

if TYPE_CHECKING:
    from services.executor.slots import SlotTable

OnProgress = Callable[[str, int, int], None]  # stage, done, total
CLOSE_S = 3.0  # a device that does not end its step within this time is taken for hung


class GroupLost(Exception):
    """A peer of the EP group is gone, or this rank has left it: nothing came of the step.

    `Executor.poll` raises it when the group stays lost and nobody has begun a new engine epoch.
    """


class DeviceLost(Exception):
    """The device failed in a way that only another process can recover from.

    `Executor.poll` raises it behind the results of the steps that failed.
    """


class Executor(Protocol):
    """Computes steps in the order submitted. Never decides what to compute."""

    def load(self, order: Load) -> Capacity:
        """Load this rank's shard of the weights; blocks until it is ready."""
        ...

    def submit(self, step: SubmitStep | BlockCopy | PlaceExperts) -> None:
        """Queue a step, or a copy of blocks, on the device stream and return at once; or begin to
        fetch the experts of a placement, which a step will put in force."""
        ...

    def poll(self, timeout_s: float) -> StepResult | GpuDone | ExpertsPlaced | None:
        """The oldest result not yet taken, or None after `timeout_s`.

        Raises:
            GroupLost: steps wait for peers that do not come back; only a new epoch helps.
            DeviceLost: the process should end.
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
    # first positions of each that may leave out the upper layers; None: no row may
    skips: NDArray[np.int64] | None = None


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
    experts: tuple[bytes, bytes] = (b"", b"")  # StepResult.expert_rows, expert_loads
    drafting: Drafting | None = None
    # drafts of each row that the step computed; None: all that its rows had room for
    verified: NDArray[np.int64] | None = None


@runtime_checkable
class Recording(Protocol):
    """An engine that has more to show on a timeline than when its steps began and ended."""

    record: Callable[[Slice], None]


@runtime_checkable
class PlacingEngine(Protocol):
    """An engine that can change which experts it holds."""

    def place(self, order: PlaceExperts, report: Callable[[ExpertsPlaced], None]) -> None:
        """Fetch what the order asks for, beside the steps, and report; from any thread.

        A new engine epoch ends it unheard.
        """
        ...


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

    def export_block(self, pool: Pool, block: int, out: Place) -> None:
        """Copy a block to host memory, or to a window of the device that `out` is a tensor of;
        `Capacity.block_bytes` says how long it is.

        Raises:
            IndexError: there is no such block.
        """
        ...

    def import_block(self, pool: Pool, block: int, data: Place) -> None:
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
