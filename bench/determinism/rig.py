"""The scheduler's core and executors with the real model in one process, without links."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bench.determinism.jobs import Job
from bench.determinism.outputs import Output
from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Abort,
    CompileGrammars,
    Failed,
    Finished,
    GrammarsCompiled,
    Load,
    PlaceExperts,
    Reset,
    SubmitStep,
    TokenBatch,
)
from services.executor.interface import Engine
from services.executor.stream import StreamExecutor
from services.scheduler.core.events import (
    Event,
    ExecutorDown,
    ExecutorUp,
    Mail,
    Send,
    Tick,
    TokenizerUp,
)
from services.scheduler.core.expert_orders import ExpertsPlanned, PlanExperts, plan_experts
from services.scheduler.core.group import group_step_of
from services.scheduler.core.scheduler import Scheduler

WAIT_S = 120.0  # for any result: whoever waits so long has found a hang
TOKENIZER = "tokenizer-0"
_numbers = itertools.count(1)  # of requests, over all rigs
_epochs = itertools.count(1)

Hook = Callable[["Rig"], None]
MakeStep = Callable[[SubmitStep], SubmitStep]


class Rig:
    """One group of executors under one scheduler, for as many runs as wanted."""

    def __init__(
        self,
        engines: Sequence[Engine],
        config: SchedulerConfig,
        *,
        model: str,
        numerics: str,
        on_step: MakeStep = lambda step: step,
    ) -> None:
        """`on_step` sees each step on its way to the device: planted faults."""
        self.core = Scheduler(
            config,
            name="scheduler-0",
            model=model,
            numerics=numerics,
            ranks=len(engines),
            first_epoch=next(_epochs) << 8,  # engines outlive rigs
        )
        self._engines = list(engines)
        self._on_step = on_step
        self._bell = threading.Semaphore(0)
        # Plans of experts are made beside the steps, as the service does; but the first one is
        # waited for, so that experts move in runs of any length.
        self._planner = ThreadPoolExecutor(1, "plan")
        self._plan: Future[ExpertsPlanned] | None = None
        self._has_planned = False
        self._executors: list[StreamExecutor] = []
        self.outputs: dict[int, Output] = {}  # of this run, by index of the job
        self.num_steps = 0
        self._job_of: dict[bytes, int] = {}
        self._feed(TokenizerUp(TOKENIZER, b"check"))
        for rank in range(len(engines)):
            self._start(rank)

    def close(self) -> None:
        """End the executors; engines keep their weights."""
        self._planner.shutdown(cancel_futures=True)
        for executor in self._executors:
            executor.close()

    def run(
        self, jobs: Sequence[tuple[int, Job]], in_flight: int, hook: Hook = lambda rig: None
    ) -> dict[int, Output]:
        """All jobs, given with their indices, so many at once, in this order.

        `hook` is called whenever results have been applied and no new step has been planned.
        """
        self.outputs, self._job_of = {}, {}
        waiting = list(reversed(jobs))
        last = time.monotonic()  # when a result came
        while waiting or self._num_open:
            while waiting and self._num_open < in_flight:
                self._ask(*waiting.pop())
            self._feed(Tick())
            if self._poll():
                last = time.monotonic()
            elif self._num_open:
                self._wait(last)
            hook(self)
        return self.outputs

    def settle(self) -> None:
        """Take what steps in flight bring, and plan none: requests that ended while a step ran
        have their slots and blocks until then, which the next run may want."""
        group, last = self.core.group, time.monotonic()
        while group.unresolved or group.retiring:
            if self._poll():
                last = time.monotonic()
            else:
                self._wait(last)

    @property
    def num_answered(self) -> int:
        """The number of the latest group step that all ranks have answered."""
        return group_step_of(min(self.core.group.applied))

    @property
    def drafts(self) -> tuple[list[int], list[int]]:
        """Verified and accepted ones so far, by place."""
        return self.core.group.drafts.lists()

    def index_of(self, rid: bytes) -> int:
        """Which job a request is."""
        return self._job_of[rid]

    def abort(self) -> None:
        """The requests that are open end; what they have brought stays."""
        for rid, index in self._job_of.items():
            if self.outputs[index].end is None:
                self._feed(Mail(TOKENIZER, Abort(rid)))

    def lose_executor(self, rank: int, engine: Engine | None = None) -> None:
        """An executor dies with all KV, and another one takes over, on `engine` if it is given."""
        self._executors[rank].close()
        self._feed(ExecutorDown(_peer(rank), rank))
        if engine is not None:
            self._engines[rank] = engine
        self._start(rank)

    # ------------------------------------------------------------ inside

    @property
    def _num_open(self) -> int:
        return sum(output.end is None for output in self.outputs.values())

    def _wait(self, last: float) -> None:
        """For a result, or until a timer of the core may be due; the last one came at `last`."""
        if not self._bell.acquire(timeout=self.core.idle_for()):
            assert time.monotonic() - last < WAIT_S, "no result: the device hangs"

    def _ask(self, index: int, job: Job) -> None:
        message = job.message(next(_numbers))
        self.outputs[index], self._job_of[message.rid] = Output(), index
        self._feed(Mail(TOKENIZER, message))

    def _start(self, rank: int) -> None:
        executor = StreamExecutor(self._engines[rank], on_result=self._bell.release)
        if rank < len(self._executors):
            self._executors[rank] = executor
        else:
            self._executors.append(executor)
        self._feed(ExecutorUp(_peer(rank), rank))

    def _poll(self) -> bool:
        """Feed the results that are there; whether there were any."""
        found = False
        if self._plan is not None and self._plan.done():
            planned, self._plan = self._plan.result(), None
            self._feed(planned)
        for rank, executor in enumerate(self._executors):
            while (result := executor.poll(0.0)) is not None:
                found = True
                self._feed(Mail(_peer(rank), result))
        return found

    def _feed(self, event: Event) -> None:
        for action in self.core.handle(event, time.time_ns()):
            if isinstance(action, Send):
                self._carry(action)
            elif isinstance(action, PlanExperts) and not self._has_planned:
                self._has_planned = True
                self._feed(plan_experts(action))
            elif isinstance(action, PlanExperts):
                self._plan = self._planner.submit(plan_experts, action)
                self._plan.add_done_callback(lambda plan: self._bell.release())

    def _carry(self, send: Send) -> None:
        match send.message:
            case SubmitStep() as step:
                self.num_steps += 1
                self._executors[_rank(send.peer)].submit(self._on_step(step))
            case Load() as order:
                rank = _rank(send.peer)
                self._feed(Mail(send.peer, self._executors[rank].load(order)))
            case PlaceExperts() as place:
                self._executors[_rank(send.peer)].submit(place)
            case Reset(engine_epoch=epoch):
                self._executors[_rank(send.peer)].reset(epoch)
            case CompileGrammars(
                engine_epoch=epoch, orders=orders
            ):  # the step that needs one waits
                numbers = [number for number, _ in orders]
                done = GrammarsCompiled(epoch, _rank(send.peer), numbers)
                self._feed(Mail(send.peer, done))
                self._bell.release()  # what waited for it may be planned now
            case TokenBatch(rows=rows):
                for row in rows:
                    self.outputs[self._job_of[row.rid]].take(row)
            case Finished(rid=rid) | Failed(rid=rid) as end:
                self.outputs[self._job_of[rid]].end = end
            case _:
                pass  # Accepted; there is no kvstore to talk to


def _peer(rank: int) -> str:
    return f"executor-0-{rank}"


def _rank(peer: str) -> int:
    return int(peer.rsplit("-", 1)[1])
