"""Ranks of the one-sided exchange for tests: threads on a host, streams on a GPU."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from kernels.comm.one_sided import Geometry, OneSidedExchange
from kernels.comm.windows import local_windows
from kernels.moe.experts import combine_slots
from kernels.quant.rounding import round_fp8

HIDDEN, TOP_K, NUM_EXPERTS, CAPACITY = 96, 3, 10, 9
T = TypeVar("T")


def geometry(ranks: int, **changes: object) -> Geometry:
    return Geometry(ranks, CAPACITY, HIDDEN, TOP_K, **changes)  # type: ignore[arg-type] # by name


def tokens(seed: int, count: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights, of magnitudes so different that the order of sums shows."""
    random = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (count, 1), generator=random)
    x = (torch.randn(count, HIDDEN, generator=random) * scale).bfloat16()
    ids = torch.rand(count, NUM_EXPERTS, generator=random).argsort(1)[:, :TOP_K].sort(1).values
    weights = torch.rand(count, TOP_K, generator=random)
    return x.to(device), ids.int().to(device), weights.to(device)


@functools.cache
def factors(device: torch.device) -> Tensor:
    return torch.tensor([3.0, -1e3, 0.7, 1e-3, 11.0, -5.0, 1e2, 0.1, -0.9, 2.0], device=device)


def experts(x: Tensor, ids: Tensor, weights: Tensor, slots: torch.dtype) -> Tensor:
    """Slots of all experts; those of others' are not a number and must not be used."""
    factor = factors(x.device)
    share = torch.where(ids < 0, torch.nan, weights * factor[ids.clamp_min(0).long()])
    return (x.float().unsqueeze(1) * share.unsqueeze(2)).to(slots)


def alone(own: tuple[Tensor, Tensor, Tensor], shape: Geometry) -> Tensor:
    """The sum as one rank has it."""
    x, ids, weights = (part.cpu() for part in own)
    x = round_fp8(x.float()).bfloat16() if shape.fp8_rows else x
    return combine_slots(experts(x, ids, weights, shape.slots).float())


def fetched(tensor: Tensor) -> Tensor:
    """On the host. A copy that waits for its stream may keep other threads from launching what the
    stream waits for, so the stream is waited for first."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
    return tensor.cpu()


def moe(exchange: OneSidedExchange, owners: Tensor, own: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    here = exchange.dispatch(*own, owners)
    return exchange.combine(experts(here.x, here.expert_ids, here.weights, exchange.slots))


def split(ranks: int, device: str = "cpu") -> Tensor:
    return (torch.arange(NUM_EXPERTS) * 7 % NUM_EXPERTS * ranks // NUM_EXPERTS).int().to(device)


@contextmanager
def group(
    shape: Geometry, device: str, patience_s: float = 20.0
) -> Iterator[list[OneSidedExchange]]:
    windows = local_windows(shape.window_bytes, [device] * shape.ranks)
    yield [
        OneSidedExchange(
            shape,
            rank,
            windows.addresses,
            device=device,
            patience_s=patience_s,
            shares_device=device == "cuda",
        )
        for rank in range(shape.ranks)
    ]
    if device == "cuda":
        torch.cuda.synchronize()
    windows.close()


def on_every_rank(
    exchanges: list[OneSidedExchange], action: Callable[[OneSidedExchange], T]
) -> list[T]:
    """On a thread per rank, and a stream of its own."""
    device = exchanges[0].device
    if device.type == "cuda":  # code that is loaded behind a kernel that waits would never come
        moe_of_torch = experts(*tokens(0, 2, "cuda"), exchanges[0].slots).float()
        assert moe_of_torch.cpu().shape
        torch.cuda.synchronize()

    def run(exchange: OneSidedExchange) -> T:
        if device.type == "cpu":
            return action(exchange)
        with torch.cuda.stream(torch.cuda.Stream()):
            done = action(exchange)
            torch.cuda.current_stream().synchronize()
        return done

    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(run, exchanges))
