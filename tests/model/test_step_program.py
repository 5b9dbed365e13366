"""A step as one program has the bits of its operations one by one, whatever runs beside it."""

import pytest
import torch
from torch import Tensor

from deepmesh.wire.messages import Pool
from kernels import native
from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.weights import load_model
from tests.model.driving import (
    FIXTURE,
    Request,
    cache_for,
    fixture_model,
    poisoned_cache,
    random_ids,
    same_bits,
)

NUMERICS = ("exact", "fp32", "bf16")
STEPS = [[40, 1, 17], [1, 64, 1], [1, 1, 1], [30, 0, 41], [2, 3, 5]]


def three() -> list[Request]:
    """Long enough for the indexer to leave entries out, at both ratios."""
    return [
        Request(random_ids(90, seed=i), [2 * i, 2 * i + 1], [2 * i + 1, 2 * i], i) for i in range(3)
    ]


def ignore(name: str, value: Tensor) -> None:
    """A tap: with one, operations run one by one."""


def cached_bytes(cache: KvCache) -> Tensor:
    parts = [cache.window, *cache.compressed.values(), *cache.index_keys.values(), cache.pairs]
    return torch.cat([part.view(torch.uint8).flatten() for part in parts])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_logits_features_and_caches_are_those_of_single_operations(
    numerics: str, threads: int
) -> None:
    model = fixture_model(numerics)
    caches = [poisoned_cache(model, 6, 6, 3) for _ in range(2)]
    requests = three()
    torch.set_num_threads(threads)
    try:
        for widths in STEPS:
            parts = [(r, w) for r, w in zip(requests, widths, strict=True) if w]
            batch = StepBatch.build([request.row(width) for request, width in parts])
            found = model.forward(batch, caches[0])
            wanted = model.forward(batch, caches[1], tap=ignore)
            assert wanted.logits.isfinite().all()
            assert same_bits(found.logits, wanted.logits)
            assert same_bits(found.features, wanted.features)
            assert torch.equal(*[cached_bytes(cache) for cache in caches])
            for request, width in parts:
                request.done += width
    finally:
        torch.set_num_threads(1)


def test_a_larger_step_and_another_cache_get_a_program_of_their_own() -> None:
    model = fixture_model("bf16")
    ids = random_ids(120, seed=5)
    outputs: list[Tensor] = []
    for width in (120, 3, 120):
        cache = cache_for(model, 2, 2, 1)
        batch = StepBatch.build([Request(ids, [0, 1], [1, 0], 0).row(width)])
        outputs.append(model.forward(batch, cache).logits)
    assert same_bits(outputs[0], outputs[2])
    assert same_bits(outputs[0][:3], outputs[1])


def test_outputs_of_a_step_outlive_the_next_one() -> None:
    model = fixture_model("bf16")
    cache = cache_for(model, 6, 6, 3)
    requests = three()
    first = model.forward(StepBatch.build([requests[0].row(5)]), cache)
    kept = first.logits.clone(), first.features.clone()
    model.forward(StepBatch.build([requests[1].row(5)]), cache)
    assert same_bits(first.logits, kept[0])
    assert same_bits(first.features, kept[1])


@pytest.mark.parametrize("level", native.supported_levels())
def test_every_instruction_level_gives_the_same_step(level: str) -> None:
    batch = StepBatch.build([request.row(90) for request in three()])
    wanted = fixture_model("bf16").forward(batch, cache_for(fixture_model("bf16"), 6, 6, 3))
    native.use(level)
    try:
        model = load_model(FIXTURE, "bf16")
        found = model.forward(batch, cache_for(model, 6, 6, 3))
    finally:
        native.use()
    assert same_bits(found.logits, wanted.logits)


@pytest.mark.parametrize(("numerics", "packed"), [("exact", True), ("bf16", False)])
def test_rows_of_the_wrong_kind_are_refused(numerics: str, packed: bool) -> None:
    model: DeepseekV41 = fixture_model(numerics)
    cache = KvCache(model.config, 1, 1, 1, packed=packed)
    with pytest.raises(ValueError, match=f"numerics {numerics}: the cache holds"):
        model.forward(StepBatch.build([Request([5], [0], [0], 0).row(1)]), cache)


def test_blocks_of_other_requests_are_not_looked_at() -> None:
    model = fixture_model("bf16")
    clean, dirty = cache_for(model, 6, 6, 3), poisoned_cache(model, 6, 6, 3)
    dirty.zero_block(Pool.STATE, 0)
    batch = StepBatch.build([three()[0].row(70)])
    assert same_bits(model.forward(batch, clean).logits, model.forward(batch, dirty).logits)
