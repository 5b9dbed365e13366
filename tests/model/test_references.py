"""The whole model without native kernels: what a machine without a compiler runs."""

from collections.abc import Iterator

import pytest
import torch

from kernels import native
from kernels.quant.linear import Kind
from services.executor.models.outputs import DraftBatch
from services.executor.weights import load_model
from tests.model.driving import (
    FIXTURE,
    Request,
    alone,
    cache_for,
    fixture_model,
    poisoned_cache,
    random_ids,
    relative,
    run_steps,
    same_bits,
)


@pytest.fixture(autouse=True)
def _references() -> Iterator[None]:
    native.use(native.REFERENCE)
    yield
    native.use()


@pytest.mark.parametrize("numerics", ["exact", "bf16"])
def test_references_and_native_kernels_agree(numerics: str) -> None:
    model, ids = load_model(FIXTURE, numerics), random_ids(90, seed=0)
    assert model.weights.head.kind is Kind.PLAIN
    found = alone(model, ids)
    cache = poisoned_cache(model, 2, 2, 1)
    steps = [[(0, width)] for width in (64, 1, 1, 3)]
    stepped = run_steps(model, cache, [Request(ids, [1, 0], [0, 1], 0)], steps)[0]
    assert same_bits(stepped.logits, found.logits)
    native.use()
    wanted = alone(fixture_model(numerics), ids)
    if numerics == "exact":
        assert relative(found.logits, wanted.logits) < 1e-4
    else:  # roundings cascade, and experts flip, on a random model
        assert found.logits.isfinite().all()


def test_drafts_by_references() -> None:
    model = load_model(FIXTURE, "exact")
    cache = cache_for(model, 1, 1, 1)
    ids = random_ids(20, seed=0)
    run_steps(model, cache, [Request(ids, [0], [0], 0)], [])
    blocks = torch.zeros(1, 1, dtype=torch.int32)
    draft = model.draft(DraftBatch(torch.tensor([7]), torch.tensor([20]), blocks), cache)
    assert draft.logits.isfinite().all()
