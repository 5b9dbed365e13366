"""What became of drafts: counters of a group, and what one step did about them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import DraftStats, StepResult
from deepmesh.wire.packed import RESULT

MAX_DRAFTS = 15  # of a row


@dataclass(slots=True)
class StepDrafts:
    """Of one group step, as far as its ranks have answered."""

    rows: int = 0  # of all ranks
    widest_rows: int = 0  # of the rank with most tokens
    widest_tokens: int = 0  # that it computed, drafts included
    verified: int = 0  # drafts, over all ranks
    accepted: int = 0
    tokens: int = 0  # that came out
    draft_ns: int = 0  # of the slowest draft pass
    draft_rows: int = 0  # of the widest one
    enqueued_ns: int = 0  # on the device of the rank that had it last

    def add(self, result: StepResult, draft_len: int) -> None:
        """A rank has answered."""
        rows = np.frombuffer(result.rows, RESULT)
        verified = int(rows["num_verified"].sum())
        took = rows["num_tokens"].astype(np.int64)
        self.rows += len(rows)
        self.verified += verified
        self.tokens += int(took.sum())
        self.accepted += int(np.maximum(took - 1, 0).sum())
        if len(rows) + verified > self.widest_tokens:
            self.widest_rows, self.widest_tokens = len(rows), len(rows) + verified
        self.enqueued_ns = max(self.enqueued_ns, result.times.enqueued_ns)
        if result.drafting is not None:
            self.draft_ns = max(self.draft_ns, result.drafting.took_ns)
            self.draft_rows = max(self.draft_rows, result.drafting.drafts // draft_len)


class DraftCounts:
    """Drafts since the start, by their place behind the known token; they outlive engines."""

    def __init__(self) -> None:
        self.learned: dict[str, list[float]] = {}  # by engine, see VerifyCapacity
        self.skipped_steps = 0
        self.took_ns = self.plain_ns = 0.0  # see DraftStats
        self._verified = np.zeros(MAX_DRAFTS, np.int64)
        self._accepted = np.zeros(MAX_DRAFTS, np.int64)
        self._rows = self._drafted = self._draft_ns = 0
        self._errors: list[float] = []

    def add(self, verified: NDArray[np.uint8], tokens: NDArray[np.int64]) -> None:
        """Rows that verified so many drafts each, and brought so many tokens."""
        wide = np.flatnonzero(verified)
        if len(wide):
            place = np.arange(MAX_DRAFTS)
            self._rows += len(wide)
            self._verified += (verified[wide, None] > place).sum(0)
            self._accepted += (tokens[wide, None] - 1 > place).sum(0)

    def saw(self, result: StepResult) -> None:
        """A rank's draft pass."""
        if (drafting := result.drafting) is not None:
            self._drafted += drafting.drafts
            self._draft_ns += drafting.took_ns
            if result.rank == 0 and drafting.errors:
                self._errors = drafting.errors

    def lists(self) -> tuple[list[int], list[int]]:
        """Verified and accepted ones, as far as there were any."""
        num = int(np.count_nonzero(self._verified))
        return self._verified[:num].tolist(), self._accepted[:num].tolist()

    def stats(self) -> DraftStats:
        """All else."""
        return DraftStats(
            drafted=self._drafted,
            rows=self._rows,
            draft_ns=self._draft_ns,
            skipped_steps=self.skipped_steps,
            took_ns=int(self.took_ns),
            plain_ns=int(self.plain_ns),
            errors=self._errors,
        )
