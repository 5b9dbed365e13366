"""The results of several ranks for one step, joined into arrays over their rows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import StepResult
from deepmesh.wire.packed import RESULT

from .group import Captures, StepRecord, StepRows


class ProtocolError(Exception):
    """A result does not fit the step it answers: this rank's device cannot be trusted."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass(slots=True, eq=False)
class Answers:
    """What some ranks, or all, say about the rows of one step, in rank order."""

    results: list[StepResult]  # by ascending rank
    starts: NDArray[np.int64]  # result k has rows[starts[k] : starts[k + 1]]
    rows: StepRows  # as planned
    found: NDArray[np.void]  # packed.RESULT, row by row
    counts: NDArray[np.int64]  # tokens of each row
    offsets: NDArray[np.int64]  # of each row's first token
    tokens: NDArray[np.int32]

    def captures(self, step: StepRecord) -> tuple[Captures, NDArray[np.intp]]:
        """What these ranks' rows were to capture, and the place of each in `rows`."""
        captures = step.captures
        if self.rows is step.rows or not len(captures.row):
            return captures, captures.row
        shifts = np.full(len(step.bounds) - 1, -1, np.int64)
        ranks = [result.rank for result in self.results]
        shifts[ranks] = self.starts[:-1]
        of = np.searchsorted(step.bounds, captures.row, side="right") - 1
        answered = shifts[of] >= 0
        captures, of = captures.take(answered), of[answered]
        return captures, captures.row - np.array(step.bounds)[of] + shifts[of]

    def at(self, row: int) -> tuple[int, int]:
        """The place in `results` of a row's result, and the row's number in there."""
        place = int(np.searchsorted(self.starts, row, side="right")) - 1
        return place, row - int(self.starts[place])

    def fault(self, row: int, text: str) -> ProtocolError:
        """An error of the rank that answered this row."""
        place, number = self.at(row)
        return ProtocolError(self.results[place].rank, f"row {number} {text}")


def join(step: StepRecord, results: list[StepResult]) -> Answers:
    """Join results of one step; at most one of each rank.

    Raises:
        ProtocolError: a rank's rows or tokens are not those of the step.
    """
    results = sorted(results, key=_rank)
    bounds, size = step.bounds, RESULT.itemsize
    parts: list[bytes] = []
    starts = [0]
    for result in results:
        num_rows = bounds[result.rank + 1] - bounds[result.rank]
        have, rest = divmod(len(result.rows), size)
        if rest:
            raise ProtocolError(result.rank, "result rows are cut short")
        if num_rows and have != num_rows:
            text = f"{have} result rows for {num_rows} rows of the step"
            raise ProtocolError(result.rank, text)
        parts.append(result.rows if num_rows else b"")  # a dummy row says nothing
        starts.append(starts[-1] + num_rows)
    found = np.frombuffer(b"".join(parts), RESULT)
    counts = found["num_tokens"].astype(np.int64)
    ends = np.cumsum(counts)
    _check_tokens(results, np.concatenate([[0], ends])[starts])
    answers = Answers(
        results=results,
        starts=np.array(starts, np.int64),
        rows=_rows_of(step, results),
        found=found,
        counts=counts,
        offsets=ends - counts,
        tokens=np.frombuffer(b"".join([result.tokens for result in results]), "<i4"),
    )
    other = (found["rid"] != answers.rows.rid) | (found["epoch"] != answers.rows.epoch)
    if other.any():
        raise answers.fault(int(other.argmax()), "is not that of the step")
    return answers


def _rank(result: StepResult) -> int:
    return result.rank


def _rows_of(step: StepRecord, results: list[StepResult]) -> StepRows:
    if len(results) == len(step.bounds) - 1:
        return step.rows
    answered = np.zeros(len(step.bounds) - 1, np.bool_)
    answered[[result.rank for result in results]] = True
    return step.rows.take(np.repeat(answered, np.diff(step.bounds)))


def _check_tokens(results: list[StepResult], edges: NDArray[np.int64]) -> None:
    """Each rank brings the tokens that its rows announce."""
    announced = np.diff(edges)
    sizes = np.array([len(result.tokens) for result in results])
    wrong = sizes != 4 * announced
    if wrong.any():
        at = int(wrong.argmax())
        text = f"{sizes[at] / 4:g} tokens for {announced[at]} announced"
        raise ProtocolError(results[at].rank, text)
