"""Membership in the EP group of an engine epoch: who waits, who gives up, who starts anew."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from deepmesh import telemetry
from deepmesh.config import Config, ExecutorConfig, MeshConfig
from deepmesh.wire.messages import (
    Descriptor,
    Load,
    RowMode,
    StepKind,
    StepResult,
    StepStatus,
    SubmitStep,
)
from deepmesh.wire.packed import ROW
from services.executor.fake import FakeEngine
from services.executor.interface import GroupLost, LiveRows, OnProgress, Sampled
from services.executor.parallel import ExpertGroup
from services.executor.rendezvous import FileRendezvous, Rendezvous, TcpRendezvous
from services.executor.service import ExecutorService
from services.executor.slots import SlotTable
from services.executor.stream import StreamExecutor
from tests.contract.remote_executor import RemoteExecutor

MODEL = Path(__file__).parents[2] / "models" / "tiny"
OWNERS = torch.tensor([0, 0, 1, 1])
Meet = Callable[[int, int], Rendezvous]  # rank, ranks


def step(epoch: int, number: int, *, tokens: int = 4) -> SubmitStep:
    descriptor = Descriptor(StepKind.DECODE, padded_tokens=tokens, padded_rows=tokens)
    return SubmitStep(epoch, (epoch << 32) + number, number, 1, descriptor, b"")


def compute(group: ExpertGroup, order: SubmitStep, *, num_tokens: int = 2) -> Tensor:
    """What a model of one layer would do."""
    group.enter(order)
    x = torch.full((num_tokens, 4), float(group.rank + 1))
    ids = torch.tensor([[1, 2]]).expand(num_tokens, 2).contiguous()
    here = group.dispatch(x, ids, torch.ones(num_tokens, 2), OWNERS)
    return group.combine(here.x.unsqueeze(1) * (here.expert_ids.unsqueeze(2) + 1))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(params=["file", "tcp"])
def meet(request: pytest.FixtureRequest, tmp_path: Path) -> Meet:
    if request.param == "file":
        return lambda rank, ranks: FileRendezvous(tmp_path / "g/group-0", rank=rank, ranks=ranks)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return lambda rank, ranks: TcpRendezvous("127.0.0.1", port, rank=rank, ranks=ranks)


@pytest.fixture
def groups(meet: Meet) -> Iterator[list[ExpertGroup]]:
    groups = [ExpertGroup(meet(rank, 2), patience_s=30) for rank in range(2)]
    for group in groups:
        group.begin_epoch(5)
    yield groups
    for group in groups:
        group.begin_epoch(-1)


def both(pool: ThreadPoolExecutor, groups: list[ExpertGroup], order: SubmitStep) -> None:
    outs = list(pool.map(lambda group: compute(group, order), groups))
    for group, out in zip(groups, outs, strict=True):
        assert torch.equal(out, torch.full((2, 4), (group.rank + 1) * 5.0))


def waiting(pool: ThreadPoolExecutor, group: ExpertGroup, order: SubmitStep) -> "Future[Tensor]":
    """A step of one rank whose peer does not come."""
    future = pool.submit(compute, group, order)
    assert not wait([future], timeout=0.3).done
    return future


def test_steps_run_in_the_group_of_their_epoch(
    pool: ThreadPoolExecutor, groups: list[ExpertGroup], tmp_path: Path
) -> None:
    for epoch in (5, 6, 9):
        for group in groups:
            group.begin_epoch(epoch)
        for number in range(1, 4):
            both(pool, groups, step(epoch, number))
    assert not list(tmp_path.glob("g/*"))


def test_a_rank_measures_itself_without_the_others(groups: list[ExpertGroup]) -> None:
    first = groups[0]
    with first.apart():
        x = torch.ones(2, 4)
        here = first.dispatch(x, torch.tensor([[1, 2]] * 2), torch.ones(2, 2), OWNERS)
        assert here.x.shape == (4, 4)  # as much as two ranks send
        assert torch.equal(first.combine(here.x.unsqueeze(1).expand(-1, 2, -1)), 2 * x)
    with pytest.raises(AssertionError, match="no group step"):
        first.dispatch(x, torch.tensor([[1, 2]] * 2), torch.ones(2, 2), OWNERS)


def test_a_step_of_another_epoch_is_refused_without_waiting(groups: list[ExpertGroup]) -> None:
    for epoch in (4, 6):
        with pytest.raises(GroupLost, match=f"epoch {epoch} is over"):
            compute(groups[0], step(epoch, 1))


def test_a_new_epoch_ends_the_wait_for_a_peer_that_never_came(
    pool: ThreadPoolExecutor, groups: list[ExpertGroup]
) -> None:
    lost = waiting(pool, groups[0], step(5, 1))
    for group in groups:
        group.begin_epoch(6)
    with pytest.raises(GroupLost, match="given up"):
        lost.result(2)
    both(pool, groups, step(6, 1))


def test_a_new_epoch_ends_the_wait_for_a_peer_that_hangs(
    pool: ThreadPoolExecutor, groups: list[ExpertGroup]
) -> None:
    both(pool, groups, step(5, 1))
    lost = waiting(pool, groups[0], step(5, 2))
    groups[0].begin_epoch(6)
    with pytest.raises(GroupLost):
        lost.result(2)
    groups[1].begin_epoch(6)
    both(pool, groups, step(6, 1))


def test_a_rank_whose_step_failed_leaves_and_its_peer_notices(
    pool: ThreadPoolExecutor, groups: list[ExpertGroup]
) -> None:
    both(pool, groups, step(5, 1))
    lost = waiting(pool, groups[0], step(5, 2))
    groups[1].leave(5)
    for future in (lost, pool.submit(compute, groups[1], step(5, 3))):
        with pytest.raises(GroupLost):
            future.result(5)
    with pytest.raises(GroupLost):  # also the steps that were queued behind
        compute(groups[0], step(5, 3))
    for group in groups:
        group.leave(4)  # of an older step: too late to matter
        group.begin_epoch(6)
    both(pool, groups, step(6, 1))


def test_ranks_at_different_steps_do_not_mix(
    pool: ThreadPoolExecutor, groups: list[ExpertGroup]
) -> None:
    both(pool, groups, step(5, 1))
    futures = [pool.submit(compute, g, step(5, 2 + g.rank)) for g in groups]
    for future in futures:
        with pytest.raises(GroupLost):
            future.result(5)


def test_a_process_that_comes_back_joins_the_next_epoch(
    pool: ThreadPoolExecutor, groups: list[ExpertGroup], meet: Meet
) -> None:
    both(pool, groups, step(5, 1))
    for reborn, epoch in ((1, 6), (0, 7)):
        groups[reborn].begin_epoch(-1)
        groups[reborn] = ExpertGroup(meet(reborn, 2), patience_s=30)
        for group in groups:
            group.begin_epoch(epoch)
        both(pool, groups, step(epoch, 1))


def test_waiting_has_an_end(tmp_path: Path) -> None:
    group = ExpertGroup(FileRendezvous(tmp_path / "g", rank=0, ranks=2), patience_s=0.2)
    group.begin_epoch(1)
    with pytest.raises(GroupLost, match=r"2 ranks, 0\.2 s: not all came"):
        compute(group, step(1, 1))


def test_no_thread_is_left_behind(pool: ThreadPoolExecutor, groups: list[ExpertGroup]) -> None:
    both(pool, groups, step(5, 1))
    for group in groups:
        group.begin_epoch(-1)
    for thread in threading.enumerate():
        if thread.name.startswith("group-"):
            thread.join(10)
            assert not thread.is_alive()


# ------------------------------------------------------------ the executor around it


class LonelyEngine(FakeEngine):
    """Its peers are gone until the next epoch begins."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.good_epoch = 2
        self.epochs: list[int] = []
        self.left: list[int] = []

    def begin_epoch(self, engine_epoch: int) -> None:
        self.epochs.append(engine_epoch)

    def leave(self, engine_epoch: int) -> None:
        self.left.append(engine_epoch)

    def compute(self, live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
        if step.engine_epoch < self.good_epoch:
            raise GroupLost("rank 1 is gone")
        return super().compute(live, slots, step)


@pytest.fixture
def engine(tmp_path: Path) -> LonelyEngine:
    return LonelyEngine(
        Config(
            mesh=MeshConfig(run_dir=str(tmp_path), model=str(MODEL)),
            executor=ExecutorConfig(kind="fake", global_blocks=64, window_blocks=64, slots=8),
        )
    )


def order(epoch: int, ranks: int = 2) -> Load:
    return Load(epoch, rank=0, ranks=ranks, model=str(MODEL))


def dummy(epoch: int, number: int) -> SubmitStep:
    row = np.zeros(1, ROW)
    row["mode"], row["slot"] = RowMode.DUMMY, 0xFFFFFFFF
    return msgspec.structs.replace(step(epoch, number), rows=row.tobytes())


def test_a_rank_without_rows_takes_part(engine: LonelyEngine) -> None:
    executor = StreamExecutor(engine)
    engine.good_epoch = 0
    executor.load(order(1))
    executor.submit(dummy(1, 1))
    result = executor.poll(10)
    assert isinstance(result, StepResult)
    assert result.status == StepStatus.OK
    executor.close()


def test_a_lost_group_is_silent_until_a_new_epoch_begins(engine: LonelyEngine) -> None:
    executor = StreamExecutor(engine, patience_s=60)
    executor.load(order(1))
    assert engine.epochs == [-1, 1]
    for number in (1, 2):
        executor.submit(dummy(1, number))
    assert executor.poll(0.2) is None
    executor.reset(2)
    assert executor.poll(0) is None
    executor.submit(dummy(2, 3))
    result = executor.poll(10)
    assert isinstance(result, StepResult)
    assert (result.engine_epoch, result.status) == (2, StepStatus.OK)
    executor.close()


def test_if_none_begins_the_session_has_to_end(engine: LonelyEngine) -> None:
    woken = threading.Event()
    executor = StreamExecutor(engine, on_result=woken.set, patience_s=0.05)
    executor.load(order(1))
    executor.submit(dummy(1, 1))
    assert woken.wait(10)
    for _ in range(2):
        with pytest.raises(GroupLost, match="rank 1 is gone"):
            executor.poll(0)
    executor.reset(2)
    assert executor.poll(0) is None
    executor.close()


def test_closing_does_not_wait_for_a_new_epoch(engine: LonelyEngine) -> None:
    executor = StreamExecutor(engine, patience_s=60)
    executor.load(order(1))
    executor.submit(dummy(1, 1))
    assert executor.poll(0.1) is None
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 5


def test_a_rank_whose_step_fails_leaves_the_group(engine: LonelyEngine) -> None:
    executor = StreamExecutor(engine)
    engine.good_epoch = 0
    executor.load(order(1))
    row = np.zeros(1, ROW)
    row["mode"], row["slot"], row["q"] = RowMode.DECODE, 3, 1  # nobody is in that slot
    executor.submit(msgspec.structs.replace(step(1, 1), rows=row.tobytes()))
    result = executor.poll(10)
    assert isinstance(result, StepResult)
    assert result.status == StepStatus.ERROR
    assert engine.left == [1]
    executor.close()


def test_the_service_dials_again_when_a_group_stays_lost(
    engine: LonelyEngine, tmp_path: Path
) -> None:
    config = Config(mesh=MeshConfig(run_dir=str(tmp_path), model=str(MODEL)))

    def make(on_result: Callable[[], None], on_progress: OnProgress) -> StreamExecutor:
        return StreamExecutor(engine, on_result=on_result, on_progress=on_progress, patience_s=0.05)

    tracer = telemetry.setup("executor", "executor-0-0", config)
    service = ExecutorService(config, make, index=0, rank=0, tracer=tracer)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        with RemoteExecutor(config) as remote:
            remote.load(order(1))
            remote.submit(dummy(1, 1))
            remote.wait_connected(times=2)
            assert service.counters["lost_groups"] == 1
            remote.load(order(2))
            remote.submit(dummy(2, 1))
            result = remote.poll(20)
            assert isinstance(result, StepResult)
            assert result.status == StepStatus.OK
    finally:
        service.stop()
        thread.join(20)
