"""A group of devices, on a host: the answers of one device, failures, experts that move."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from torch import Tensor

from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.experts import pack_places
from deepmesh.wire.messages import (
    ExpertsPlaced,
    Load,
    PlaceExperts,
    RowMode,
    RowSource,
    SamplingParams,
    StepStatus,
)
from deepmesh.wire.packed import ROW
from services.executor.batch import StepBatch
from services.executor.gpu.costs import measure_device_costs
from services.executor.gpu.engine import GpuEngine
from services.executor.gpu.forwards import ModelForwards
from services.executor.gpu.model import DeviceModel
from services.executor.interface import GroupLost
from services.executor.stream import StreamExecutor
from services.scheduler.core.group import decide
from tests.contract.executor_host import Host, Request, prompt

MODEL = Path(__file__).parents[2] / "models/tiny"
HOT = SamplingParams(temperature=0.9, top_p=0.95, top_k=50)
Rows = list[tuple[Request, np.void]]


def config(folder: Path, ranks: int) -> Config:
    return Config(
        mesh=MeshConfig(run_dir=str(folder)),
        scheduler=SchedulerConfig(max_rows=4, max_model_len=192, experts_record_steps=2),
        executor=ExecutorConfig(
            global_blocks=24, window_blocks=24, ranks=ranks, redundant_experts=ranks
        ),
    )


class Ranks:
    """Plays the scheduler of a group: every step goes to all ranks."""

    def __init__(self, folder: Path, ranks: int, engine: type[GpuEngine] = GpuEngine) -> None:
        self.engines = [engine(config(folder, ranks), device="cpu") for _ in range(ranks)]
        self.executors = [StreamExecutor(engine) for engine in self.engines]
        self.pool = ThreadPoolExecutor(ranks)

        def load(rank: int) -> Host:
            order = Load(1, rank=rank, ranks=ranks, model=str(MODEL), numerics="bf16")
            return Host(self.executors[rank], self.executors[rank].load(order), seed=rank)

        self.hosts = list(self.pool.map(load, range(ranks)))

    def begin(self, epoch: int) -> None:
        """All slots are empty from here on."""
        for rank, executor in enumerate(self.executors):
            executor.reset(epoch)
            self.hosts[rank] = Host(executor, self.hosts[rank].capacity, epoch=epoch, seed=rank)

    def submit(self, rows: Sequence[Rows], *, placement: int = 0) -> None:
        packed = [np.array([row for _, row in own], ROW) for own in rows]
        by_decode = [own["mode"] != RowMode.PREFILL for own in packed]
        tokens = [int(own["q"].sum()) for own in packed]
        decode = [int(own["q"][at].sum()) for own, at in zip(packed, by_decode, strict=True)]
        known = [
            int(own["q"][at & (own["source"] == RowSource.HOST)].max(initial=1)) - 1
            for own, at in zip(packed, by_decode, strict=True)
        ]
        agreed = decide(
            [len(own) for own in rows],
            decode,
            [own - part for own, part in zip(tokens, decode, strict=True)],
            [int(at.sum()) for at in by_decode],
            walks=max(known),
        )
        agreed = replace(agreed, placement=placement)
        for host, own in zip(self.hosts, rows, strict=True):
            host.submit(*own, descriptor=agreed)

    def take(self) -> None:
        for host in self.hosts:
            assert host.take().status == StepStatus.OK, host.results[-1].error

    def run(
        self, requests: Sequence[list[Request]], *, chunk: int = 1 << 20, depth: int = 2
    ) -> None:
        """To their ends, each on its rank."""
        in_flight = 0
        while True:
            going = [[one for one in own if not one.done] for own in requests]
            if any(going) and in_flight < depth:
                self.submit(
                    [
                        [host.row(one, chunk) for one in own]
                        for host, own in zip(self.hosts, going, strict=True)
                    ]
                )
                in_flight += 1
            elif in_flight:
                self.take()
                in_flight -= 1
            else:
                return

    def close(self) -> None:
        self.pool.shutdown()
        assert all([executor.close() for executor in self.executors])
        for engine in self.engines:
            engine.leave_group()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Makes groups; closes them all."""
    made: list[Ranks] = []

    def begin(ranks: int, engine: type[GpuEngine] = GpuEngine) -> Ranks:
        made.append(Ranks(tmp_path / f"{len(made)}", ranks, engine))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def ask(host: Host, at: int) -> list[Request]:
    """What rank `at` is asked: prompts of several blocks, one drawn, one of a single id."""
    if at == 2:
        return []  # it works for the others alone
    first = host.admit(prompt(70 - 30 * at, at), 6, n_logprobs=2)
    second = host.admit(prompt(9, 5 + at), 9, sampling=HOT, seed=3, n_logprobs=0)
    return [first, second] if at else [first, second, host.admit(prompt(1, 9), 4, n_logprobs=1)]


def answers(requests: Sequence[Request]) -> list[tuple[list[int], list[float]]]:
    return [(one.output, one.logprobs) for one in requests]


def alone(start: Callable[..., Ranks], at: int) -> list[tuple[list[int], list[float]]]:
    one = start(1)
    requests = ask(one.hosts[0], at)
    one.run([requests], chunk=32)
    return answers(requests)


@pytest.mark.parametrize("ranks", [2, 3])
def test_answers_are_those_of_one_device(start: Callable[..., Ranks], ranks: int) -> None:
    """Also in chunks, with prompts beside rows of other ranks and steps launched ahead."""
    group = start(ranks)
    requests = [ask(host, at) for at, host in enumerate(group.hosts)]
    group.run(requests, chunk=16)
    for at, own in enumerate(requests):
        assert answers(own) == (alone(start, at) if own else [])
    results = group.hosts[0].results
    assert any(len(result.expert_loads) for result in results)
    rows = sum(
        int(np.frombuffer(result.expert_rows, "<u4")[0])
        for host in group.hosts
        for result in host.results
    )
    top_k = group.engines[0].model.config.num_experts_per_tok
    tokens = sum(len(one.prompt) + len(one.output) - 1 for own in requests for one in own)
    assert rows >= tokens * top_k  # and those of rows in flight behind an end


class TwoClasses(ModelForwards):
    """As if prompts had kernels of their own: these may compute nothing else."""

    @property
    def has_two_classes(self) -> bool:
        return True

    def prefill(self, batch: StepBatch, padded: int = 0) -> Tensor:
        assert int(batch.positions.max()) < 20
        return super().prefill(batch, padded)


class TwoClassesEngine(GpuEngine):
    forwards = TwoClasses


def test_output_is_computed_again_token_by_token_on_all_ranks(start: Callable[..., Ranks]) -> None:
    group = start(2, TwoClassesEngine)
    first, second = group.hosts
    whole = first.admit(prompt(20), 12, sampling=HOT, seed=2)
    group.run([[whole], []])
    known = 5
    again = first.admit(prompt(20) + whole.output[:known], 12, prompt_len=20, sampling=HOT, seed=2)
    other = second.admit(prompt(15, 9), 8)
    group.submit([[first.prefill_row(again, 20)], [second.row(other)]])
    group.take()
    request, row = first.prefill_row(again, known)
    row["mode"], row["source"] = RowMode.VERIFY, RowSource.HOST
    group.submit([[(request, row)], [second.row(other)]])
    group.take()
    group.run([[again], [other]])
    assert whole.output[:known] + again.output == whole.output
    assert whole.logprobs[known:] == again.logprobs
    single = start(1)
    expected = single.hosts[0].admit(prompt(15, 9), 8)
    single.run([[expected]])
    assert other.output == expected.output


def test_a_rank_that_is_gone_is_noticed_and_a_new_epoch_goes_on(
    start: Callable[..., Ranks],
) -> None:
    group = start(2)
    requests = [ask(host, at) for at, host in enumerate(group.hosts)]
    group.run(requests, chunk=16)
    expected = [answers(own) for own in requests]
    first = group.hosts[0]
    lost = first.admit(prompt(5), 9)
    first.submit(first.row(lost), descriptor=decide([1, 0], [0, 0], [5, 0], [0, 0]))
    group.executors[0]._patience_s = 0.1  # until it no longer waits for the scheduler's word
    group.engines[1].leave(1)
    group.engines[0].leave(1)
    with pytest.raises(GroupLost, match="given up"):
        first.take()
    group.executors[0]._patience_s = 60
    for epoch in (2, 3):
        group.begin(epoch)
        requests = [ask(host, at) for at, host in enumerate(group.hosts)]
        group.run(requests, chunk=16)
        assert [answers(own) for own in requests] == expected


def test_a_rank_measures_its_steps_before_it_has_met_the_others(
    start: Callable[..., Ranks],
) -> None:
    group = start(2)
    for engine, host in zip(group.engines, group.hosts, strict=True):
        assert engine._group is not None
        assert engine._launcher is not None
        with engine._group.apart():
            costs = measure_device_costs(engine._launcher.launch, host.capacity, max_rows=4)
        assert costs.prefill_token_ns > 0
    requests = [ask(host, at) for at, host in enumerate(group.hosts)]
    group.run(requests, chunk=32)
    for at, own in enumerate(requests):
        assert answers(own) == alone(start, at)


def test_experts_move_between_two_steps(start: Callable[..., Ranks]) -> None:
    """To other ranks, and some of them twice: no bit changes."""
    group = start(2)
    expected = [alone(start, at) for at in range(2)]
    requests = [ask(host, at) for at, host in enumerate(group.hosts)]
    for _ in range(2):
        rows = [[host.row(one, 32) for one in requests[at]] for at, host in enumerate(group.hosts)]
        group.submit(rows)
        group.take()
    model = group.engines[0].model
    assert isinstance(model, DeviceModel)
    draw, layers = np.random.default_rng(4), list[tuple[int, bytes]]()
    for layer, room in enumerate(model.expert_rooms):
        order = draw.permutation(room.spread.num_experts).astype(np.int32)
        places = [np.append(order[at::2], order[1 - at]) for at in range(2)]  # the last: a copy
        assert room.spread.places.shape == (2, len(places[0]))
        layers.append((layer, pack_places(np.stack(places))))
    for executor in group.executors:
        executor.submit(PlaceExperts(1, 7, layers))
        while not isinstance(placed := executor.poll(60), ExpertsPlaced):
            assert placed is not None
        assert not placed.error
    while any(not one.done for own in requests for one in own):
        going = [[one for one in own if not one.done] for own in requests]
        rows = [
            [host.row(one, 32) for one in own] for host, own in zip(group.hosts, going, strict=True)
        ]
        group.submit(rows, placement=7)
        group.take()
    assert [answers(own) for own in requests] == expected
