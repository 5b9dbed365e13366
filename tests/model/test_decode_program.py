"""Programs of decode steps: the forward's bits in any bucket, beside any padding."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepmesh.wire.messages import Pool
from services.executor.gpu.decode_program import bucket_for, bucket_sizes
from services.executor.gpu.model import DeviceModel, load_device_model
from services.executor.gpu.random_model import random_device_model
from services.executor.kv_cache import KvCache
from services.executor.model_config import load_config
from services.executor.weights import load_weights
from tests.model.decode_driving import ProgramModel
from tests.model.driving import FIXTURE, Outputs, Request, random_ids, run_steps, same_bits
from tests.model.test_device_model import small_flash

TINY = Path(__file__).parents[2] / "models/tiny"
LENGTHS = (150, 77, 141)  # two see more entries of ratio 1 than are selected
PREFIX, STEPS = [(0, 120), (1, 70), (2, 110)], 30  # then tokens one by one
in_each = pytest.mark.parametrize("numerics", ["exact", "fp32", "bf16"])


@functools.cache
def model_of(path: Path, numerics: str, device: str, *, fast: bool) -> DeviceModel:
    return load_device_model(path, numerics, device, fast=fast)


@functools.cache
def compressed_ids(path: Path) -> Tensor:
    return load_weights(path, load_config(path)).compressed_ids


def requests() -> list[Request]:
    return [
        Request(
            random_ids(n, seed=40 + i),
            global_blocks=[3 * i + 2, 3 * i, 3 * i + 1],
            window_blocks=[8 - 3 * i, 6 - 3 * i, 7 - 3 * i],
            state_block=2 - i,
        )
        for i, n in enumerate(LENGTHS)
    ]


def decode_steps() -> list[list[tuple[int, int]]]:
    """Chunks first; then one token of each, and of one or two requests now and then."""
    some = [[(0, 1), (1, 1), (2, 1)], [(2, 1)], [(1, 1), (0, 1)]]
    return [PREFIX, *[some[i % 3] for i in range(STEPS)]]


def run(model: DeviceModel | ProgramModel, device: str) -> tuple[list[Outputs], KvCache]:
    inner = model.model if isinstance(model, ProgramModel) else model
    cache = KvCache(inner.config, 9, 9, 3, packed=inner.numerics != "exact", device=device)
    for pool in Pool:  # whatever is read without having been written shows
        for block in range(cache.num_blocks[pool]):
            cache.poison_block(pool, block)
    return run_steps(model, cache, requests(), decode_steps()), cache


def blocks_of(cache: KvCache) -> list[Tensor]:
    sizes = KvCache.block_bytes(cache.config, packed=cache.packed)
    found: list[Tensor] = []
    for pool, size in zip(Pool, sizes, strict=True):
        for block in range(cache.num_blocks[pool]):
            held = torch.zeros(size, dtype=torch.uint8)
            cache.export_block(pool, block, held.numpy())
            found.append(held)
    return found


def assert_same(ours: list[Outputs], wanted: list[Outputs]) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert same_bits(one.logits, other.logits)
        assert same_bits(one.features.cpu(), other.features.cpu())


@in_each
def test_a_program_has_the_bits_of_the_forward_in_any_bucket_and_row(numerics: str) -> None:
    model = model_of(FIXTURE, numerics, "cpu", fast=False)
    wanted, held = run(model, "cpu")
    for buckets, first in (([3], 0), ([1, 2, 4], 0), ([7], 3)):
        program = ProgramModel(model, compressed_ids(FIXTURE), buckets, 4, first=first)
        found, cache = run(program, "cpu")
        assert program.runs == STEPS
        assert_same(found, wanted)
        for one, other in zip(blocks_of(cache), blocks_of(held), strict=True):
            assert torch.equal(one, other)
        null = cache.window[:, -1], cache.pairs[-1], *(x[-1] for x in cache.compressed.values())
        assert not any(bool(rows.any()) for rows in null)  # padding writes nothing


def test_the_tiny_model_too_whose_candidates_confine_choices() -> None:
    model = model_of(TINY, "bf16", "cpu", fast=False)
    wanted, _ = run(model, "cpu")
    found, _ = run(ProgramModel(model, compressed_ids(TINY), [4], 5), "cpu")
    assert_same(found, wanted)


def test_buckets_end_with_the_most_rows_of_a_step() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(256)[-3:] == [128, 192, 256]
    assert bucket_sizes(700)[-3:] == [256, 512, 700]
    assert [bucket_for([1, 4, 20], rows) for rows in (1, 2, 4, 5, 20)] == [1, 4, 4, 20, 20]


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("path", [FIXTURE, TINY])
def test_graphs_have_the_bits_of_the_forward(path: Path, fast: bool) -> None:
    model = model_of(path, "bf16", "cuda", fast=fast)
    wanted, _ = run(model, "cuda")
    for graph in (False, True):
        ids = compressed_ids(path)
        found, _ = run(ProgramModel(model, ids, [1, 4, 16], 5, first=1, graph=graph), "cuda")
        assert_same(found, wanted)


@pytest.mark.gpu
def test_graphs_in_the_shapes_that_hopper_kernels_were_made_for() -> None:
    model = random_device_model(small_flash())
    wanted, held = run(model, "cuda")
    ids = torch.arange(model.config.vocab_size)
    for buckets in ([4], [16], [64], [256]):
        program = ProgramModel(model, ids, buckets, 4, first=1, graph=True)
        found, cache = run(program, "cuda")
        assert_same(found, wanted)
        for one, other in zip(blocks_of(cache), blocks_of(held), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_run_never_waits_for_the_device() -> None:
    model = random_device_model(small_flash())
    cache = KvCache(model.config, 5, 5, 2, device="cuda")
    ids = torch.arange(model.config.vocab_size)
    program = ProgramModel(model, ids, [4], 5, graph=True)
    request = Request(random_ids(5, seed=1), [4], [3], 1)
    wanted = run_steps(program, cache, [request], [[(0, 1)]] * 4)[0].logits[-1]
    [runner] = program.programs.values()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.run()
        once = runner.logits[0].clone()
        runner.replay()
        again = runner.logits[0].clone()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(once.cpu(), wanted)
    assert same_bits(again.cpu(), wanted)


def test_a_cache_of_other_rows_is_refused() -> None:
    model = model_of(FIXTURE, "fp32", "cpu", fast=False)
    cache = KvCache(model.config, 2, 2, 2, packed=False)
    with pytest.raises(ValueError, match="fp32: the cache holds plain floats"):
        run_steps(
            ProgramModel(model, compressed_ids(FIXTURE), [1], 2),
            cache,
            [Request([5], [0], [0], 0)],
            [],
        )
