"""The one-sided exchange on a GPU: graphs, symmetric memory, processes that share a device."""

import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from kernels import cuda
from kernels.comm.one_sided import Geometry, OneSidedExchange
from kernels.comm.windows import Windows, ipc_windows, symmetric_windows
from kernels.quant.rounding import round_fp8
from tests.kernels.one_sided_rig import (
    CAPACITY,
    alone,
    experts,
    fetched,
    geometry,
    group,
    moe,
    split,
    tokens,
)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_kernels_compile_for_hopper() -> None:
    built = cuda.load("comm", "exchange", ("-fmad=false",))
    assert built.exchange_send is not None
    assert built.window_open is not None


@pytest.mark.gpu
def test_graphs_are_replayed_and_keep_their_own_numbers() -> None:
    shape, layers, counts = geometry(2), 3, (5, 9)
    owners = split(2, "cuda")
    with group(shape, "cuda") as exchanges:
        streams = [torch.cuda.Stream() for _ in exchanges]
        owns = [[tokens(9 * r + n, counts[r], "cuda") for n in range(layers)] for r in range(2)]
        experts(*owns[0][0], shape.slots)
        graphs = [torch.cuda.CUDAGraph() for _ in exchanges]
        outs: list[list[Tensor]] = []
        torch.cuda.synchronize()
        for exchange, graph, stream, own in zip(exchanges, graphs, streams, owns, strict=True):
            exchange.begin(0, CAPACITY)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                outs.append([moe(exchange, owners, layer) for layer in own])
        for replay in range(5):
            for rank, exchange in enumerate(exchanges):
                with torch.cuda.stream(streams[rank]):
                    for n, layer in enumerate(owns[rank]):
                        fresh = tokens(1000 * replay + 9 * rank + n, counts[rank], "cuda")
                        for to, part in zip(layer, fresh, strict=True):
                            to.copy_(part)
                    exchange.set_tag(replay)
            for rank in (replay % 2, 1 - replay % 2):
                with torch.cuda.stream(streams[rank]):
                    graphs[rank].replay()
            torch.cuda.synchronize()
            for rank, exchange in enumerate(exchanges):
                exchange.check()
                for n, out in enumerate(outs[rank]):
                    assert torch.equal(out.cpu(), alone(owns[rank][n], shape))
        assert [int(exchange._state[0]) for exchange in exchanges] == [5 * layers] * 2


@pytest.mark.gpu
def test_windows_of_torchs_symmetric_memory_serve_as_well(tmp_path: Path) -> None:
    """One rank: it wants a device for each."""
    torch.cuda.set_device(0)
    store, shape = FileStore(str(tmp_path / "store"), 1), geometry(1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        windows = symmetric_windows(shape.window_bytes, world)
        exchange = OneSidedExchange(shape, 0, windows.addresses, patience_s=5)
        for step in range(3):
            exchange.begin(step, CAPACITY)
            own = tokens(step, 9, "cuda")
            assert torch.equal(fetched(moe(exchange, split(1, "cuda"), own)), alone(own, shape))
        exchange.check()
        windows.close()
    finally:
        dist.destroy_process_group()


def _process(path: str, rank: int, results: "multiprocessing.Queue[tuple[int, object]]") -> None:
    shape, store = geometry(2), FileStore(path, 2)

    def swap(handle: bytes) -> list[bytes]:
        store.set(f"window{rank}", handle.hex())
        return [bytes.fromhex(store.get(f"window{other}").decode()) for other in range(2)]

    owners = split(2, "cuda")
    windows: Windows = ipc_windows(shape.window_bytes, rank, swap)
    exchange = OneSidedExchange(shape, rank, windows.addresses, patience_s=30, shares_device=True)
    experts(*tokens(0, 2, "cuda"), shape.slots)
    good: list[bool] = []
    for step in range(4):
        exchange.begin(step, CAPACITY)
        for layer in range(2):
            own = tokens(100 * step + 10 * layer + rank, 9 - 4 * rank, "cuda")
            good.append(torch.equal(fetched(moe(exchange, owners, own)), alone(own, shape)))
    exchange.check()
    store.set(f"done{rank}", "1")
    store.wait([f"done{other}" for other in range(2)])
    torch.cuda.synchronize()
    windows.close()
    results.put((rank, good))


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_two_processes_share_one_gpu(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, object]] = context.Queue()
    ranks = [
        context.Process(target=_process, args=(str(tmp_path / "store"), rank, results), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=90) for _ in ranks)
    for process in ranks:
        process.join(20)
        assert process.exitcode == 0
    assert found == [(0, [True] * 8), (1, [True] * 8)]


def _many(path: str, rank: int, results: "multiprocessing.Queue[tuple[int, object]]") -> None:
    """Fresh tokens in each of many exchanges, in shapes that models have."""
    hidden, top_k, num_experts, most = 5120, 6, 384, 128
    torch.cuda.set_device(rank)
    store = FileStore(path, 2)

    def swap(handle: bytes) -> list[bytes]:
        store.set(f"window{rank}", handle.hex())
        return [bytes.fromhex(store.get(f"window{other}").decode()) for other in range(2)]

    shape = Geometry(2, most, hidden, top_k)
    windows = ipc_windows(shape.window_bytes, rank, swap)
    exchange = OneSidedExchange(shape, rank, windows.addresses, patience_s=30)
    random = torch.Generator("cuda").manual_seed(rank)
    factor = torch.rand(num_experts, device="cuda", generator=torch.Generator("cuda"))
    owners = (torch.arange(num_experts, device="cuda") * 2 // num_experts).int()
    wrong = 0
    for number in range(150):
        count = (1, 17, most)[number % 3]
        exchange.begin(number, count)
        x = torch.randn(count, hidden, device="cuda", generator=random).bfloat16()
        odds = torch.rand(count, num_experts, device="cuda", generator=random)
        ids = odds.topk(top_k).indices.sort(1).values.int()
        weights = torch.rand(count, top_k, device="cuda", generator=random)
        here = exchange.dispatch(x, ids, weights, owners)
        share = torch.where(here.expert_ids < 0, 0, here.expert_ids).long()
        share = here.weights * factor[share]
        slots = (here.x.float().unsqueeze(1) * share.unsqueeze(2)).bfloat16()
        slots[here.expert_ids < 0] = torch.nan
        out = exchange.combine(slots)
        rounded, expected = round_fp8(x.cpu().float()).cuda(), torch.zeros_like(out)
        for k in range(top_k):
            own = weights[:, k] * factor[ids[:, k].long()]
            expected += (rounded * own.unsqueeze(1)).bfloat16().float()
        wrong += int((out != expected).sum())
        torch.cuda.current_stream().synchronize()
        exchange.check()
    store.set(f"done{rank}", "1")
    store.wait([f"done{other}" for other in range(2)])
    results.put((rank, wrong))


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_every_line_is_whole_between_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, object]] = context.Queue()
    ranks = [
        context.Process(target=_many, args=(str(tmp_path / "store"), rank, results), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=90) for _ in ranks)
    for process in ranks:
        process.join(20)
    assert found == [(0, 0), (1, 0)]
