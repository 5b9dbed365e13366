"""Results of group steps: whose turn each is, what is applied together, and who owes one."""

from collections import deque

from deepmesh.wire.messages import GpuDone, StepResult, StepStatus

from .answers import ProtocolError
from .engine import Engine
from .group import Group, StepRecord, group_step_of
from .outbox import Outbox
from .session import Session

FIRST_STEPS_NS = 60_000_000_000  # patience while nothing is known about how long steps take
SLOW_STEPS = 10  # times the slowest of the last steps: a step that takes longer hangs
RECENT_STEPS = 256
FEW_STEPS = 16
_AHEAD = "GPU_DONE of step {}, which was not submitted"


class Steps:
    """Takes the results of all ranks in step order, and the watermarks that release fences."""

    def __init__(self, group: Group, session: Session, outbox: Outbox, *, hang_s: float) -> None:
        self._group = group
        self._session = session
        self._outbox = outbox
        self._hang_ns = int(hang_s * 1e9)
        self._recent_ns: deque[int] = deque(maxlen=RECENT_STEPS)  # from plan to the last result
        self._progress_ns = 0

    def take(self, results: list[StepResult], now: int) -> None:
        """Apply results in the order of their steps, those of one step in one pass.

        A rank whose result does not fit ends the engine epoch, behind what the others brought.
        """
        engine, group = self._session.engine, self._group
        due: dict[int, list[StepResult]] = {}  # by step
        taken: dict[int, int] = {}  # the last step of each rank in there
        fault: tuple[StepRecord, ProtocolError] | None = None
        for result in results:
            if engine is None or result.engine_epoch != group.engine_epoch:
                self._late(result)
                continue
            step = self._step_of(result, taken.get(result.rank, 0))
            if step is None:
                continue  # a duplicate
            error = _error_of(step, result, group.last_step_id)
            if error is None:
                due.setdefault(step.step_id, []).append(result)
                taken[result.rank] = step.step_id
            else:
                fault = fault or (step, error)
        if engine is None:
            return
        for step in list(group.unresolved):
            if step.step_id in due:
                error = self._apply(engine, step, due[step.step_id], now)
                if error is not None:
                    fault = fault or (step, error)
                    break
        self._session.count(engine)
        if fault is not None:
            self._fail(*fault, now)

    def gpu_done(self, message: GpuDone, now: int) -> None:
        """The watermark alone."""
        group, rank = self._group, message.rank
        if message.engine_epoch != group.engine_epoch or not 0 <= rank < group.ranks:
            return
        if message.gpu_done > group.last_step_id:
            if self._session.engine is not None:
                reason = f"rank {rank}: {_AHEAD.format(message.gpu_done)}"
                self._session.restart(now, reason, faulty=None)
            return
        if message.gpu_done > group.gpu_done[rank]:  # the same again is no progress
            self._advance(rank, message.gpu_done)
            self._progress_ns = now
            group.retire(now)

    def watch(self, now: int) -> None:
        """Ranks that owe a result, or the end of a tail, for too long are taken for dead."""
        group = self._group
        step = next(iter((*group.retiring, *group.unresolved)), None)
        if step is not None and now - max(step.planned_ns, self._progress_ns) > self._patience_ns():
            self._session.hung(step, now)

    def _patience_ns(self) -> int:
        if len(self._recent_ns) < FEW_STEPS:
            return max(FIRST_STEPS_NS, self._hang_ns)
        return max(self._hang_ns, SLOW_STEPS * max(self._recent_ns))

    def _step_of(self, result: StepResult, taken: int) -> StepRecord | None:
        """The oldest step for which the rank owes a result, behind the one taken already; None
        for a result that came twice."""
        for step in self._group.unresolved:
            if result.rank in step.pending and step.step_id > taken:
                return step if result.step_id >= step.step_id else None
        return None

    def _apply(
        self, engine: Engine, step: StepRecord, results: list[StepResult], now: int
    ) -> ProtocolError | None:
        """Apply what fits; the first error, if a rank's result does not."""
        first: ProtocolError | None = None
        while results:
            try:
                engine.apply(step, results, now)
                break
            except ProtocolError as error:
                first = first or error
                results = [result for result in results if result.rank != error.rank]
        for result in results:
            self._advance(result.rank, result.gpu_done)
            step.begin_ns = max(step.begin_ns, result.times.begin_ns)
            step.end_ns = max(step.end_ns, result.times.end_ns)
            self._session.experts.answered(step, result)
            if self._group.answered(step, result.rank, now):
                self._session.experts.complete(step)
                self._recent_ns.append(now - step.planned_ns)
                engine.complete(step)
                self._session.step_ended(step, now)
        if results:
            self._progress_ns = now
            self._group.retire(now)
        return first

    def _fail(self, step: StepRecord, error: ProtocolError, now: int) -> None:
        self._outbox.note(
            "error",
            "step failed",
            step=group_step_of(step.step_id),
            rank=error.rank,
            error=str(error),
        )
        self._session.restart(now, f"rank {error.rank}: {error}", faulty=step)

    def _late(self, result: StepResult) -> None:
        """A result of an older epoch: its leases went with its pools, its tokens are nobody's."""
        self._group.waste.late_results += 1
        self._group.waste.overrun_tokens += len(result.tokens) // 4

    def _advance(self, rank: int, gpu_done: int) -> None:
        engine, group = self._session.engine, self._group
        if engine is not None and gpu_done > group.gpu_done[rank]:
            group.gpu_done[rank] = gpu_done
            engine.memories[rank].advance(gpu_done)


def _error_of(step: StepRecord, result: StepResult, last_step_id: int) -> ProtocolError | None:
    """What is wrong with a result before its rows are looked at."""
    if result.gpu_done > last_step_id:
        return ProtocolError(result.rank, _AHEAD.format(result.gpu_done))
    if result.step_id != step.step_id:
        text = f"result of step {result.step_id} before {step.step_id}"
        return ProtocolError(result.rank, text)
    if result.status == StepStatus.ERROR:
        return ProtocolError(result.rank, result.error or "the device failed")
    return None
