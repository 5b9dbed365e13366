"""Bytes of KV blocks outside the device: as documented, whole, and only for who can read them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deepmesh.config import load_config as load_mesh_config
from deepmesh.wire.messages import Load, Pool
from services.executor.capacity import fingerprint
from services.executor.kv_cache import LAYOUT, KvCache
from services.executor.model_config import BLOCK_TOKENS, load_config
from services.executor.runner import ModelEngine

MODEL = Path(__file__).parents[2] / "models/tiny"


@pytest.fixture
def cache() -> KvCache:
    """Every number in it is another one."""
    made = KvCache(load_config(MODEL), 4, 4, 4)
    tensors = [made.window, made.pairs, *made.compressed.values(), *made.index_keys.values()]
    start = 0
    for tensor in tensors:
        tensor.copy_(torch.arange(start, start + tensor.numel()).view(tensor.shape))
        start += tensor.numel()
    assert start < 1 << 24, "float32 tells them apart"
    return made


def exported(cache: KvCache, pool: Pool, block: int) -> np.ndarray:
    out = np.zeros(KvCache.float_bytes_per_block(cache.config)[pool], np.uint8)
    cache.export_block(pool, block, out)
    return out


def expected(cache: KvCache, pool: Pool, block: int) -> torch.Tensor:
    """The documented order, written down a second time."""
    if pool is Pool.WINDOW:
        return cache.window[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].reshape(-1)
    if pool is Pool.STATE:
        return cache.pairs[block].reshape(-1)
    parts: list[torch.Tensor] = []
    for layer in sorted(cache.config.kv_source_layer_ids):
        entries = BLOCK_TOKENS // cache.config.compress_ratios[layer]
        for rows in (cache.compressed[layer], cache.index_keys[layer]):
            parts.append(rows[block * entries : (block + 1) * entries].reshape(-1))
    return torch.cat(parts)


@pytest.mark.parametrize("pool", list(Pool))
def test_a_block_is_laid_out_as_documented(cache: KvCache, pool: Pool) -> None:
    assert LAYOUT == "f32-1", "another layout: write the new one down here, too"
    got = exported(cache, pool, 2).view("<f4")
    assert np.array_equal(got, expected(cache, pool, 2).numpy())


@pytest.mark.parametrize("pool", list(Pool))
def test_what_is_put_back_is_the_same_block_and_no_other(cache: KvCache, pool: Pool) -> None:
    others = {
        (other, block): exported(cache, other, block)
        for other in Pool
        for block in range(4)
        if (other, block) != (pool, 3)
    }
    data = exported(cache, pool, 2)
    cache.poison_block(pool, 3)
    cache.import_block(pool, 3, data)
    assert np.array_equal(exported(cache, pool, 3), data)
    for (other, block), before in others.items():
        assert np.array_equal(exported(cache, other, block), before)


def test_a_block_that_is_not_there_is_refused(cache: KvCache) -> None:
    data = exported(cache, Pool.GLOBAL, 0)
    for block in (-1, 4):  # 4 is the null block
        with pytest.raises(IndexError, match="GLOBAL block"):
            cache.import_block(Pool.GLOBAL, block, data)


def test_the_layout_is_part_of_the_fingerprint() -> None:
    config = load_mesh_config(None)
    capacity = ModelEngine(config).load(Load(1, 0, 1, str(MODEL), "fp32"), lambda *_: None)
    assert capacity.block_bytes == KvCache.float_bytes_per_block(load_config(MODEL))
    assert capacity.fingerprint == fingerprint(MODEL, "fp32", f"cpu {LAYOUT}")
    assert capacity.fingerprint != fingerprint(MODEL, "fp32", "cpu f32-0")
