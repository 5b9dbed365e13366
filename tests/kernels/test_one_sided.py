"""The one-sided exchange: ranks are threads on a host, streams on a GPU."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.comm.comm import ExchangeError
from kernels.comm.one_sided import Geometry, OneSidedExchange
from kernels.comm.routes import plan_routes
from kernels.comm.windows import local_windows
from kernels.quant.rounding import round_fp8
from tests.kernels.one_sided_rig import (
    CAPACITY,
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    alone,
    experts,
    fetched,
    geometry,
    group,
    moe,
    on_every_rank,
    split,
    tokens,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)


@every_device
@pytest.mark.parametrize(
    ("fp8_rows", "slots"), [(True, torch.bfloat16), (False, torch.float32), (True, torch.float32)]
)
@pytest.mark.parametrize("counts", [(5,), (5, 9), (0, 7, 3), (4, 0, 9, 1)])
def test_bits_are_those_of_one_rank(
    device: str, fp8_rows: bool, slots: torch.dtype, counts: tuple[int, ...]
) -> None:
    shape = geometry(len(counts), fp8_rows=fp8_rows, slots=slots)
    owners = split(len(counts), device)

    def run(exchange: OneSidedExchange) -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = []
        for step in range(3):
            exchange.begin(step, CAPACITY if step else max(counts))
            for layer in range(3):
                seed = 100 * step + 10 * layer + exchange.rank
                own = tokens(seed, counts[exchange.rank], device)
                found.append((fetched(moe(exchange, owners, own)), alone(own, shape)))
        exchange.check()
        return found

    with group(shape, device) as exchanges:
        for found in on_every_rank(exchanges, run):
            for ours, wanted in found:
                assert torch.equal(ours, wanted)


@every_device
def test_sums_of_a_rank_are_sums_of_its_experts_in_order(device: str) -> None:
    shape = geometry(2, slots=torch.float32, is_fast=True)
    owners = split(2, device)

    def run(exchange: OneSidedExchange) -> Tensor:
        exchange.begin(1, CAPACITY)
        return fetched(moe(exchange, owners, tokens(exchange.rank, 8, device)))

    with group(shape, device) as exchanges:
        outs = on_every_rank(exchanges, run)
    for rank, out in enumerate(outs):
        x, ids, weights = tokens(rank, 8)
        slots = experts(round_fp8(x.float()), ids, weights, torch.float32)
        held = split(2)[ids.long()]
        parts = [torch.zeros(8, HIDDEN), torch.zeros(8, HIDDEN)]
        for part, owner in zip(parts, (0, 1), strict=True):
            for k in range(TOP_K):
                part += torch.where((held[:, k] == owner).unsqueeze(1), slots[:, k], 0.0)
        assert torch.equal(out, parts[0] + parts[1])


@every_device
def test_tokens_arrive_in_the_order_of_the_other_backends(device: str) -> None:
    shape, counts = geometry(3), (4, 0, 9)
    owners = split(3, device)

    def run(exchange: OneSidedExchange) -> tuple[Tensor, ...]:
        exchange.begin(1, CAPACITY)
        ran: list[int] = []
        own = tokens(exchange.rank, counts[exchange.rank], device)
        here = exchange.dispatch(*own, owners, lambda: ran.append(1))
        exchange.combine(experts(here.x, here.expert_ids, here.weights, exchange.slots))
        assert ran == [1]
        return tuple(map(fetched, (here.x, here.expert_ids, here.weights)))

    with group(shape, device) as exchanges:
        arrived = on_every_rank(exchanges, run)
    for source, count in enumerate(counts):
        x, ids, weights = tokens(source, count)
        routes = plan_routes(ids.long(), split(3).long(), 3)
        for rank, (got_x, got_ids, got_weights) in enumerate(arrived):
            mine = slice(source * CAPACITY, (source + 1) * CAPACITY)
            wanted = torch.full((CAPACITY, TOP_K), -1)
            wanted[:count] = torch.where(split(3)[ids.long()] == rank, ids, -1)
            assert torch.equal(got_ids[mine], wanted.int())
            sent = routes.tokens[routes.ranks == rank]
            assert torch.equal((got_ids[mine] >= 0).any(1).nonzero().squeeze(1), sent)
            assert torch.equal(got_x[mine][sent].float(), round_fp8(x[sent].float()))
            is_here = wanted[sent] >= 0
            assert torch.equal(got_weights[mine][sent][is_here], weights[sent][is_here])


@every_device
def test_rows_that_come_are_counted(device: str) -> None:
    shape, counts = geometry(2), (7, 4)
    owners = split(2, device)

    def run(exchange: OneSidedExchange) -> int:
        exchange.begin(1, CAPACITY)
        held = torch.full((1,), 100, dtype=torch.int32, device=device)
        own = tokens(exchange.rank, counts[exchange.rank], device)
        here = exchange.dispatch(*own, owners, held=held)
        exchange.combine(experts(here.x, here.expert_ids, here.weights, exchange.slots))
        return int(fetched(held)) - 100

    with group(shape, device) as exchanges:
        found = on_every_rank(exchanges, run)
    ids = torch.cat([tokens(rank, count)[1] for rank, count in enumerate(counts)])
    assert found == torch.bincount(split(2)[ids.long()].flatten(), minlength=2).tolist()


def test_padded_tokens_are_nobodys_and_what_is_not_a_number_stays_so() -> None:
    shape = geometry(2)

    def run(exchange: OneSidedExchange) -> Tensor:
        exchange.begin(1, CAPACITY)
        x, ids, weights = tokens(exchange.rank, 6)
        ids[4:] = -1
        x[1, 5], x[2, 40] = torch.nan, torch.inf
        return moe(exchange, split(2), (x, ids, weights))

    with group(shape, "cpu") as exchanges:
        for rank, out in enumerate(on_every_rank(exchanges, run)):
            wanted = alone(tokens(rank, 6), shape)
            assert torch.equal(out[[0, 3]], wanted[[0, 3]])
            assert (out[4:] == 0).all()
            assert out[1, :32].isnan().all()
            assert out[2, 32:64].isnan().all()
            assert out[1:3, 64:].isfinite().all()


def test_a_rank_is_never_two_exchanges_ahead_of_another() -> None:
    """So two sets of buffers are enough, even if the tokens of the fast rank stay at home."""
    shape, sent = geometry(2), [threading.Event() for _ in range(3)]
    home = torch.zeros(NUM_EXPERTS, dtype=torch.int32)  # rank 0 holds everything

    with group(shape, "cpu") as (fast, slow):

        def run_ahead() -> None:
            fast.begin(1, CAPACITY)
            for number in range(3):
                here = fast.dispatch(*tokens(number, 9), home, sent[number].set)
                fast.combine(experts(here.x, here.expert_ids, here.weights, fast.slots))

        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(run_ahead)
            slow.begin(1, CAPACITY)
            own = tokens(7, 5)
            here = slow.dispatch(*own, home)
            assert sent[1].wait(20)  # sends its second, and waits for ours
            assert not sent[2].wait(0.3)
            out = slow.combine(experts(here.x, here.expert_ids, here.weights, slow.slots))
            assert torch.equal(out, alone(own, shape))
            for _ in range(2):
                moe(slow, home, own)
            ahead.result(20)


def test_numbers_of_exchanges_may_wrap_around() -> None:
    shape = geometry(2)
    windows = local_windows(shape.window_bytes, ["cpu"] * 2)
    for address in windows.addresses:
        ctypes.memset(address, 0xFF, shape.window_bytes)
    exchanges = [OneSidedExchange(shape, r, windows.addresses, device="cpu") for r in range(2)]

    def run(exchange: OneSidedExchange) -> list[bool]:
        exchange._state[0] = -1  # the next one is 0
        exchange.begin(1, CAPACITY)
        owns = [tokens(10 * n + exchange.rank, 9) for n in range(4)]
        return [torch.equal(moe(exchange, split(2), own), alone(own, shape)) for own in owns]

    assert all(map(all, on_every_rank(exchanges, run)))
    assert [int(exchange._state[0]) for exchange in exchanges] == [3, 3]
    windows.close()


@every_device
def test_a_rank_that_does_not_come_is_named_and_nothing_waits_again(device: str) -> None:
    shape, own = geometry(3), tokens(0, 4, device)
    with group(shape, device, patience_s=1.0) as exchanges:

        def run(exchange: OneSidedExchange) -> float:
            exchange.begin(1, CAPACITY)
            if exchange.rank == 1:
                return 0.0
            began = time.monotonic()
            out = moe(exchange, split(3, device), own)
            assert fetched(out).isnan().all()
            with pytest.raises(ExchangeError, match=r"exchange 1: rank 1 is late"):
                exchange.check()
            with pytest.raises(ExchangeError, match="rank 1 is late"):
                moe(exchange, split(3, device), own)
            return time.monotonic() - began

        took = on_every_rank(exchanges, run)
        assert max(took) < 5


@every_device
def test_giving_up_ends_a_wait_at_once(device: str) -> None:
    shape, began = geometry(2), threading.Event()
    with group(shape, device, patience_s=60) as (first, _):

        def run(exchange: OneSidedExchange) -> None:
            exchange.begin(1, CAPACITY)
            here = exchange.dispatch(*tokens(0, 4, device), split(2, device), began.set)
            slots = experts(here.x, here.expert_ids, here.weights, exchange.slots)
            fetched(exchange.combine(slots))
            with pytest.raises(ExchangeError, match="given up"):
                exchange.check()

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(on_every_rank, [first], run)
            assert began.wait(20)
            first.stop()
            waiting.result(20)


def test_a_rank_at_another_step_is_found_out() -> None:
    def run(exchange: OneSidedExchange) -> str:
        exchange.begin(0x10 + exchange.rank, CAPACITY)
        moe(exchange, split(2), tokens(0, 2))
        with pytest.raises(ExchangeError) as error:
            exchange.check()
        return str(error.value)

    with group(geometry(2), "cpu") as exchanges:
        first, second = on_every_rank(exchanges, run)
    assert first == "rank 1 is at exchange 1 of step 0x11, this rank at another step"
    assert second == "rank 0 is at exchange 1 of step 0x10, this rank at another step"


def test_what_there_is_no_code_for_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden 40 must be a multiple of 32"):
        Geometry(2, 8, 40, 2)
    with pytest.raises(ValueError, match="float16"):
        geometry(2, slots=torch.float16)
    with group(geometry(1), "cpu") as (exchange,):
        exchange.begin(1, 2)
        with pytest.raises(AssertionError, match="3 tokens, capacity 2"):
            moe(exchange, split(1), tokens(0, 3))
