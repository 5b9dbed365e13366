"""What came of a step, on its way into a `StepResult`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    BlockOp,
    Drafting,
    PromptLogprobs,
    StepResult,
    StepStatus,
    StepTimes,
    SubmitStep,
)
from deepmesh.wire.packed import pack_ids
from services.executor.interface import LiveRows, Sampled


class Outcome:
    """Rows, tokens and operations of one step, or the error that it ended with."""

    def __init__(
        self, rows: NDArray[np.void], *, ops: Sequence[BlockOp] = (), error: str = ""
    ) -> None:
        self.rows, self.ops, self.error = rows, ops, error
        self.begin_ns = self.end_ns = 0
        self._tokens = np.zeros(0, np.int32)
        self._prompt: list[PromptLogprobs] = []
        self._drafting: Drafting | None = None
        self._expert_rows = self._expert_loads = b""
        self._logprobs = self._top_ids = self._top_logprobs = self._confidence = b""

    def add_tokens(self, live: LiveRows, sampled: Sampled, *, with_logprobs: bool) -> None:
        """Tokens in the order of the step's rows; logprobs if any row asks for them."""
        took = self.rows["num_tokens"][live.rows].astype(np.int64)
        given = np.ones(len(took), np.int64) if sampled.counts is None else sampled.counts
        ends = np.cumsum(given)
        place = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - given, given)
        kept = np.flatnonzero(place < np.repeat(took, given))  # what follows a stop is not sent
        self._tokens = sampled.tokens[kept]
        self._confidence, self._drafting = sampled.confidence, sampled.drafting
        self._prompt = list(sampled.prompt)
        self._expert_rows, self._expert_loads = sampled.experts
        if with_logprobs and len(kept):
            self._logprobs = sampled.logprobs[kept].astype("<f4").tobytes()
            tops = [(sampled.top_ids[i], sampled.top_logprobs[i]) for i in kept.tolist()]
            self._top_ids = b"".join(ids.astype("<i4").tobytes() for ids, _ in tops)
            self._top_logprobs = b"".join(best.astype("<f4").tobytes() for _, best in tops)

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
            confidence=self._confidence,
            gpu_done=gpu_done,
            ops_done=ops_done,
            times=times,
            error=self.error,
            prompt=self._prompt,
            expert_rows=self._expert_rows,
            expert_loads=self._expert_loads,
            drafting=self._drafting,
        )
