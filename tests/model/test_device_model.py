"""The forward of a device: by kernels of any shape the CPU's bits, by fast ones near them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from deepmesh.config import Config, ConfigError, ExecutorConfig
from deepmesh.wire.messages import Pool
from services.executor.__main__ import make_engine
from services.executor.gpu.model import DeviceModel, load_device_model
from services.executor.gpu.random_model import random_device_model
from services.executor.kv_cache import KvCache
from services.executor.presets import preset_config
from services.executor.weights import load_model
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
TINY = Path(__file__).parents[2] / "models/tiny"
on_each = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
in_each = pytest.mark.parametrize("numerics", ["exact", "fp32", "bf16"])


@functools.cache
def device_model(numerics: str, device: str) -> DeviceModel:
    return load_device_model(FIXTURE, numerics, device, fast=False)


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
    model = load_device_model(TINY, "bf16", "cuda")
    found, _ = run_mixed(model, "cuda")
    exact, rounded = (load_model(TINY, numerics) for numerics in ("fp32", "bf16"))
    ours = wanted = 0.0
    for index, (n, out) in enumerate(zip(LENGTHS, found, strict=True)):
        ids = random_ids(n, seed=index)
        truth = alone(exact, ids).logits
        ours += relative(out.logits, truth)
        wanted += relative(alone(rounded, ids).logits, truth)
    assert ours < 1.2 * wanted  # of the CPU's own rounding; no choice of order is nearer
    cache = KvCache(model.config, 6, 6, 6, device="cuda")
    one_each = [[(0, 1), (1, 1), (2, 1)]] * max(LENGTHS)
    again = run_steps(model, cache, requests(), one_each)
    for other, out in zip(again, found, strict=True):
        assert same_bits(other.logits, out.logits)


def small_flash(stages: int = 0) -> dict[str, Any]:
    """The shapes of V4.1-Flash's attention and width, a few small experts, a choice of 64 rows."""
    raw = preset_config("v41-flash", layers=6, stages=stages)
    text = raw["text_config"]
    text |= {"vocab_size": 512, "n_routed_experts": 32, "moe_intermediate_size": 256}
    text |= {"index_topk": 64, "candidate_topk_blocks": 12, "dspark_noise_token_id": 5}
    text |= {"dspark_n_routed_experts": 32}
    return raw


@pytest.mark.gpu
def test_kernels_for_hopper_in_the_shapes_they_were_made_for() -> None:
    fast, any_shape = (random_device_model(small_flash(), fast=fast) for fast in (True, False))
    ids = random_ids(300, seed=3)

    def run(model: DeviceModel, steps: list[list[tuple[int, int]]]) -> torch.Tensor:
        cache = KvCache(model.config, 5, 5, 2, device="cuda")
        request = Request(ids, [4, 2, 0, 1, 3], [3, 1, 2, 0, 4], 1)
        return run_steps(model, cache, [request], steps)[0].logits

    whole = run(fast, [])
    assert same_bits(run(fast, [[(0, 130)], *[[(0, 1)]] * 20, [(0, 33)]]), whole)
    errors = (whole - run(any_shape, [])).norm(dim=1) / whole.norm(dim=1)
    # a tie that rounds the other way changes experts of a random model: one order of sums against
    # another has a median of 0.08 on a CPU, unrelated logits 1.4
    assert float(errors.median()) < 0.3


@on_each
def test_a_cache_of_other_rows_is_refused(device: str) -> None:
    model = device_model("fp32", device)
    cache = KvCache(model.config, 2, 2, 2, packed=False, device=device)
    with pytest.raises(ValueError, match="fp32: the cache holds plain floats"):
        run_steps(model, cache, [Request([5, 6], [0], [0], 0)], [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(ConfigError, match="no CUDA device is here; use 'cpu'"):
        make_engine(Config(executor=ExecutorConfig(device="cuda")))


def test_a_part_of_the_experts_needs_an_exchange() -> None:
    with pytest.raises(ValueError, match="needs an exchange with the other ranks"):
        load_device_model(FIXTURE, "bf16", "cpu", rank=1, ranks=2)
