"""The executor of a GPU, on hosts too: the CPU's results, steps launched ahead, failures."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from deepmesh import telemetry
from deepmesh.config import Config, ExecutorConfig, SchedulerConfig
from deepmesh.wire.messages import (
    DoneReason,
    Load,
    Pool,
    RowMode,
    RowSource,
    SamplingParams,
    StepResult,
    StepStatus,
)
from deepmesh.wire.packed import pack_ids
from services.executor.batch import StepBatch
from services.executor.gpu.costs import measure_device_costs
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.engine import GpuEngine
from services.executor.gpu.forwards import ModelForwards
from services.executor.gpu.model import load_device_model
from services.executor.gpu.stream import HostStream, Mark
from services.executor.interface import DeviceLost, Engine, OnProgress
from services.executor.kv_copy import BlockBuffer, BlockCopy, CopyGroup
from services.executor.runner import Model, ModelEngine
from services.executor.service import ExecutorService
from services.executor.stream import StreamExecutor
from tests.contract.executor_host import GREEDY, Host, Request, prompt
from tests.contract.remote_executor import RemoteExecutor
from tests.services.test_executor_service import make_config, order
from tests.tiny import VOCAB_SIZE

MODEL = Path(__file__).parents[2] / "models/tiny"
CONFIG = Config(
    scheduler=SchedulerConfig(max_rows=8, max_model_len=256),
    executor=ExecutorConfig(global_blocks=32, window_blocks=32),
)
HOT = SamplingParams(temperature=0.9, top_p=0.95, top_k=50)
EVEN = range(0, VOCAB_SIZE, 2)
on_each = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class AnyShape(GpuEngine):
    """With the CPU's bits on a GPU, too."""

    def _load_model(self, path: Path, order: Load, on_progress: OnProgress) -> Model:
        return load_device_model(path, order.numerics, self.device, fast=False)


@pytest.fixture
def start() -> Iterator[Callable[[Engine], Host]]:
    """Makes a host of an engine; closes them all."""
    made: list[StreamExecutor] = []

    def begin(engine: Engine) -> Host:
        executor = StreamExecutor(engine)
        made.append(executor)
        order = Load(1, rank=0, ranks=1, model=str(MODEL), numerics="bf16")
        return Host(executor, executor.load(order))

    yield begin
    for executor in made:
        assert executor.close()


def everything(host: Host) -> list[StepResult]:
    """Requests that ask for all kinds of things, prompts in chunks, two steps in flight."""
    penalties = replace(HOT, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.1)
    words = [pack_ids([7]), pack_ids([701, 702])]
    edited = replace(HOT, logit_bias=[(900, 4.0), (901, -2.0)], bad_words=words)
    requests = [
        host.admit(prompt(40), 9, n_logprobs=3),
        host.admit(prompt(21, 1), 12, sampling=penalties, seed=4, n_logprobs=0),
        host.admit(prompt(33, 2), 7, sampling=edited, seed=5, n_logprobs=-1),
        host.admit(prompt(64, 3), 20, sampling=HOT, seed=6, min_len=70, stop_ids=EVEN),
    ]
    init = host.pending_init[0]
    host.pending_init[0] = replace(init, n_prompt_logprobs=2)
    host.run(*requests, chunk=16)
    assert requests[3].done is DoneReason.EOS
    return host.results


@on_each
def test_results_are_those_of_the_cpu(start: Callable[[Engine], Host], device: str) -> None:
    """Step by step and bit for bit: tokens, log-probabilities, what is reported of each row."""
    wanted = everything(start(ModelEngine(CONFIG)))
    found = everything(start(AnyShape(CONFIG, device=device)))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        for name in ("status", "rows", "tokens", "logprobs", "top_ids", "top_logprobs", "prompt"):
            assert getattr(ours, name) == getattr(theirs, name), name


class HeldStream(HostStream):
    """Keeps what is done from being heard of until the test says so."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.marks = threading.Semaphore(0)
        super().__init__(self._hold)

    def _hold(self) -> None:
        assert self.open.wait(60)

    def mark(self) -> Mark:
        self.marks.release()
        return super().mark()


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(
    start: Callable[[Engine], Host],
) -> None:
    alone = start(GpuEngine(CONFIG, device="cpu"))
    expected = alone.admit(prompt(20), 5)
    alone.run(expected, depth=1)
    stream = HeldStream()
    host = start(GpuEngine(CONFIG, device="cpu", stream=stream))
    request = host.admit(prompt(20), 5)
    for _ in range(7):  # two more rows than the request has tokens
        host.submit(host.row(request))
    for _ in range(7):
        assert stream.marks.acquire(timeout=60)
    assert host.executor.poll(0) is None
    stream.open.set()
    results = [host.take() for _ in range(7)]
    assert {result.status for result in results} == {StepStatus.OK}
    assert request.output == expected.output
    assert (request.done, request.num_null) == (DoneReason.LENGTH, 2)


def test_more_steps_than_there_is_memory_for_wait_their_turn(
    start: Callable[[Engine], Host],
) -> None:
    host = start(GpuEngine(CONFIG, device="cpu"))
    request = host.admit(prompt(20), 40)
    host.run(request, depth=40)
    assert len(request.output) == 40


class FailingStream(HostStream):
    """Fails at one of its marks, when somebody waits for it."""

    def __init__(self, at: int) -> None:
        self._left = at
        super().__init__(self._hold)

    def _hold(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("an illegal memory access was encountered")


def test_what_the_device_fails_in_fails_its_step(start: Callable[[Engine], Host]) -> None:
    host = start(GpuEngine(CONFIG, device="cpu", stream=FailingStream(2)))
    request = host.admit(prompt(20), 9)
    for _ in range(4):
        host.submit(host.row(request))
    first, second, third, fourth = (host.take() for _ in range(4))
    assert first.status == StepStatus.OK
    assert second.status == StepStatus.ERROR
    assert "illegal memory access" in second.error
    assert (third.status, fourth.status) == (StepStatus.OK, StepStatus.OK)
    assert (len(request.output), request.num_null) == (1, 3)
    other = host.admit(prompt(20), 3)
    host.run(other)
    assert len(other.output) == 3


class LostStream(HostStream):
    """From one of its marks on nothing works any more."""

    def __init__(self, at: int) -> None:
        self._left = at
        super().__init__(self._hold)

    def _hold(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise RuntimeError("an illegal memory access was encountered")


def test_a_device_that_is_lost_ends_its_process(start: Callable[[Engine], Host]) -> None:
    """Behind the result that says which step it was."""
    host = start(GpuEngine(CONFIG, device="cpu", stream=LostStream(2)))
    request = host.admit(prompt(20), 9)
    for _ in range(2):
        host.submit(host.row(request))
    assert [host.take().status for _ in range(2)] == [StepStatus.OK, StepStatus.ERROR]
    with pytest.raises(DeviceLost, match="illegal memory access"):
        host.executor.poll(60)


def test_the_scheduler_learns_in_which_step_a_device_was_lost(tmp_path: Path) -> None:
    """The service's loop ends with the error, once the result is on its way."""
    config = make_config(tmp_path)
    ended: list[BaseException] = []

    def serve() -> None:
        try:
            service.run()
        except DeviceLost as error:
            ended.append(error)

    def make(on_result: Callable[[], None], on_progress: OnProgress) -> StreamExecutor:
        engine = GpuEngine(config, device="cpu", stream=LostStream(1))
        return StreamExecutor(engine, on_result=on_result, on_progress=on_progress)

    tracer = telemetry.setup("executor", "executor-0-0", config)
    service = ExecutorService(config, make, index=0, rank=0, tracer=tracer)
    thread = threading.Thread(target=serve)
    thread.start()
    with RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        host.submit(host.row(host.admit(prompt(20), 3)))
        result = host.take()
        assert result.status == StepStatus.ERROR
        assert "illegal memory access" in result.error
        thread.join(60)
    assert len(ended) == 1


def test_more_stop_ids_than_a_slot_holds_end_a_request(start: Callable[[Engine], Host]) -> None:
    host = start(GpuEngine(CONFIG, device="cpu"))
    plain = host.admit(prompt(20), 12)
    host.run(plain)
    last = plain.output[5]
    others = [i for i in range(VOCAB_SIZE) if i not in plain.output][:99]
    stopped = host.admit(prompt(20), 12, stop_ids=[*others, last])
    host.run(stopped, depth=3)
    assert stopped.done is DoneReason.EOS
    assert stopped.output == plain.output[: plain.output.index(last) + 1]


class TwoClasses(ModelForwards):
    """As if prompts had kernels of their own: these may compute nothing else."""

    prompt_len = 0

    @property
    def has_two_classes(self) -> bool:
        return True

    def prefill(self, batch: StepBatch, padded: int = 0) -> Tensor:
        assert int(batch.positions.max()) < self.prompt_len
        return super().prefill(batch, padded)


class TwoClassesEngine(GpuEngine):
    forwards = TwoClasses


def test_output_is_computed_again_by_the_kernels_that_made_it(
    start: Callable[[Engine], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows of several tokens, as after a preemption, in a step beside another request."""
    host = start(TwoClassesEngine(CONFIG, device="cpu"))
    assert not host.capacity.one_kernel_class
    monkeypatch.setattr(TwoClasses, "prompt_len", 20)
    whole = host.admit(prompt(20), 12, sampling=HOT, seed=2)
    host.run(whole)
    for known in (1, 2, 7):
        again = host.admit(
            prompt(20) + whole.output[:known], 12, prompt_len=20, sampling=HOT, seed=2
        )
        other = host.admit(prompt(15, 9), 4)
        _recompute(host, again, known, other)
        host.run(again, other)
        assert whole.output[:known] + again.output == whole.output
        assert whole.logprobs[known:] == again.logprobs


def _recompute(host: Host, again: Request, known: int, other: Request) -> None:
    """The prompt first, then what is known of the output in one row."""
    host.submit(host.prefill_row(again, 20))
    host.take()
    request, row = host.prefill_row(again, known)
    row["mode"], row["source"] = RowMode.VERIFY, RowSource.HOST
    host.submit((request, row), host.row(other))
    assert host.take().status == StepStatus.OK, host.results[-1].error


class Timed(ModelForwards):
    """Takes a set time for each row and token, and computes nothing."""

    def decode(self, step: DecodeStep) -> Tensor:
        _spend(1e-3 + 2e-4 * step.num_tokens)
        return self.logits[-1][:1].expand(step.num_tokens, -1)

    def prefill(self, batch: StepBatch, padded: int = 0) -> Tensor:
        _spend(5e-5 * batch.num_tokens)
        return self.logits[-1][:1]


def _spend(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class TimedEngine(GpuEngine):
    forwards = Timed


@pytest.mark.alone
def test_costs_are_those_of_steps_as_they_are_launched(start: Callable[[Engine], Host]) -> None:
    engine = TimedEngine(CONFIG, device="cpu")
    capacity = start(engine).capacity
    costs = measure_device_costs(engine.launch, capacity, max_rows=8)
    assert 0.5e6 < costs.base_ns < 4e6
    assert 1e5 < costs.decode_row_ns < 1e6
    assert 4e4 < costs.prefill_token_ns < 2e5
    assert measure_device_costs(engine.launch, capacity, max_rows=2).base_ns == 0  # too few


@on_each
def test_blocks_leave_and_come_back_beside_steps_in_flight(
    start: Callable[[Engine], Host], device: str
) -> None:
    host = start(GpuEngine(CONFIG, device=device))
    ids = prompt(140)
    whole = host.admit(ids, 6)
    first = host.submit(host.prefill_row(whole, 128))
    host.take()
    host.take_watermark(first)
    held = {pool: whole.tables[pool][:2] for pool in (Pool.GLOBAL, Pool.WINDOW)}
    places = {pool: [host.free[pool].pop() for _ in blocks] for pool, blocks in held.items()}
    sizes = host.capacity.block_bytes
    bytes_of = {
        (pool, i): np.zeros(sizes[pool], np.uint8) for pool in held for i in range(len(held[pool]))
    }

    def copy(blocks: dict[Pool, list[int]], *, to_device: bool) -> None:
        ended = threading.Event()
        items = [BlockBuffer(pool, blocks[pool][i], data) for (pool, i), data in bytes_of.items()]
        order = BlockCopy(
            [CopyGroup(items)],
            to_device=to_device,
            engine_epoch=host.epoch,
            after_step=first,
            on_end=lambda copy: ended.set(),
        )
        host.executor.submit(order)
        assert ended.wait(60)
        assert order.ok

    host.submit(host.row(whole))
    copy(held, to_device=False)
    host.submit(host.row(whole))
    copy(places, to_device=True)
    host.take()
    host.take()
    host.run(whole)
    assert all(data.any() for data in bytes_of.values())
    again = host.admit(ids, 6, start=128, tables=places)
    host.run(again)
    assert (again.output, again.logprobs) == (whole.output, whole.logprobs)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_while_steps_run(start: Callable[[Engine], Host]) -> None:
    """Prompt chunks, decode rows, log-probabilities, requests that come and go."""
    host = start(GpuEngine(CONFIG))
    first = host.admit(prompt(20), 3, sampling=GREEDY)
    host.run(first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(host)
    finally:
        torch.cuda.set_sync_debug_mode("default")
