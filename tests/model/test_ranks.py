"""The model with its experts spread over ranks gives the logits of the whole, bit for bit."""

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from kernels.comm.gloo import GlooExchange
from services.executor.batch import StepBatch
from services.executor.weights import load_model, load_weights
from tests.model.driving import (
    FIXTURE,
    Request,
    alone,
    cache_for,
    fixture_model,
    random_ids,
    same_bits,
)

CAPACITY = 200


def spread(
    ranks: int, requests_by_rank: list[list[list[int]]], numerics: str, skips: Sequence[int] = ()
) -> list[list[Tensor]]:
    """Logits of whole prompts; every rank takes one step for each round. `skips`: first positions
    of each rank's prompts that leave out the upper layers; the logits are those of the last."""
    store = HashStore()
    rounds = max(len(requests) for requests in requests_by_rank)

    def run(rank: int) -> list[Tensor]:
        torch.set_num_threads(1)
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        group = dist.ProcessGroupGloo(store, rank, ranks, options)
        exchange = GlooExchange(group, threading.Event(), patience_s=30)
        model = load_model(FIXTURE, numerics, rank=rank, ranks=ranks, exchange=exchange)
        out: list[Tensor] = []
        for number in range(rounds):
            exchange.begin(number, CAPACITY)
            if number >= len(requests_by_rank[rank]):
                model.serve()
                continue
            ids = requests_by_rank[rank][number]
            blocks = range(-(-len(ids) // 64))
            cache = cache_for(model, len(blocks), len(blocks), 1)
            row = Request(ids, blocks, blocks, 0).row(len(ids))
            if skips:
                skip = skips[rank]
                row = replace(row, skip=skip, window_from=skip, num_logits=int(skip < len(ids)))
            batch = StepBatch.build([row])
            out.append(model.forward(batch, cache).logits)
        del group
        exchange.close()
        return out

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@functools.cache
def expected(seed: int, length: int, numerics: str) -> Tensor:
    return alone(fixture_model(numerics), random_ids(length, seed)).logits


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_logits_are_those_of_the_whole_model(ranks: int, numerics: str) -> None:
    # more rounds on the first ranks: the others serve; the last has nothing at all
    lengths = [[140, 3, 1, 65], [1, 90], [17], []]
    lengths = [*lengths[: ranks - 1], []]
    seeds = [[10 * r + i for i in range(len(row))] for r, row in enumerate(lengths)]
    requests = [
        [random_ids(n, seed) for n, seed in zip(row, at, strict=True)]
        for row, at in zip(lengths, seeds, strict=True)
    ]
    got = spread(ranks, requests, numerics)
    for rank in range(ranks):
        assert len(got[rank]) == len(lengths[rank])
        for n, seed, logits in zip(lengths[rank], seeds[rank], got[rank], strict=True):
            assert same_bits(logits, expected(seed, n, numerics)), (rank, n)


def test_a_part_of_the_experts_needs_an_exchange() -> None:
    with pytest.raises(ValueError, match="8 of 16 experts"):
        load_model(FIXTURE, "fp32", rank=1, ranks=2)


def test_ranks_may_leave_out_the_upper_layers_each_for_itself() -> None:
    """One in part, one altogether: it works for the experts of the others; one has no tokens."""
    requests = [[random_ids(140, 1)], [random_ids(90, 2)], []]
    (found,), (nothing,), _ = spread(3, requests, "bf16", skips=(64, 90, 0))
    assert same_bits(found, expected(1, 140, "bf16")[-1:])
    assert len(nothing) == 0


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"executor\.ranks: 17 ranks cannot share 16 experts"):
        load_weights(FIXTURE, fixture_model("fp32").config, rank=0, ranks=17)


def test_draft_stages_are_whole_on_every_rank() -> None:
    config = fixture_model("fp32").config
    whole = load_weights(FIXTURE, config).draft
    part = load_weights(FIXTURE, config, rank=1, ranks=3).draft
    assert whole is not None
    assert part is not None
    for a, b in zip(whole.stages, part.stages, strict=True):
        assert b.moe.spread.first_slot == 0
        assert torch.equal(a.moe.w2.data, b.moe.w2.data)
