"""Experts anywhere, copies of them, and moves between two steps: never another bit."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from deepmesh.experts import EMPTY, Places, first_places, pack_places
from deepmesh.wire.messages import ExpertsPlaced, PlaceExperts
from kernels.comm.gloo import GlooExchange
from kernels.quant.linear import LinearWeight
from services.executor.batch import StepBatch
from services.executor.eplb import ExpertMover, HostRoom
from services.executor.interface import GroupLost
from services.executor.models.spread import SpreadExperts
from services.executor.weights import ExpertReader, load_model, load_weights
from tests.model.driving import (
    FIXTURE,
    Request,
    alone,
    cache_for,
    fixture_model,
    random_ids,
    same_bits,
)

REDUNDANT = 5
CAPACITY = 80
LAYERS = len(fixture_model("bf16").weights.layers)
EXPERTS = fixture_model("bf16").config.n_routed_experts


def any_places(ranks: int, slots: int, draw: np.random.Generator) -> Places:
    """Every expert somewhere, copies on other ranks, a few slots empty."""
    places = np.full((ranks, slots), EMPTY, np.int32)
    flat = draw.permutation(ranks * slots)
    places.flat[flat[:EXPERTS]] = draw.permutation(EXPERTS)
    for at in flat[EXPERTS : ranks * slots - 1]:
        others = np.setdiff1d(np.arange(EXPERTS), places[at // slots])
        places.flat[at] = draw.choice(others)
    return places


# ------------------------------------------------------------ bits


def moving(ranks: int, numerics: str, lengths: list[int], seed: int) -> list[list[Tensor]]:
    """Each rank computes one prompt a round; in between all experts are placed anew."""
    store, draw = HashStore(), np.random.default_rng(seed)
    slots = -(-(EXPERTS + REDUNDANT) // ranks)
    orders = [
        PlaceExperts(
            1,
            number,
            [(layer, pack_places(any_places(ranks, slots, draw))) for layer in range(LAYERS)],
            base=number - 1,
        )
        for number in range(1, len(lengths))
    ]

    def run(rank: int) -> list[Tensor]:
        torch.set_num_threads(1)
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        group = dist.ProcessGroupGloo(store, rank, ranks, options)
        exchange = GlooExchange(group, threading.Event(), patience_s=30)
        model = load_model(
            FIXTURE, numerics, rank=rank, ranks=ranks, exchange=exchange, redundant=REDUNDANT
        )
        moes = [layer.moe for layer in model.weights.layers]
        rooms, reader = [HostRoom(moe) for moe in moes], ExpertReader(FIXTURE, model.config)
        mover = ExpertMover(rooms, reader, rank)
        reports, out = list[ExpertsPlaced](), list[Tensor]()
        for number, length in enumerate(lengths):
            if number:
                mover.order(orders[number - 1], reports.append)
                mover.apply(number)
            exchange.begin(number, CAPACITY)
            blocks = range(-(-length // 64))
            cache = cache_for(model, len(blocks), len(blocks), 1)
            ids = random_ids(length, 100 * rank + number)
            batch = StepBatch.build([Request(ids, blocks, blocks, 0).row(length)])
            out.append(model.forward(batch, cache).logits)
        mover.close()
        assert [report.error for report in reports] == [""] * len(orders)
        del group
        exchange.close()
        return out

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize(("ranks", "numerics"), [(2, "bf16"), (3, "fp32"), (4, "bf16")])
def test_a_move_between_two_steps_changes_no_bit(ranks: int, numerics: str) -> None:
    lengths = [9, 70, 1, 33]
    got = moving(ranks, numerics, lengths, seed=ranks)
    for rank, outputs in enumerate(got):
        for number, (length, logits) in enumerate(zip(lengths, outputs, strict=True)):
            wanted = alone(fixture_model(numerics), random_ids(length, 100 * rank + number))
            assert same_bits(logits, wanted.logits), (rank, number)


# ------------------------------------------------------------ shares and counts


def test_copies_get_equal_shares_of_the_rows_and_all_are_counted() -> None:
    places = np.array([[0, 1, 2], [0, 3, EMPTY], [4, 0, 1]], np.int32)
    ids = torch.tensor([[0, 1, 3], [0, 1, 4], [0, 2, 3], [0, 1, 2], [0, 1, 4], [0, 3, 4]])
    for rank in range(3):
        spread = SpreadExperts(places, rank, 5)
        slots = spread.choose(ids)
        assert torch.equal(torch.from_numpy(places.reshape(-1).copy())[slots].long(), ids)
        shares = Counter(slots.flatten().tolist())
        assert [shares[slot] for slot in (0, 3, 7)] == [2, 2, 2]
        assert sorted(shares[slot] for slot in (1, 8)) == [2, 2]
        assert spread.counts.tolist() == [6, 4, 2, 3, 3]
        spread.arrived(slots)
        assert spread.rows == int((spread.owners[slots] == rank).sum())


def test_odd_rows_of_the_ranks_go_to_different_copies() -> None:
    places = np.array([[0, 1], [0, 2]], np.int32)
    one = torch.tensor([[0]])
    assert {int(SpreadExperts(places, rank, 3).choose(one)) for rank in range(2)} == {0, 2}


# ------------------------------------------------------------ the mover


class Slow(ExpertReader):
    """Reads when the test lets it, or fails."""

    def __init__(self) -> None:
        super().__init__(FIXTURE, fixture_model("bf16").config)
        self.go, self.error, self.reads = threading.Event(), "", 0
        self.go.set()

    def read(self, layer: int, expert: int) -> tuple[LinearWeight, LinearWeight]:
        self.go.wait(20)
        self.reads += 1
        if self.error:
            raise OSError(self.error)
        return super().read(layer, expert)


class Rank:
    """Rank 0 of two, with a mover and what it reported."""

    def __init__(self) -> None:
        weights = load_weights(
            FIXTURE, fixture_model("bf16").config, rank=0, ranks=2, redundant=REDUNDANT
        )
        self.moes = [layer.moe for layer in weights.layers]
        self.reader = Slow()
        self.mover = ExpertMover([HostRoom(moe) for moe in self.moes], self.reader, 0)
        self.reports: list[ExpertsPlaced] = []
        self.came = threading.Semaphore(0)

    def report(self, placed: ExpertsPlaced) -> None:
        self.reports.append(placed)
        self.came.release()

    def order(self, number: int, base: int, change: Callable[[Places], None]) -> Places:
        """A placement of layer 1: the present one, changed."""
        places = self.moes[1].spread.places.copy()
        change(places)
        message = PlaceExperts(1, number, [(1, pack_places(places))], base=base)
        self.mover.order(message, self.report)
        return places

    def held(self, slot: int) -> int:
        """Which expert's weights lie in a slot of layer 1."""
        whole = load_weights(FIXTURE, fixture_model("bf16").config).layers[1].moe
        (found,) = (
            expert
            for expert in range(EXPERTS)
            if torch.equal(whole.w13.data[expert], self.moes[1].w13.data[slot])
            and torch.equal(whole.w2.data[expert], self.moes[1].w2.data[slot])
        )
        return found


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.reader.go.set()
    rank.mover.close()


def put(*slots: tuple[int, int, int]) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        for owner, slot, expert in slots:
            places[owner, slot] = expert

    return change


def test_weights_are_as_before_until_a_step_brings_the_placement(rank: Rank) -> None:
    before = [rank.held(slot) for slot in range(8)]
    places = rank.order(7, 0, put((0, 8, 12), (1, 8, 0)))
    assert rank.came.acquire(timeout=20)
    assert rank.reader.reads == 1, "only what this rank lacks"
    assert rank.moes[1].spread.places[0, 8] == EMPTY
    rank.mover.apply(7)
    rank.mover.apply(7)
    assert (rank.moes[1].spread.places == places).all()
    assert [rank.held(slot) for slot in range(8)] == before
    assert rank.held(8) == 12


def test_placements_build_on_one_another_and_leave_out_what_was_given_up(rank: Rank) -> None:
    rank.order(1, 0, put((0, 8, 12)))
    assert rank.came.acquire(timeout=20)
    rank.order(2, 0, put((0, 9, 13)))  # 1 was given up elsewhere
    assert rank.came.acquire(timeout=20)
    places = rank.moes[1].spread.places.copy()
    places[0, 8:10] = 12, 13
    message = PlaceExperts(1, 3, [(1, pack_places(places))], base=2)  # no step has brought 2 yet
    rank.mover.order(message, rank.report)
    assert rank.came.acquire(timeout=20)
    assert rank.reader.reads == 3
    rank.mover.apply(3)
    assert (rank.held(8), rank.held(9)) == (12, 13)
    with pytest.raises(GroupLost, match="placement 1 is not known"):
        rank.mover.apply(1)


def test_a_new_epoch_ends_the_wait_for_experts(rank: Rank) -> None:
    rank.reader.go.clear()
    rank.order(1, 0, put((0, 8, 12)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rank.mover.apply, 1)
        rank.mover.cancel()
        with pytest.raises(GroupLost):
            waiting.result(20)
    rank.reader.go.set()
    rank.order(2, 0, put((0, 8, 13)))
    assert rank.came.acquire(timeout=20)
    assert [report.number for report in rank.reports] == [2], "what is cancelled is not reported"
    rank.mover.apply(2)
    assert rank.held(8) == 13


def test_what_cannot_be_read_is_said_and_changes_nothing(rank: Rank) -> None:
    rank.reader.error = "no such disk"
    rank.order(1, 0, put((0, 8, 12)))
    assert rank.came.acquire(timeout=20)
    assert rank.reports == [ExpertsPlaced(1, 0, 1, "OSError: no such disk")]
    with pytest.raises(GroupLost):
        rank.mover.apply(1)
    wrong = pack_places(first_places(EXPERTS, 2, 8))
    rank.mover.order(PlaceExperts(1, 2, [(1, wrong)]), rank.report)
    assert rank.came.acquire(timeout=20)
    assert "(2, 8), not (2, 11)" in rank.reports[1].error
