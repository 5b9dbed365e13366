"""A simulated executor process: one rank's device stream in virtual time, and its faults."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace

from deepmesh.wire.messages import (
    Capacity,
    CompileGrammars,
    GpuDone,
    Grammar,
    GrammarsCompiled,
    Load,
    LoadBlocks,
    ReleaseBlocks,
    Reset,
    RowSource,
    StepResult,
    StepStatus,
    StepTimes,
    StoreBlocks,
    SubmitStep,
)
from deepmesh.wire.packed import ROW

from ..core.events import Incoming
from .clock import MS, Clock, Times
from .collectives import Rendezvous
from .device import Device
from .hashing import mix
from .link import Link
from .masks import MaskWorker
from .store import SimStore, SimTransfers, Truth

NO_EPOCH = -1
_DEVICE = int(RowSource.DEVICE)
LATE_MASK_NS = 8 * MS


@dataclass(slots=True)
class _Queued:
    """A step that waits for the device; its rows lie in a staging buffer until it runs."""

    step: SubmitStep
    buffer: int
    received_ns: int


class SimExecutor:
    """Answers Load, runs steps in order; a step reads its host buffers when it executes."""

    def __init__(
        self,
        rank: int,
        capacity: Capacity,
        *,
        clock: Clock,
        times: Times,
        link: Link,
        rendezvous: Rendezvous,
        to_core: Callable[[str, Incoming], None],
        current_epoch: Callable[[], int],
        depth: int,
        stores: dict[str, SimStore],
        truth: Truth,
        group: int = 0,
    ) -> None:
        self.name = f"executor-{group}-{rank}"
        self.rank = rank
        self.link = link
        self.deaf = 0.0  # share of grammars ordered ahead that nobody answers for
        self.mask_miss = 0.0  # share of masks that come after the forward has ended
        self.is_hung = False  # the device never ends its steps; the process lives
        self.slower = 1.0  # its steps take so many times as long as those of the others
        self.num_errors_due = 0  # steps that will fail on the device
        self.free_at_tokens_ready = False  # a fault: results claim that the step's tail is done
        self.null_rows = self.missed_masks = self.rejected_drafts = 0  # of devices that are gone
        self._capacity = capacity
        self._clock, self._times = clock, times
        self.device = self._new_device()
        self._rendezvous = rendezvous
        self._to_core = to_core
        self._current_epoch = current_epoch
        self._epoch = NO_EPOCH
        self._life = 0  # steps of an earlier life of the stream do not run
        self._queue: deque[_Queued] = deque()
        self._is_running = False
        self._ring: list[bytes] = [b""] * (depth + 1)  # pinned staging buffers
        self._submitted = 0
        self.transfers = SimTransfers(
            clock,
            name=self.name,
            device=lambda: self.device,
            stores=stores,
            truth=truth,
            send=self._send,
            current_epoch=current_epoch,
        )

    def link_down(self) -> None:
        """The session is gone: its steps are abandoned, the weights stay."""
        self._abandon(NO_EPOCH)

    def crash(self) -> None:
        """The process dies; the next one has another device."""
        self._count_out()
        self.is_hung = False
        self.device = self._new_device()
        self._abandon(NO_EPOCH)

    def receive(
        self,
        message: Load
        | SubmitStep
        | Reset
        | StoreBlocks
        | LoadBlocks
        | ReleaseBlocks
        | CompileGrammars,
    ) -> None:
        """An order of the scheduler."""
        match message:
            case Load(engine_epoch=epoch):
                self._abandon(NO_EPOCH)
                life = self._life
                self._clock.at(self._times.load, lambda: self._loaded(life, epoch))
            case Reset(engine_epoch=epoch):
                self._abandon(epoch)
            case SubmitStep():
                if message.engine_epoch == self._epoch:
                    self._submit(message)
            case StoreBlocks() | LoadBlocks():
                if message.engine_epoch == self._epoch:
                    self.transfers.receive(message)
            case ReleaseBlocks():
                if message.engine_epoch == self._epoch:
                    self.transfers.area.release(message.op_ids)
            case CompileGrammars(engine_epoch=epoch, orders=orders):
                for number, grammar in orders:
                    self._compile(epoch, number, grammar)

    def _compile(self, epoch: int, number: int, grammar: Grammar) -> None:
        """Ahead of the steps that need it; or never, and nobody says so."""
        if mix(number, self.rank) % 1000 < 1000 * self.deaf:
            return

        def compiled() -> None:
            masks.compiled.add(grammar.text)
            if masks is self.device.masks:  # else its process has died meanwhile
                self._send(GrammarsCompiled(epoch, self.rank, [number]))

        masks = self.device.masks
        self._clock.at(self._times.compile, compiled)

    def _new_device(self) -> Device:
        clock = self._clock
        masks = MaskWorker(
            self._capacity.vocab_size,
            now=lambda: clock.now,
            fill_ns=self._mask_fill_ns,
            compile_ns=self._times.compile,
        )
        return Device(self._capacity, self.rank, masks=masks)

    def _mask_fill_ns(self) -> int:
        """Hidden behind the forward, or too late for it."""
        draw = self._clock.random
        is_late = draw.random() < self.mask_miss
        return LATE_MASK_NS if is_late else draw.randrange(self._times.step // 2)

    def _count_out(self) -> None:
        self.null_rows += self.device.null_rows
        self.missed_masks += self.device.missed_masks
        self.rejected_drafts += self.device.rejected_drafts

    def _loaded(self, life: int, epoch: int) -> None:
        if life == self._life:
            self._epoch = epoch
            self._send(replace(self._capacity, rank=self.rank, engine_epoch=epoch))

    def _abandon(self, epoch: int) -> None:
        self._epoch = epoch
        self._life += 1
        self._queue.clear()
        self._is_running = False
        self._rendezvous.leave(self.rank)
        self.transfers.abandon()
        self.device.reset()

    # ------------------------------------------------------------ the device stream

    def _submit(self, step: SubmitStep) -> None:
        """Put a step on the device stream, behind what runs already."""
        buffer = self._submitted % len(self._ring)
        self._submitted += 1
        self._ring[buffer] = step.rows
        self.device.receive(step)
        self._queue.append(_Queued(step, buffer, self._clock.now))
        self._start()

    def _start(self) -> None:
        if self._queue and not self._is_running and not self.is_hung:
            self._is_running = True
            queued = self._queue.popleft()
            run = partial(self._body, self._life, queued, self._clock.now)
            self._rendezvous.enter(self.rank, queued.step, self._length_ns(queued.step), run)

    def _length_ns(self, step: SubmitStep) -> int:
        """Of this rank's own work in a step."""
        times, rows = self._times, np.frombuffer(step.rows, ROW)
        device = rows["source"] == _DEVICE
        decode, context = int(rows["q"][device].sum()), int(rows["start_hi"][device].sum())
        prefill = int(rows["q"].sum()) - decode
        if (split := step.descriptor.split) is not None:
            part = (self.rank - split.home - 1) % (len(split.bounds) - 1)
            prefill = split.bounds[part + 1] - split.bounds[part]
        length = times.step + prefill * times.token + decode * times.row
        length += context * times.context // 1000
        length += int(length * times.straggle * self._clock.random.random())
        return int(length * self.slower)

    def _body(
        self, life: int, queued: _Queued, enqueued_ns: int, begin_ns: int, end_ns: int
    ) -> None:
        step = queued.step
        if self.is_hung or life != self._life or step.engine_epoch != self._current_epoch():
            return  # abandoned, even if the news is still on its way: nobody hears its result
        if self.num_errors_due:
            self.num_errors_due -= 1
            self._life += 1  # the context is lost: nothing behind it runs
            self._send(_failed(step, self.rank, self.device.gpu_done))
            return
        result = self.device.body(replace(step, rows=self._ring[queued.buffer]))
        if step.part is not None:
            self._rendezvous.chunks.join(self.device, step, step.part)
        times = StepTimes(queued.received_ns, enqueued_ns, begin_ns, end_ns, end_ns)
        done = step.step_id if self.free_at_tokens_ready else result.gpu_done
        self._send(replace(result, times=times, gpu_done=done))
        self._clock.at(self._times.tail, partial(self._tail, life, step))

    def _tail(self, life: int, step: SubmitStep) -> None:
        is_heard = life == self._life and step.engine_epoch == self._current_epoch()
        if is_heard and not self.is_hung:
            done = self.device.tail()
            self._send(GpuDone(step.engine_epoch, self.rank, self.device.gpu_done, done))
            self._is_running = False
            self._start()

    def _send(self, message: Incoming) -> None:
        self.link.send("back", lambda: self._to_core(self.name, message))


def _failed(step: SubmitStep, rank: int, gpu_done: int) -> StepResult:
    return StepResult(
        engine_epoch=step.engine_epoch,
        step_id=step.step_id,
        rank=rank,
        status=StepStatus.ERROR,
        rows=b"",
        gpu_done=gpu_done,
        error="simulated device fault",
    )
