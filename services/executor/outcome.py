"""What came of a step, on its way into a `StepResult`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import BlockOp, StepResult, StepStatus, StepTimes, SubmitStep
from deepmesh.wire.packed import pack_ids
from services.executor.interface import LiveRows, Sampled


class Outcome:
    """Rows, tokens and operations of one step, or the error that it ended with."""

    def __init__(
        self, rows: NDArray[np.void], *, ops: Sequence[BlockOp] = (), error: str = ""
    ) -> None:
        self.rows, self.ops, self.error = rows, ops, error
        self.begin_ns = self.end_ns = 0
        self._tokens: list[int] = []
        self._logprobs = self._top_ids = self._top_logprobs = b""

    def add_tokens(self, live: LiveRows, sampled: Sampled, *, with_logprobs: bool) -> None:
        """Tokens in the order of the step's rows; logprobs if any row asks for them."""
        took = [i for i in range(len(live.rows)) if self.rows["num_tokens"][live.rows[i]]]
        self._tokens = sampled.tokens[took].tolist()
        if with_logprobs and took:
            self._logprobs = sampled.logprobs[took].astype("<f4").tobytes()
            self._top_ids = b"".join(sampled.top_ids[i].astype("<i4").tobytes() for i in took)
            self._top_logprobs = b"".join(
                sampled.top_logprobs[i].astype("<f4").tobytes() for i in took
            )

    def result(
        self,
        step: SubmitStep,
        rank: int,
        gpu_done: int,
        ops_done: list[tuple[int, int]],
        times: StepTimes,
    ) -> StepResult:
        """The message."""
        return StepResult(
            step.engine_epoch,
            step.step_id,
            rank,
            StepStatus.ERROR if self.error else StepStatus.OK,
            self.rows.tobytes(),
            tokens=pack_ids(self._tokens),
            logprobs=self._logprobs,
            top_ids=self._top_ids,
            top_logprobs=self._top_logprobs,
            gpu_done=gpu_done,
            ops_done=ops_done,
            times=times,
            error=self.error,
        )
