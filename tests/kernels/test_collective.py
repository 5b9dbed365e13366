"""Dispatch and combine by collectives on padded buffers: the bits of one rank, and graphs."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore

from kernels.comm.collective import CollectiveExchange
from kernels.comm.comm import ExchangeError
from kernels.moe.experts import combine_slots

HIDDEN, TOP_K, NUM_EXPERTS = 64, 3, 10
OWNERS = torch.tensor([2, 0, 1, 1, 0, 2, 2, 1, 0, 0])


@functools.cache
def factors(device: torch.device) -> Tensor:
    return torch.tensor([3.0, -1e3, 0.7, 1e-3, 11.0, -5.0, 1e2, 0.1, -0.9, 2.0], device=device)


def on_every_rank(
    ranks: int, action: Callable[[CollectiveExchange], list[Tensor]], *, is_fast: bool = False
) -> list[list[Tensor]]:
    store = HashStore()

    def run(rank: int) -> list[Tensor]:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(store, rank, ranks, options)
        return action(CollectiveExchange(group, is_fast=is_fast))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def tokens(seed: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=random).to(dtype)
    ids = torch.rand(count, NUM_EXPERTS, generator=random).argsort(1)[:, :TOP_K].sort(1).values
    return x, ids.int(), torch.rand(count, TOP_K, generator=random)


def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    share = weights * factors(x.device)[ids.clamp_min(0).long()]
    share = torch.where(ids < 0, torch.nan, share)
    return (x.float().unsqueeze(1) * share.unsqueeze(2)).to(x.dtype)


def moe(exchange: CollectiveExchange, owners: Tensor, own: tuple[Tensor, ...]) -> Tensor:
    here = exchange.dispatch(*own, owners)  # type: ignore[arg-type] # three tensors
    return exchange.combine(experts(here.x, here.expert_ids, here.weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(4,), (5, 0), (3, 7, 1)])
def test_bits_are_those_of_one_rank(dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    owners = OWNERS % len(counts)

    def run(exchange: CollectiveExchange) -> list[Tensor]:
        outs: list[Tensor] = []
        for step in range(3):
            exchange.begin(step, max(counts) + step)
            for layer in range(2):
                seed = 100 * step + 10 * layer + exchange.rank
                outs.append(moe(exchange, owners, tokens(seed, counts[exchange.rank], dtype)))
            exchange.check()
        return outs

    for rank, outs in enumerate(on_every_rank(len(counts), run)):
        for at, out in enumerate(outs):
            own = tokens(100 * (at // 2) + 10 * (at % 2) + rank, counts[rank], dtype)
            assert torch.equal(out, combine_slots(experts(*own).float()))


def test_sums_of_a_rank_travel_if_asked() -> None:
    def run(exchange: CollectiveExchange) -> list[Tensor]:
        exchange.begin(1, 6)
        return [moe(exchange, OWNERS % 2, tokens(exchange.rank, 6, torch.float32))]

    for rank, (out,) in enumerate(on_every_rank(2, run, is_fast=True)):
        own = tokens(rank, 6, torch.float32)
        held = (OWNERS % 2)[own[1].long()]
        parts = [
            combine_slots(torch.where((held == owner).unsqueeze(2), experts(*own), 0.0))
            for owner in range(2)
        ]
        assert torch.equal(out, parts[0] + parts[1])


def test_padding_is_nobodys_and_a_rank_at_another_step_is_found_out() -> None:
    def run(exchange: CollectiveExchange) -> list[Tensor]:
        exchange.begin(7 + exchange.rank, 5)
        x, ids, weights = tokens(exchange.rank, 4, torch.float32)
        ids[2:] = -1
        out = moe(exchange, OWNERS % 2, (x, ids, weights))
        with pytest.raises(ExchangeError, match="at another step"):
            exchange.check()
        return [out]

    for rank, (out,) in enumerate(on_every_rank(2, run)):
        own = tokens(rank, 4, torch.float32)
        assert torch.equal(out[:2], combine_slots(experts(*own))[:2])
        assert (out[2:] == 0).all()


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_nccl_runs_in_a_graph(tmp_path: Path) -> None:
    """One rank: NCCL wants a device for each."""
    torch.cuda.set_device(0)
    store = FileStore(str(tmp_path / "store"), 1)
    group = dist.ProcessGroupNCCL(store, 0, 1, dist.ProcessGroupNCCL.Options())
    exchange = CollectiveExchange(group, device="cuda")
    owners = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device="cuda")
    own = [part.cuda() for part in tokens(0, 4, torch.bfloat16)]
    exchange.begin(1, 6)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moe(exchange, owners, (own[0], own[1], own[2]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = moe(exchange, owners, (own[0], own[1], own[2]))
    for replay in range(3):
        fresh = tokens(replay, 4, torch.bfloat16)
        for to, part in zip(own, fresh, strict=True):
            to.copy_(part)
        torch.cuda.synchronize()
        exchange.set_tag(replay)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), combine_slots(experts(*fresh).float()))
    exchange.check()
