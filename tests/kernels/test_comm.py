"""Dispatch and combine over ranks: the bits of one rank, whatever the split; no rank hangs."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store

from kernels.comm.comm import Alone, Exchange, ExchangeError, Loopback
from kernels.comm.gloo import GlooExchange
from kernels.comm.routes import plan_routes, slots_back
from kernels.moe.experts import combine_slots

HIDDEN, TOP_K, NUM_EXPERTS = 8, 3, 10
T = TypeVar("T")


def join(store: Store, rank: int, ranks: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=20)
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def on_every_rank(ranks: int, action: Callable[[GlooExchange], T], patience_s: float = 20) -> list:
    """Run `action` on a thread per rank, each with an exchange of its own."""
    store = HashStore()

    def run(rank: int) -> T:
        group = join(store, rank, ranks)
        exchange = GlooExchange(group, threading.Event(), patience_s=patience_s)
        try:
            return action(exchange)
        finally:
            exchange.close()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def tokens(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, expert ids and weights, of magnitudes so different that the order of sums shows."""
    random = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-4, 5, (count, 1), generator=random)
    ids = torch.rand(count, NUM_EXPERTS, generator=random).argsort(1)[:, :TOP_K]
    x = torch.randn(count, HIDDEN, generator=random) * scale
    return x, ids.sort(1).values, torch.rand(count, TOP_K, generator=random)


def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Slots of all experts, also of those that are not "here": combine must not use them."""
    factor = torch.sin(ids.float() * 7) * 10.0 ** (ids % 5).float()
    return x.unsqueeze(1) * (weights * factor).unsqueeze(2)


def moe(exchange: Exchange, owners: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    here = exchange.dispatch(x, ids, weights, owners)
    slots = experts(here.x, here.expert_ids, here.weights)
    if isinstance(exchange, GlooExchange):
        slots[owners[here.expert_ids] != exchange.rank] = float("nan")
    return exchange.combine(slots)


def split(ranks: int) -> Tensor:
    return torch.arange(NUM_EXPERTS) * ranks // NUM_EXPERTS


@pytest.mark.parametrize("counts", [(5, 5), (40, 1), (0, 7), (3, 0, 17), (0, 0, 1), (9, 2, 0, 4)])
def test_bits_are_those_of_one_rank(counts: tuple[int, ...]) -> None:
    owners, ranks = split(len(counts)), len(counts)

    def run(exchange: GlooExchange) -> list[Tensor]:
        outs: list[Tensor] = []
        for step in range(3):
            exchange.begin(step, max(counts))
            for layer in range(4):
                own = tokens(100 * step + 10 * layer + exchange.rank, counts[exchange.rank])
                outs.append(moe(exchange, owners, *own))
        return outs

    for rank, outs in enumerate(on_every_rank(ranks, run)):
        for at, out in enumerate(outs):
            own = tokens(100 * (at // 4) + 10 * (at % 4) + rank, counts[rank])
            assert torch.equal(out, moe(Alone(), owners, *own)), (rank, at)
            assert torch.equal(out, combine_slots(experts(*own)))


def test_a_batch_may_be_spread_over_the_ranks_in_any_way() -> None:
    x, ids, weights = tokens(1, 24)
    expected = moe(Alone(), split(1), x, ids, weights)
    # one rank holds nothing, experts lie anywhere: the order of the sum is that of their ids
    owners = torch.tensor([2, 0, 2, 2, 0, 0, 2, 0, 2, 0])
    for bounds in ([0, 24, 24, 24], [0, 1, 13, 24], [0, 0, 0, 24]):

        def run(exchange: GlooExchange, bounds: list[int] = bounds) -> Tensor:
            exchange.begin(7, 24)
            part = slice(bounds[exchange.rank], bounds[exchange.rank + 1])
            return moe(exchange, owners, x[part], ids[part], weights[part])

        assert torch.equal(torch.cat(on_every_rank(3, run)), expected)


def test_what_is_not_a_number_comes_back_as_such() -> None:
    x, ids, weights = tokens(1, 4)
    x[1], weights[2] = float("nan"), float("inf")

    def run(exchange: GlooExchange) -> Tensor:
        exchange.begin(1, 4)
        return moe(exchange, split(2), x, ids, weights)

    expected = moe(Alone(), split(1), x, ids, weights)
    for out in on_every_rank(2, run):
        assert torch.equal(out.isfinite(), expected.isfinite())
        assert torch.equal(out[[0, 3]], expected[[0, 3]])


def test_work_of_our_own_runs_while_tokens_travel() -> None:
    """Rank 1 comes to its exchange only when rank 0 is at that work: it waits for nobody before."""
    working = threading.Event()

    def run(exchange: GlooExchange) -> Tensor:
        exchange.begin(1, 4)
        own = tokens(exchange.rank, 4)
        if exchange.rank == 1:
            assert working.wait(20)
        here = exchange.dispatch(*own, split(2), working.set)
        return exchange.combine(experts(here.x, here.expert_ids, here.weights))

    for rank, out in enumerate(on_every_rank(2, run)):
        assert torch.equal(out, moe(Alone(), split(1), *tokens(rank, 4)))


def test_a_failure_of_our_own_work_is_not_the_groups() -> None:
    def run(exchange: GlooExchange) -> None:
        exchange.begin(1, 4)

        def work() -> None:
            raise RuntimeError("of our own")

        with pytest.raises(RuntimeError, match="of our own") as error:
            exchange.dispatch(*tokens(exchange.rank, 4), split(2), work)
        assert not isinstance(error.value, ExchangeError)

    on_every_rank(2, run)


def test_bytes_are_swapped_between_all_ranks() -> None:
    def content(giver: int, taker: int) -> Tensor:
        return torch.full((3 * giver + taker,), 10 * giver + taker, dtype=torch.uint8)

    def run(exchange: GlooExchange) -> bool:
        rank = exchange.rank
        sent = [content(rank, taker) for taker in range(3)]
        got = exchange.swap(sent, [len(content(giver, rank)) for giver in range(3)])
        return all(torch.equal(part, content(giver, rank)) for giver, part in enumerate(got))

    assert on_every_rank(3, run) == [True] * 3


def test_a_rank_that_measures_itself_gets_its_own_tokens_from_everybody() -> None:
    loopback, own = Loopback(3), tokens(2, 5)
    here = loopback.dispatch(*own, split(3))
    assert here.x.shape == (15, HIDDEN)
    for part, arrived in zip(own, (here.x, here.expert_ids, here.weights), strict=True):
        assert torch.equal(arrived, part.repeat(3, 1))
    slots = experts(here.x, here.expert_ids, here.weights)
    slots[5:] = float("nan")
    assert torch.equal(loopback.combine(slots), moe(Alone(), split(1), *own))


def test_routes_of_one_rank_and_the_way_back_agree() -> None:
    owners = split(3)
    batches = [tokens(rank, count)[1] for rank, count in enumerate((6, 0, 11))]
    routes = [plan_routes(ids, owners, 3) for ids in batches]
    for rank in range(3):
        arrived = torch.cat(
            [ids[r.tokens[r.ranks == rank]] for ids, r in zip(batches, routes, strict=True)]
        )
        num_from = [r.num_sent[rank] for r in routes]
        mask, counts = slots_back(arrived, owners, rank, num_from)
        assert counts == [r.num_slots[rank] for r in routes]
        expected = torch.cat(
            [
                ids[r.slot_tokens, r.slots].split(r.num_slots)[rank]
                for ids, r in zip(batches, routes, strict=True)
            ]
        )
        assert torch.equal(arrived[mask], expected)


@pytest.mark.parametrize("what", ["step", "exchange"])
def test_a_rank_that_is_elsewhere_is_found_out(what: str) -> None:
    def run(exchange: GlooExchange) -> str:
        ahead = exchange.rank == 1
        exchange.begin(2 if ahead and what == "step" else 1, 4)
        if ahead and what == "exchange":
            exchange._number = 3
        with pytest.raises(ExchangeError, match="is at exchange") as error:
            moe(exchange, split(2), *tokens(0, 2))
        return str(error.value)

    on_every_rank(2, run)


def test_more_tokens_than_the_capacity_are_a_bug() -> None:
    def run(exchange: GlooExchange) -> None:
        exchange.begin(1, 2)
        with pytest.raises(AssertionError, match="3 tokens, capacity 2"):
            moe(exchange, split(1), *tokens(0, 3))

    on_every_rank(1, run)


def test_a_silent_peer_is_waited_for_no_longer_than_told() -> None:
    late = threading.Event()

    def run(exchange: GlooExchange) -> None:
        exchange.begin(1, 2)
        if exchange.rank == 1:
            late.wait(20)
            return
        try:
            with pytest.raises(ExchangeError):
                moe(exchange, split(2), *tokens(0, 2))
        finally:
            late.set()

    began = time.monotonic()
    on_every_rank(2, run, patience_s=0.5)
    assert time.monotonic() - began < 10


def test_giving_up_ends_a_wait_at_once_and_wakes_the_peers() -> None:
    stopped = threading.Event()
    store = HashStore()
    waiting = threading.Event()

    def run(rank: int) -> str:
        exchange = GlooExchange(
            join(store, rank, 3), stopped if rank == 0 else threading.Event(), patience_s=60
        )
        exchange.begin(1, 2)
        if rank == 2:  # never comes; its connections stay open
            waiting.wait(30)
            exchange.close()
            return ""
        with pytest.raises(ExchangeError) as error:
            moe(exchange, split(3), *tokens(0, 2))
        if rank == 0:
            threading.Thread(target=exchange.close, daemon=True).start()
            waiting.set()
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(run, rank) for rank in range(3)]
        assert not wait(ranks, timeout=0.5).done  # they wait for rank 2
        began = time.monotonic()
        stopped.set()
        first, second, _ = (rank.result() for rank in ranks)
    assert time.monotonic() - began < 10
    assert first == "the group has been given up"
    assert second


# ------------------------------------------------------------ real processes


def _process(path: str, rank: int, dies: bool, results: "multiprocessing.Queue[tuple]") -> None:
    torch.set_num_threads(1)
    exchange = GlooExchange(join(FileStore(path, 3), rank, 3), threading.Event(), patience_s=30)
    exchange.begin(1, 8)
    out = moe(exchange, split(3), *tokens(rank, 3 * rank))
    results.put((rank, out.tolist()))
    exchange.begin(2, 8)
    if rank == 2 and dies:
        multiprocessing.current_process().kill()
    try:
        moe(exchange, split(3), *tokens(rank, 8))
    except ExchangeError:
        results.put((rank, "lost"))


@pytest.mark.timeout(90)
def test_the_death_of_a_process_ends_the_exchanges_of_the_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple] = context.Queue()
    ranks = [
        context.Process(target=_process, args=(str(tmp_path / "store"), rank, True, results))
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    got = [results.get(timeout=60) for _ in range(5)]
    for process in ranks:
        process.join(20)
        assert process.exitcode is not None
    for rank in range(3):
        expected = moe(Alone(), split(1), *tokens(rank, 3 * rank)).tolist()
        assert (rank, expected) in got
    assert sorted(rank for rank, what in got if what == "lost") == [0, 1]
