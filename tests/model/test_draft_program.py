"""A draft pass as one program has the bits of its operations one by one."""

import pytest
import torch
from torch import Tensor

from kernels.sampling.draws import Draws
from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.models.outputs import DraftBatch, DraftOutput
from tests.model.driving import (
    Request,
    fixture_model,
    poisoned_cache,
    random_ids,
    same_bits,
)

LENGTHS = (90, 17, 3, 1)  # the window is whole, just so, and not
DRAWS = Draws(
    temperature=torch.tensor([0.0, 0.8, 1.3, 1.0]),
    top_k=torch.tensor([0, 7, 0, 0]),
    top_p=torch.tensor([1.0, 1.0, 0.9, 1.0]),
    min_p=torch.tensor([0.0, 0.0, 0.0, 0.02]),
    seed=torch.tensor([5, 6, 7, 8]),
    sub_index=torch.tensor([0, 1, 0, 3]),
    position=torch.tensor([length + 1 for length in LENGTHS]),
)


def ignore(name: str, value: Tensor) -> None:
    """A tap: with one, operations run one by one."""


def fed(numerics: str) -> tuple[DeepseekV41, KvCache, DraftBatch]:
    """Requests whose next token is sampled, and nothing sound beyond them in the cache."""
    model = fixture_model(numerics)
    cache = poisoned_cache(model, 8, 8, 4)
    requests = [
        Request(random_ids(length, seed=length), [2 * i, 2 * i + 1], [2 * i + 1, 2 * i], i)
        for i, length in enumerate(LENGTHS)
    ]
    batch = StepBatch.build([request.row(len(request.ids)) for request in requests])
    model.forward(batch, cache)
    anchors, positions = torch.tensor([11, 12, 13, 14]), torch.tensor(LENGTHS)
    return model, cache, DraftBatch(anchors, positions, batch.window_blocks)


def same(found: DraftOutput, wanted: DraftOutput) -> bool:
    return (
        torch.equal(found.ids, wanted.ids)
        and same_bits(found.logits.contiguous(), wanted.logits.contiguous())
        and same_bits(found.confidence, wanted.confidence)
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("numerics", ["exact", "fp32", "bf16"])
@pytest.mark.parametrize("draws", [None, DRAWS], ids=["likeliest", "drawn"])
def test_drafts_are_those_of_single_operations(
    numerics: str, threads: int, draws: Draws | None
) -> None:
    model, cache, batch = fed(numerics)
    kept = cache.window.clone()
    torch.set_num_threads(threads)
    try:
        for places in (None, 1, 3):
            found = model.draft(batch, cache, draws, places)
            wanted = model.draft(batch, cache, draws, places, tap=ignore)
            assert wanted.logits.isfinite().all()
            assert found.ids.shape == (len(LENGTHS), places or model.config.dspark_block_size)
            assert same(found, wanted)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(cache.window.view(torch.uint8), kept.view(torch.uint8))


def test_rows_of_a_larger_pass_than_before_and_of_a_smaller_one() -> None:
    model, cache, batch = fed("bf16")
    times = 9
    many = DraftBatch(
        batch.anchors.repeat(times),
        batch.positions.repeat(times),
        batch.window_blocks.repeat(times, 1),
    )
    first = model.draft(batch, cache)
    wanted = first.ids.clone(), first.logits.clone()
    large = model.draft(many, cache)
    assert torch.equal(large.ids, wanted[0].repeat(times, 1))
    assert same_bits(large.logits.contiguous(), wanted[1].repeat(times, 1, 1))
    again = model.draft(batch, cache)
    assert torch.equal(again.ids, wanted[0])
    assert same_bits(again.logits.contiguous(), wanted[1])


def test_without_rows() -> None:
    model, cache, _ = fed("bf16")
    none = torch.zeros(0, dtype=torch.int64)
    out = model.draft(DraftBatch(none, none, torch.zeros(0, 1, dtype=torch.int32)), cache)
    assert out.ids.shape == (0, model.config.dspark_block_size)
