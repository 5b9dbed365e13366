"""The device stream: one worker thread that runs steps in the order submitted."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    GpuDone,
    GroupFlag,
    Load,
    StepResult,
    StepStatus,
    StepTimes,
    SubmitStep,
)
from deepmesh.wire.packed import BLOCK, CANCEL, ROW, SLOT
from services.executor.interface import CLOSE_S, Engine, GroupLost, OnProgress
from services.executor.kv_copy import BlockCopy, CopyQueue
from services.executor.outcome import Outcome
from services.executor.slots import SlotTable

_log = logging.getLogger(__name__)
MAX_QUEUED = 64  # far above any depth: a scheduler that ignores results is a bug
NO_EPOCH = -1
PATIENCE_S = 10.0
HAND_OVER_S = 0.002  # at most, from the tokens of a step to the next one


class _Job:
    """A step on its way through the stream."""

    def __init__(self, step: SubmitStep, received_ns: int, queue_depth: int) -> None:
        self.step = step
        self.rows: NDArray[np.void] = np.frombuffer(step.rows, ROW)
        self.received_ns = received_ns
        self.enqueued_ns = time.time_ns()
        self.queue_depth = queue_depth


class StreamExecutor:
    """An `Executor` around an `Engine`: what is common to the fake, the CPU and the GPU.

    `submit` and `poll` never wait for arithmetic. A result is there as soon as the tokens are
    (TOKENS_READY); the `gpu_done` watermark moves only when the step's tail, with the operations
    behind its rows, is complete, and travels alone if no later result is there to carry it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_result: Callable[[], None] = lambda: None,
        on_progress: OnProgress = lambda stage, done, total: None,
        patience_s: float = PATIENCE_S,
        max_queued: int = MAX_QUEUED,
        hand_over_s: float = HAND_OVER_S,
    ) -> None:
        """
        Args:
            patience_s: how long after the loss of the EP group a new epoch is waited for.
            max_queued: steps that may wait for the device.
            hand_over_s: how long a device that is this process waits for its tokens to be taken.
        """
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._on_result = on_result
        self._on_progress = on_progress
        self._patience_s, self._max_queued = patience_s, max_queued
        self._hand_over_s = hand_over_s
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[_Job] = deque()
        self._copies = CopyQueue()  # of this epoch
        self._results: deque[StepResult | GpuDone] = deque()
        self._epoch = NO_EPOCH
        self._capacity: Capacity | None = None
        self._closing = False
        self._slots: SlotTable | None = None  # of this epoch; the worker fills it
        self._rank, self._ranks = 0, 1
        self._group_lost = ""  # why; empty: it is not
        self._gpu_done = 0
        self._is_heard = True  # whoever polls has taken all results, and come back
        self._ops_done: list[tuple[int, int]] = []
        self._cancelled: list[NDArray[np.void]] = []
        self._worker = threading.Thread(target=self._work, name="device-stream", daemon=True)
        self._worker.start()

    # ------------------------------------------------------------ the service's thread

    @property
    def num_requests(self) -> int:
        """Requests in slots."""
        slots = self._slots
        return slots.num_open if slots is not None else 0

    def load(self, order: Load) -> Capacity:
        """Load the weights and begin the order's engine epoch with empty slots and pools."""
        self.reset(NO_EPOCH)
        capacity = self._engine.load(order, self._on_progress)
        with self._changed:
            self._capacity, self._rank, self._ranks = capacity, order.rank, order.ranks
        self.reset(order.engine_epoch)
        return capacity

    def submit(self, step: SubmitStep | BlockCopy) -> None:
        """Queue a step or a copy; one of another engine epoch is dropped, a step counted."""
        received_ns = time.time_ns()
        with self._changed:
            if isinstance(step, BlockCopy):
                if step.engine_epoch == self._epoch and self._capacity is not None:
                    self._copies.add(step)
                    self._changed.notify_all()
                return
            if step.engine_epoch != self._epoch or self._capacity is None:
                self.counters["stale_steps"] += 1
                return
            assert len(self._queue) < self._max_queued, f"{self._max_queued} steps wait already"
            if step.cancel:
                self._cancelled.append(np.frombuffer(step.cancel, CANCEL))
            self._copies.on_step(step.step_id)
            self._queue.append(_Job(step, received_ns, len(self._queue)))
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> StepResult | GpuDone | None:
        """The oldest result not yet taken, or None after `timeout_s`; see `Executor`."""
        with self._changed:
            if not (self._results or self._is_heard):
                self._is_heard = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._results or self._group_lost, timeout_s)
            if self._group_lost:
                raise GroupLost(self._group_lost)
            return self._results.popleft() if self._results else None

    def reset(self, engine_epoch: int) -> None:
        """Abandon queued steps and results; the step that runs now ends unheard."""
        with self._changed:
            self.counters["abandoned_steps"] += len(self._queue)
            self._epoch, self._group_lost = engine_epoch, ""
            self._queue.clear()
            self._copies.cancel()
            self._copies = CopyQueue()
            self._results.clear()
            self._cancelled.clear()
            self._gpu_done = 0
            self._ops_done = []
            self._slots = None  # also when the number repeats: a new epoch has empty slots
            self._engine.begin_epoch(engine_epoch)
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End the worker; queued steps are abandoned. See `Executor`."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._copies.cancel()
            self._changed.notify_all()
        self._engine.close()
        self._worker.join(timeout_s)
        return not self._worker.is_alive()

    # ------------------------------------------------------------ the worker's thread

    def _work(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, BlockCopy):
                work.run(self._engine)
            else:
                self._run(*work)

    def _next(self) -> tuple[_Job, SlotTable] | BlockCopy | None:
        """The next step or copy, by turns if both wait; None once the executor closes."""
        with self._changed:
            while True:
                if self._closing:
                    return None
                copy = self._copies.take_ready(self._gpu_done, is_step_waiting=bool(self._queue))
                if copy is not None:
                    return copy
                if self._queue:
                    break
                self._changed.wait()
            job, slots = self._queue.popleft(), self._slots_of_epoch()
            for row in (row for rows in self._cancelled for row in rows):
                slots.cancel(int(row["slot"]), int(row["rid"]), int(row["epoch"]))
            self._cancelled.clear()
            return job, slots

    def _slots_of_epoch(self) -> SlotTable:
        assert self._capacity is not None
        if self._slots is None:
            self._slots = SlotTable(self._capacity)
        return self._slots

    def _run(self, job: _Job, slots: SlotTable) -> None:
        """One step: operations before, rows, result, operations behind, watermark."""
        step, clock = job.step, self._engine.clock
        begin_ns = clock.begin(job.enqueued_ns)
        after = [op for op in step.ops if op.after]
        try:
            outcome = self._compute(job, slots)
        except GroupLost as error:
            self._await_epoch(step, str(error))
            return
        except Exception as error:  # the one of this loop: the step fails, the executor lives
            _log.exception("step %d failed", step.step_id)
            self.counters["failed_steps"] += 1
            slots.fail(job.rows)
            self._engine.leave(step.engine_epoch)
            outcome = Outcome(slots.report(job.rows), error=f"{type(error).__name__}: {error}")
            after = []
        outcome.begin_ns, outcome.end_ns = begin_ns, clock.end()
        is_whole = not after and not clock.has_tail
        self._emit(job, outcome, is_whole=is_whole)
        if clock.is_host:
            self._hand_over()
        if not is_whole:
            clock.finish()
            self._tail(job, after)
        if step.descriptor.flags:
            _log.info("behind group step %d: %s", step.group_step, _names(step.descriptor.flags))

    def _await_epoch(self, step: SubmitStep, reason: str) -> None:
        """The scheduler learns of a dead peer, or of a step that failed there, from others than
        this rank, and begins a new epoch. If it does not, the session has to end.
        """
        _log.warning("group step %d of epoch %d: %s", step.group_step, step.engine_epoch, reason)
        self.counters["lost_groups"] += 1
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._epoch != step.engine_epoch, self._patience_s
            )
            if self._closing or self._epoch != step.engine_epoch:
                return
            self._group_lost = reason
            self._changed.notify_all()
        self._on_result()

    def _compute(self, job: _Job, slots: SlotTable) -> Outcome:
        step = job.step
        slots.close(np.frombuffer(step.close, SLOT))
        for init in step.init:
            slots.open(init)
        slots.append(np.frombuffer(step.blocks, BLOCK))
        before = [op for op in step.ops if not op.after]
        self._run_ops(before, slots)
        live = slots.resolve(job.rows)
        if not len(live.rows) and self._ranks == 1:
            return Outcome(slots.report(job.rows), ops=before)
        sampled = self._engine.compute(live, slots, step)
        rows = slots.settle(job.rows, live, sampled, step.step_id)
        outcome = Outcome(rows, ops=before)
        asks = bool((slots.num_logprobs[live.slots] >= 0).any())
        outcome.add_tokens(live, sampled, with_logprobs=asks)
        return outcome

    def _run_ops(self, ops: Sequence[BlockOp], slots: SlotTable) -> None:
        for op in ops:
            slots.check_op(op)
        if ops:
            self._engine.run_ops(ops)

    def _emit(self, job: _Job, outcome: Outcome, *, is_whole: bool) -> None:
        """TOKENS_READY; carries the watermark of this step only if it has no tail."""
        step = job.step
        times = StepTimes(
            received_ns=job.received_ns,
            enqueued_ns=job.enqueued_ns,
            begin_ns=outcome.begin_ns,
            end_ns=outcome.end_ns,
            copied_ns=time.time_ns(),
            queue_depth=job.queue_depth,
        )
        with self._changed:
            if step.engine_epoch != self._epoch:
                self.counters["abandoned_steps"] += 1
                return
            if is_whole:
                self._gpu_done = step.step_id
            status = int(StepStatus.ERROR if outcome.error else StepStatus.OK)
            ops_done = self._ops_done + [(op.op_id, 0) for op in outcome.ops]
            if outcome.error:
                ops_done = self._ops_done + [(op.op_id, status) for op in step.ops]
            self._ops_done = []
            self._results.append(outcome.result(step, self._rank, self._gpu_done, ops_done, times))
            self._changed.notify_all()
        self._on_result()

    def _hand_over(self) -> None:
        """Let the tokens leave before the next step begins: it would keep the core, or the
        interpreter, from the thread that sends them for a good part of its time."""
        with self._changed:
            if self._queue and self._results:
                self._is_heard = False
                self._changed.wait_for(
                    lambda: self._is_heard or self._closing or not self._queue, self._hand_over_s
                )
                self._is_heard = True

    def _tail(self, job: _Job, after: Sequence[BlockOp]) -> None:
        """GPU_DONE: nothing of this step touches a block any more."""
        status = 0
        try:
            if after:
                self._engine.run_ops(after)
        except Exception:  # as in _run; the tokens are out already, the operations report it
            _log.exception("operations behind step %d failed", job.step.step_id)
            status = 1
        with self._changed:
            if job.step.engine_epoch != self._epoch:
                return
            self._gpu_done = job.step.step_id
            self._ops_done += [(op.op_id, status) for op in after]
            if self._queue:
                return  # the next result carries the watermark
            ops_done, self._ops_done = self._ops_done, []
            self._results.append(GpuDone(self._epoch, self._rank, self._gpu_done, ops_done))
            self._changed.notify_all()
        self._on_result()


def _names(flags: int) -> str:
    """Of the control operations that a group step brings."""
    return ", ".join(flag.name for flag in GroupFlag if flags & flag) or hex(flags)
