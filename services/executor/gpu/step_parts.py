"""What a launcher puts together: the forwards of a step, and what a group adds to it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from deepmesh.wire.messages import SubmitStep
from services.executor.batch import StepBatch
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.draft_program import DraftProgram
from services.executor.gpu.drafter import Draw
from services.executor.gpu.flight import LoadsBuffer


class Forwards(Protocol):
    """What computes rows; nothing here waits for the device."""

    @property
    def has_two_classes(self) -> bool:
        """Whether `prefill` gives other bits than programs: then it computes prompts alone."""
        ...

    @property
    def logits(self) -> Sequence[Tensor]:
        """All that `decode` may return."""
        ...

    def step(self, num_rows: int) -> DecodeStep:
        """To be filled for a decode step of so many rows or tokens, padding behind them."""
        ...

    def decode(self, step: DecodeStep) -> Tensor:
        """[step.num_tokens, vocab_size] logits, float32, on the device, of what fills it by then;
        they stay until the next call."""
        ...

    def prefill(self, batch: StepBatch, padded: int = 0) -> Tensor:
        """Prompt chunks: [wanted, vocab_size] logits, float32, on the device.

        Args:
            padded: in a group of ranks, tokens of the one that has most.
        """
        ...

    def serve(self, padded: int) -> None:
        """This rank's part in `prefill` of other ranks of its group."""
        ...

    @property
    def max_tokens(self) -> int:
        """The most that a decode step takes."""
        ...

    @property
    def pairs(self) -> Tensor:
        """Open pairs by state block, as the cache keeps them."""
        ...

    def draft_programs(self, places: int, draw: Draw) -> list[DraftProgram]:
        """For draft passes of so many places, ascending by rows."""
        ...


class GroupSteps(Protocol):
    """What a step of a group does beside its rows."""

    @property
    def loads_shape(self) -> tuple[int, int]:
        """Layers and experts."""
        ...

    def enter(self, step: SubmitStep) -> None:
        """On the current stream, before anything is exchanged.

        Raises:
            GroupLost: there is no such group any more.
        """
        ...

    def leave(self, step: SubmitStep, room: LoadsBuffer) -> Callable[[], tuple[bytes, bytes]]:
        """Behind all else. Returns what settles it, once the step is over: StepResult.expert_rows
        and .expert_loads; raises GroupLost if an exchange failed."""
        ...
