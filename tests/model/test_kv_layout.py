"""Bytes of KV blocks outside the device: as documented, whole, and only for who can read them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deepmesh.config import load_config as load_mesh_config
from deepmesh.wire.messages import Load, Pool
from services.executor.capacity import fingerprint
from services.executor.kv_cache import KvCache, layout
from services.executor.model_config import BLOCK_TOKENS, load_config
from services.executor.runner import ModelEngine

MODEL = Path(__file__).parents[2] / "models/tiny"


def make_cache(*, packed: bool) -> KvCache:
    """Every byte of it is drawn."""
    made = KvCache(load_config(MODEL), 4, 4, 4, packed=packed)
    draw = torch.Generator().manual_seed(0)
    for tensor in (made.window, made.pairs, *made.compressed.values(), *made.index_keys.values()):
        held = tensor.view(torch.uint8)
        held.copy_(torch.randint(256, held.shape, generator=draw, dtype=torch.uint8))
    return made


@pytest.fixture(params=[True, False], ids=["packed", "floats"])
def cache(request: pytest.FixtureRequest) -> KvCache:
    return make_cache(packed=request.param)


def exported(cache: KvCache, pool: Pool, block: int) -> np.ndarray:
    out = np.zeros(KvCache.block_bytes(cache.config, packed=cache.packed)[pool], np.uint8)
    cache.export_block(pool, block, out)
    return out


def expected(cache: KvCache, pool: Pool, block: int) -> bytes:
    """The documented order, written down a second time."""
    if pool is Pool.WINDOW:
        rows = cache.window[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        return rows.contiguous().numpy().tobytes()
    if pool is Pool.STATE:
        return cache.pairs[block].numpy().tobytes()
    parts = b""
    for layer in sorted(cache.config.kv_source_layer_ids):
        entries = BLOCK_TOKENS // cache.config.compress_ratios[layer]
        for rows in (cache.compressed[layer], cache.index_keys[layer]):
            parts += rows[block * entries : (block + 1) * entries].numpy().tobytes()
    return parts


@pytest.mark.parametrize("pool", list(Pool))
def test_a_block_is_laid_out_as_documented(cache: KvCache, pool: Pool) -> None:
    wanted = "packed-1" if cache.packed else "f32-1"
    assert layout(packed=cache.packed) == wanted, "another layout: write the new one down here, too"
    assert exported(cache, pool, 2).tobytes() == expected(cache, pool, 2)


def test_packed_rows_have_the_released_sizes() -> None:
    """Window FP8 with a scale for 32, compressed FP4 with one for 16, keys FP4 with one for 32."""
    made = make_cache(packed=True)
    dim, key = made.config.head_dim, made.config.index_head_dim
    assert made.window.shape[2] == dim + dim // 32
    assert {rows.shape[1] for rows in made.compressed.values()} == {dim // 2 + dim // 16}
    assert {rows.shape[1] for rows in made.index_keys.values()} == {key // 2 + key // 32}


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


@pytest.mark.parametrize(("numerics", "packed"), [("fp32", True), ("exact", False)])
def test_the_layout_is_part_of_the_fingerprint(numerics: str, packed: bool) -> None:
    config = load_mesh_config(None)
    capacity = ModelEngine(config).load(Load(1, 0, 1, str(MODEL), numerics), lambda *_: None)
    assert capacity.block_bytes == KvCache.block_bytes(load_config(MODEL), packed=packed)
    assert capacity.fingerprint == fingerprint(MODEL, numerics, f"cpu {layout(packed=packed)}")
    assert capacity.fingerprint != fingerprint(MODEL, numerics, "cpu f32-0")
