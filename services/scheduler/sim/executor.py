"""A simulated executor process: one rank's device stream in virtual time, and its faults."""

from collections.abc import Callable

from msgspec.structs import replace

from deepmesh.wire.messages import (
    Capacity,
    Descriptor,
    GpuDone,
    Load,
    Reset,
    StepResult,
    StepStatus,
    SubmitStep,
)

from ..core.events import Incoming
from .clock import Clock, Link, Times
from .device import Device
from .shadow import ShadowError

NO_EPOCH = -1


class Rendezvous:
    """Stands for the collectives: every rank must enter each group step with one descriptor."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[int, Descriptor]] = {}

    def enter(self, rank: int, step: SubmitStep) -> None:
        """Compare at once instead of hanging.

        Raises:
            ShadowError: names both ranks and what each came with.
        """
        key = (step.engine_epoch, step.group_step)
        first, descriptor = self._seen.setdefault(key, (rank, step.descriptor))
        if descriptor != step.descriptor:
            raise ShadowError(
                f"I22 rank {rank} enters group step {step.group_step} with {step.descriptor}, "
                f"rank {first} with {descriptor}"
            )


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
    ) -> None:
        self.name = f"executor-0-{rank}"
        self.rank = rank
        self.device = Device(capacity, rank)
        self.link = link
        self.mask_miss = 0.0
        self.is_hung = False  # the device never ends its steps; the process lives
        self.num_errors_due = 0  # steps that will fail on the device
        self.free_at_tokens_ready = False  # a fault: results claim that the step's tail is done
        self.null_rows = 0
        self._capacity = capacity
        self._clock, self._times = clock, times
        self._rendezvous = rendezvous
        self._to_core = to_core
        self._current_epoch = current_epoch
        self._epoch = NO_EPOCH
        self._life = 0  # steps of an earlier life of the stream do not run
        self._free_at = 0
        self._ring: list[bytes] = [b""] * (depth + 1)  # pinned staging buffers
        self._submitted = 0

    @property
    def is_busy(self) -> bool:
        """A step or its tail runs."""
        return self._free_at > self._clock.now

    def link_down(self) -> None:
        """The session is gone: its steps are abandoned, the weights stay."""
        self._abandon(NO_EPOCH)

    def crash(self) -> None:
        """The process dies; the next one has another device."""
        self.null_rows += self.device.null_rows
        self.is_hung = False
        self.device = Device(self._capacity, self.rank)
        self._abandon(NO_EPOCH)

    def receive(self, message: Load | SubmitStep | Reset) -> None:
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
                    self._queue(message)

    def _loaded(self, life: int, epoch: int) -> None:
        if life == self._life:
            self._epoch = epoch
            self._send(replace(self._capacity, rank=self.rank, engine_epoch=epoch))

    def _abandon(self, epoch: int) -> None:
        self._epoch = epoch
        self._life += 1
        self._free_at = self._clock.now
        self.device.reset()

    def _queue(self, step: SubmitStep) -> None:
        """Put a step on the device stream: body, then tail, behind what runs already."""
        clock, times, life = self._clock, self._times, self._life
        buffer = self._submitted % len(self._ring)
        self._submitted += 1
        self._ring[buffer] = step.rows
        begin = max(clock.now, self._free_at)
        length = times.step + step.descriptor.padded_tokens * times.token
        end = begin + length + clock.random.randrange(length // 4 + 1)
        self._free_at = end + times.tail
        clock.at(end - clock.now, lambda: self._body(life, step, buffer))
        clock.at(self._free_at - clock.now, lambda: self._tail(life, step))

    def _body(self, life: int, step: SubmitStep, buffer: int) -> None:
        if self.is_hung or life != self._life or step.engine_epoch != self._current_epoch():
            return  # abandoned, even if the news is still on its way: nobody hears its result
        self._rendezvous.enter(self.rank, step)
        if self.num_errors_due:
            self.num_errors_due -= 1
            self._life += 1  # the context is lost: nothing behind it runs
            self._send(_failed(step, self.rank, self.device.gpu_done))
            return
        result = self.device.body(
            replace(step, rows=self._ring[buffer]),
            unmasked=lambda _: self._clock.random.random() < self.mask_miss,
        )
        if self.free_at_tokens_ready:
            result = replace(result, gpu_done=step.step_id)
        self._send(result)

    def _tail(self, life: int, step: SubmitStep) -> None:
        is_heard = life == self._life and step.engine_epoch == self._current_epoch()
        if is_heard and not self.is_hung:
            done = self.device.tail()
            self._send(GpuDone(step.engine_epoch, self.rank, self.device.gpu_done, done))

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
