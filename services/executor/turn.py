"""A step's turn at a slot table: what it changes, and what is reported of its rows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import BlockOp, SubmitStep
from deepmesh.wire.packed import BLOCK, ROW, SLOT
from services.executor.interface import LiveRows, Sampled
from services.executor.outcome import Outcome
from services.executor.slots import SlotTable


class Turn:
    """One step; every table that keeps up with the steps takes it once."""

    def __init__(self, step: SubmitStep, cancels: Sequence[NDArray[np.void]]) -> None:
        """`cancels` (packed.CANCEL): what came with this step and those before it."""
        self.step = step
        self.rows: NDArray[np.void] = np.frombuffer(step.rows, ROW)
        self._cancels = cancels

    def enter(self, slots: SlotTable) -> list[BlockOp]:
        """Slots close, open and grow; the operations to carry out before the rows."""
        step = self.step
        for row in (row for rows in self._cancels for row in rows):
            slots.cancel(int(row["slot"]), int(row["rid"]), int(row["epoch"]))
        slots.close(np.frombuffer(step.close, SLOT))
        for init in step.init:
            slots.open(init)
        slots.append(np.frombuffer(step.blocks, BLOCK))
        before = [op for op in step.ops if not op.after]
        for op in before:
            slots.check_op(op)
        return before

    def outcome(self, slots: SlotTable, live: LiveRows, sampled: Sampled) -> Outcome:
        """The rows were computed."""
        before = [op for op in self.step.ops if not op.after]
        outcome = Outcome(slots.settle(self.rows, live, sampled, self.step.step_id), ops=before)
        asks = bool((slots.num_logprobs[live.slots] >= 0).any())
        outcome.add_tokens(live, sampled, with_logprobs=asks)
        return outcome

    def idle(self, slots: SlotTable) -> Outcome:
        """There was none to compute."""
        return Outcome(slots.report(self.rows), ops=[op for op in self.step.ops if not op.after])

    def failure(self, slots: SlotTable, error: Exception) -> Outcome:
        """The step broke off; nothing can be built on what its rows left behind."""
        slots.fail(self.rows)
        return Outcome(slots.report(self.rows), error=f"{type(error).__name__}: {error}")
