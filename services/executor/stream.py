"""The device stream: a worker thread that runs steps in the order submitted, or launches them."""

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
    ExpertsPlaced,
    GpuDone,
    GroupFlag,
    Load,
    PlaceExperts,
    StepResult,
    StepStatus,
    StepTimes,
    SubmitStep,
)
from deepmesh.wire.packed import CANCEL
from services.executor.flights import Flight, Flights, LaunchEngine, Settling, Turn
from services.executor.interface import (
    CLOSE_S,
    DeviceLost,
    Engine,
    GroupLost,
    OnProgress,
    PlacingEngine,
)
from services.executor.kv_copy import BlockCopy, CopyQueue, SideCopies
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
        self.received_ns = received_ns
        self.enqueued_ns = time.time_ns()
        self.queue_depth = queue_depth


class StreamExecutor:
    """An `Executor` around an `Engine`: what is common to the fake, the CPU and the GPU.

    `submit` and `poll` never wait for arithmetic. A result is there as soon as the tokens are
    (TOKENS_READY); the `gpu_done` watermark moves only when the step's tail, with the operations
    behind its rows, is complete, and travels alone if no later result is there to carry it.

    Steps of a `LaunchEngine` are launched by the worker while those before them run, and settled by
    a thread of their own, which waits for the device (docs/decisions/0019-launched-ahead.md).
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
        self._results: deque[StepResult | GpuDone | ExpertsPlaced] = deque()
        self._epoch = NO_EPOCH
        self._capacity: Capacity | None = None
        self._closing = False
        self._slots: SlotTable | None = None  # of this epoch; the worker fills it
        self._rank, self._ranks = 0, 1
        self._group_lost = ""  # why; empty: it is not
        self._device_lost = ""  # as well, for good
        self._gpu_done = 0
        self._is_heard = True  # whoever polls has taken all results, and come back
        self._ops_done: list[tuple[int, int]] = []
        self._cancelled: list[NDArray[np.void]] = []
        self._launcher = engine if isinstance(engine, LaunchEngine) else None
        # Where steps are launched the device orders the copies, and its steps hold no thread up.
        self._side = SideCopies(engine) if self._launcher is None else None
        self._flights = Flights() if self._launcher is not None else None
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

    def submit(self, step: SubmitStep | BlockCopy | PlaceExperts) -> None:
        """Queue a step or a copy, or begin to fetch experts; what is of another engine epoch is
        dropped, a step counted."""
        received_ns = time.time_ns()
        with self._changed:
            if isinstance(step, PlaceExperts):
                if step.engine_epoch == self._epoch and isinstance(self._engine, PlacingEngine):
                    self._engine.place(step, self._report)
                return
            if isinstance(step, BlockCopy):
                if step.engine_epoch != self._epoch or self._capacity is None:
                    return
                if self._side is not None and step.to_device and not step.after_step:
                    self._side.add(step)
                    return
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

    def _report(self, placed: ExpertsPlaced) -> None:
        """Experts are here; called by the thread that fetched them."""
        with self._changed:
            if placed.engine_epoch != self._epoch:
                return
            self._results.append(placed)
            self._changed.notify_all()
        self._on_result()

    def poll(self, timeout_s: float) -> StepResult | GpuDone | ExpertsPlaced | None:
        """The oldest result not yet taken, or None after `timeout_s`; see `Executor`."""
        with self._changed:
            if not (self._results or self._is_heard):
                self._is_heard = True
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._results or self._group_lost or self._device_lost, timeout_s
            )
            if self._group_lost:
                raise GroupLost(self._group_lost)
            if self._device_lost and not self._results:
                raise DeviceLost(self._device_lost)
            return self._results.popleft() if self._results else None

    def reset(self, engine_epoch: int) -> None:
        """Abandon queued steps and results; the step that runs now ends unheard."""
        with self._changed:
            self.counters["abandoned_steps"] += len(self._queue)
            self._epoch, self._group_lost = engine_epoch, ""
            self._queue.clear()
            self._copies.cancel()
            if self._side is not None:
                self._side.cancel()
            self._copies = CopyQueue()
            self._results.clear()
            self._cancelled.clear()
            self._gpu_done = 0
            self._ops_done = []
            self._slots = None  # also when the number repeats: a new epoch has empty slots
            self._engine.begin_epoch(engine_epoch)
            self._changed.notify_all()
        if self._side is not None:
            self._side.settle()  # before a step of the new epoch can use its blocks

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End the worker; queued steps are abandoned. See `Executor`."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._copies.cancel()
            self._changed.notify_all()
        self._engine.close()
        is_landed = self._flights is None or self._flights.close(timeout_s)
        if self._side is not None:
            is_landed = self._side.close(timeout_s) and is_landed
        self._worker.join(timeout_s)
        return is_landed and not self._worker.is_alive()

    # ------------------------------------------------------------ the worker's thread

    def _work(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, BlockCopy):
                work.run(self._engine)
            elif self._launcher is not None:
                self._launch(*work, self._launcher)
            else:
                self._run(*work)

    def _next(self) -> tuple[_Job, Turn, SlotTable] | BlockCopy | None:
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
            job, cancels = self._queue.popleft(), self._cancelled
            self._cancelled = []
            return job, Turn(job.step, cancels), self._slots_of_epoch()

    def _slots_of_epoch(self) -> SlotTable:
        assert self._capacity is not None
        if self._slots is None:
            self._slots = SlotTable(self._capacity)
        return self._slots

    def _run(self, job: _Job, turn: Turn, slots: SlotTable) -> None:
        """One step: operations before, rows, result, operations behind, watermark."""
        step, clock = job.step, self._engine.clock
        begin_ns = clock.begin(job.enqueued_ns)
        after = [op for op in step.ops if op.after]
        try:
            outcome = self._compute(turn, slots)
        except GroupLost as error:
            self._await_epoch(step, str(error))
            return
        except Exception as error:  # the one of this loop: the step fails, the executor lives
            _log.exception("step %d failed", step.step_id)
            self.counters["failed_steps"] += 1
            self._engine.leave(step.engine_epoch)
            outcome, after = turn.failure(slots, error), []
        outcome.begin_ns, outcome.end_ns = begin_ns, clock.end()
        is_whole = not after and not clock.has_tail
        self._emit(job, outcome, is_whole=is_whole)
        if clock.is_host:
            self._hand_over()
        if not is_whole:
            clock.finish()
            self._tail(job, after)
        _note(step)

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

    def _compute(self, turn: Turn, slots: SlotTable) -> Outcome:
        before = turn.enter(slots)
        if before:
            self._engine.run_ops(before)
        live = slots.resolve(turn.rows)
        if not len(live.rows) and self._ranks == 1:
            return turn.idle(slots)
        return turn.outcome(slots, live, self._engine.compute(live, slots, turn.step))

    def _launch(self, job: _Job, turn: Turn, slots: SlotTable, launcher: LaunchEngine) -> None:
        """A step goes to the device, and whoever waits for it to the thread that settles."""
        assert self._flights is not None
        settling, flight, error = Settling(turn, slots), None, None
        try:
            flight = launcher.launch(settling, self._flights.wait_settled)
        except Exception as raised:  # as in _run; reported in the order of the steps
            error = raised
        self._flights.add(lambda: self._land(job, settling, flight, error))

    # ------------------------------------------------------------ the settling thread

    def _land(
        self, job: _Job, settling: Settling, flight: Flight | None, error: Exception | None
    ) -> None:
        """One step that was launched: as `_run`, but for who computes."""
        step, turn, slots = job.step, settling.turn, settling.slots
        after = [op for op in step.ops if op.after]
        times = None
        try:
            times = flight.wait() if flight is not None else None
            outcome = self._settle(settling, flight, error)
        except GroupLost as lost:
            if flight is not None:
                flight.failed()
                flight.land()
            self._await_epoch(step, str(lost))
            return
        except Exception as raised:  # as in _run
            _log.exception("step %d failed", step.step_id)
            self.counters["failed_steps"] += 1
            self._engine.leave(step.engine_epoch)
            outcome, after = turn.failure(slots, raised), []
            if flight is not None:
                flight.failed()
        outcome.begin_ns, outcome.end_ns = times or (job.enqueued_ns, time.time_ns())
        self._emit(job, outcome, is_whole=not after)
        if outcome.error and self._launcher is not None and self._launcher.is_lost():
            with self._changed:
                self._device_lost = outcome.error
                self._changed.notify_all()
            self._on_result()
        if flight is not None:
            if after:
                flight.wait_tail()
                self._end_tail(job, after, flight.tail_status)
            flight.land()
        _note(step)

    def _settle(
        self, settling: Settling, flight: Flight | None, error: Exception | None
    ) -> Outcome:
        live = settling.live()
        if error is not None or flight is None:
            raise error or RuntimeError("the step was not launched")
        outcome = settling.turn.outcome(settling.slots, live, flight.sampled(live))
        flight.settled(live, outcome.rows)
        return outcome

    # ------------------------------------------------------------ what both report

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
        self._end_tail(job, after, status)

    def _end_tail(self, job: _Job, after: Sequence[BlockOp], status: int) -> None:
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


def _note(step: SubmitStep) -> None:
    """Log the control operations that a group step brings."""
    if flags := step.descriptor.flags:
        names = ", ".join(flag.name for flag in GroupFlag if flags & flag) or hex(flags)
        _log.info("behind group step %d: %s", step.group_step, names)
