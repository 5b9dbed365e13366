"""The forward of a device: by kernels of any shape the CPU's bits, by fast ones near them."""

import functools

import pytest
import torch

from deepmesh.wire.messages import Pool
from services.executor.gpu.model import DeviceModel, load_device_model
from services.executor.kv_cache import KvCache
from tests.model.driving import (
    FIXTURE,
    Outputs,
    Request,
    alone,
    cache_for,
    fixture_model,
    random_ids,
    relative,
    run_steps,
    same_bits,
)

LENGTHS = (90, 77, 41)
MIXED = [[(0, 9), (1, 64)], [(0, 1), (2, 17), (1, 1)], [(2, 1)], [(0, 33), (1, 2), (2, 1)]]
BF16_ERROR = 0.08  # of the CPU's logits in bf16 against fp32, relative: about 0.06 here
on_each = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
in_each = pytest.mark.parametrize("numerics", ["exact", "fp32", "bf16"])


@functools.cache
def device_model(numerics: str, device: str, *, fast: bool = False) -> DeviceModel:
    return load_device_model(FIXTURE, numerics, device, fast=fast)


@functools.cache
def reference(numerics: str) -> list[Outputs]:
    """Each request alone, by the CPU's kernels."""
    model = fixture_model(numerics)
    return [alone(model, random_ids(n, seed=index)) for index, n in enumerate(LENGTHS)]


def requests() -> list[Request]:
    return [
        Request(
            random_ids(n, seed=i),
            global_blocks=[2 * i, 2 * i + 1],
            window_blocks=[5 - 2 * i, 4 - 2 * i],
            state_block=i,
        )
        for i, n in enumerate(LENGTHS)
    ]


def run_mixed(model: DeviceModel, device: str) -> tuple[list[Outputs], KvCache]:
    """Three requests in steps of prefill chunks and decode rows."""
    packed = model.numerics != "exact"
    cache = KvCache(model.config, 6, 6, 6, packed=packed, device=device)
    return run_steps(model, cache, requests(), MIXED), cache


@on_each
@in_each
def test_bits_and_caches_are_those_of_the_cpu(numerics: str, device: str) -> None:
    found, cache = run_mixed(device_model(numerics, device), device)
    for ours, wanted in zip(found, reference(numerics), strict=True):
        assert same_bits(ours.logits, wanted.logits)
        assert same_bits(ours.features.cpu(), wanted.features)
    held = cache_for(fixture_model(numerics), 6, 6, 6)
    run_steps(fixture_model(numerics), held, requests(), MIXED)
    for pool, size in zip(Pool, KvCache.block_bytes(held.config, packed=held.packed), strict=True):
        ours, wanted = (torch.zeros(size, dtype=torch.uint8).numpy() for _ in range(2))
        for block in range(6):
            cache.export_block(pool, block, ours)
            held.export_block(pool, block, wanted)
            assert (ours == wanted).all(), f"{pool.name} block {block}"


@pytest.mark.gpu
def test_fast_kernels_are_near_and_keep_bits() -> None:
    """A row's bits depend on its own ids alone, however the request was cut into steps."""
    model = device_model("bf16", "cuda", fast=True)
    first, _ = run_mixed(model, "cuda")
    for index, (ours, wanted) in enumerate(zip(first, reference("bf16"), strict=True)):
        assert relative(ours.logits, reference("fp32")[index].logits) < BF16_ERROR
        assert relative(ours.logits, wanted.logits) < BF16_ERROR
    cache = KvCache(model.config, 6, 6, 6, device="cuda")
    one_each = [[(0, 1), (1, 1), (2, 1)]] * max(LENGTHS)
    again = run_steps(model, cache, requests(), one_each)
    for ours, wanted in zip(again, first, strict=True):
        assert same_bits(ours.logits, wanted.logits)


@on_each
def test_a_cache_of_other_rows_is_refused(device: str) -> None:
    model = device_model("fp32", device)
    cache = KvCache(model.config, 2, 2, 2, packed=False, device=device)
    with pytest.raises(ValueError, match="fp32: the cache holds plain floats"):
        run_steps(model, cache, [Request([5, 6], [0], [0], 0)], [])
