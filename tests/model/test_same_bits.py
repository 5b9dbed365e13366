"""The contract that all else rests on: a request's bits depend on its own ids alone."""

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepmesh.wire.messages import Pool
from services.executor.batch import StepBatch
from services.executor.models.outputs import DraftBatch
from tests.model.driving import (
    Outputs,
    Request,
    alone,
    cache_for,
    fixture_model,
    poisoned_cache,
    random_ids,
    run_steps,
    same_bits,
)

LENGTHS = (90, 77, 41)
NUMERICS = ("exact", "fp32", "bf16")
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))

widths = st.sampled_from([1, 1, 2, 3, 5, 8, 9, 16, 17, 33, 64])
steps = st.lists(
    st.lists(
        st.tuples(st.integers(0, 2), widths), min_size=1, max_size=3, unique_by=lambda x: x[0]
    ),
    max_size=12,
)


def requests(order: Sequence[int]) -> list[Request]:
    """Three requests of two blocks each; `order` scatters the blocks of every pool."""
    return [
        Request(
            random_ids(length, seed=index),
            global_blocks=order[2 * index : 2 * index + 2],
            window_blocks=order[::-1][2 * index : 2 * index + 2],
            state_block=order[index],
        )
        for index, length in enumerate(LENGTHS)
    ]


@functools.cache
def reference(numerics: str) -> list[Outputs]:
    """Each request alone and whole."""
    model = fixture_model(numerics)
    return [alone(model, random_ids(n, seed=index)) for index, n in enumerate(LENGTHS)]


def check(numerics: str, found: list[Outputs]) -> None:
    for ours, wanted in zip(found, reference(numerics), strict=True):
        assert wanted.logits.isfinite().all()
        assert same_bits(ours.logits, wanted.logits)
        assert same_bits(ours.features, wanted.features)


@pytest.mark.parametrize("numerics", NUMERICS)
@given(steps=steps, order=st.permutations(range(6)))
@few
def test_any_mixture_of_rows(
    numerics: str, steps: list[list[tuple[int, int]]], order: list[int]
) -> None:
    cache = poisoned_cache(fixture_model(numerics), 6, 6, 6)
    check(numerics, run_steps(fixture_model(numerics), cache, requests(order), steps))


@pytest.mark.parametrize("numerics", NUMERICS)
def test_token_by_token(numerics: str) -> None:
    cache = poisoned_cache(fixture_model(numerics), 6, 6, 6)
    one_each = [[(0, 1), (1, 1), (2, 1)]] * max(LENGTHS)
    check(numerics, run_steps(fixture_model(numerics), cache, requests(range(6)), one_each))


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_request_goes_on_in_copied_blocks(numerics: str) -> None:
    model = fixture_model(numerics)
    cache = poisoned_cache(model, 4, 4, 2)
    request = Request(random_ids(90, seed=0), [0, 1], [0, 1], 0)
    head = model.forward(StepBatch.build([request.row(67)]), cache)
    for pool, pairs in (
        (Pool.GLOBAL, [(0, 2), (1, 3)]),
        (Pool.WINDOW, [(0, 3), (1, 2)]),
        (Pool.STATE, [(0, 1)]),
    ):
        for src, dst in pairs:
            cache.copy_block(pool, src, dst)
            cache.poison_block(pool, src)
    moved = Request(request.ids, [2, 3], [3, 2], 1, done=67)
    tail = model.forward(StepBatch.build([moved.row(23)]), cache)
    wanted = reference(numerics)[0]
    assert same_bits(torch.cat((head.logits, tail.logits)), wanted.logits)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("length", [1, 2, 40, 41, 90])
def test_the_last_position_of_a_row_may_be_computed_again(numerics: str, length: int) -> None:
    """As for a row that missed its mask; whole prompts end in open groups and in complete ones."""
    model = fixture_model(numerics)
    cache = poisoned_cache(model, 2, 2, 1)
    request = Request(random_ids(90, seed=0), [0, 1], [0, 1], 0)
    model.forward(StepBatch.build([request.row(length)]), cache)
    request.done = length - 1
    for _ in range(2):
        again = model.forward(StepBatch.build([request.row(1)]), cache)
        assert same_bits(again.logits[0], reference(numerics)[0].logits[length - 1])
    request.done = length
    if length < 90:
        rest = model.forward(StepBatch.build([request.row(90 - length)]), cache)
        assert same_bits(rest.logits, reference(numerics)[0].logits[length:])


def test_window_blocks_behind_the_window_may_be_gone() -> None:
    model = fixture_model("fp32")
    ids = random_ids(150, seed=7)
    wanted = alone(model, ids)
    cache = poisoned_cache(model, 3, 3, 1)
    request = Request(ids, [0, 1, 2], [0, 1, 2], 0)
    model.forward(StepBatch.build([request.row(145)]), cache)
    request.done = 145  # window of 16: rows from 130 on, all in block 2
    cache.poison_block(Pool.WINDOW, 0)
    cache.poison_block(Pool.WINDOW, 1)
    request.window_blocks = [-1, -1, 2]
    tail = model.forward(StepBatch.build([request.row(5)]), cache)
    assert same_bits(tail.logits, wanted.logits[145:])


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_request_that_is_not_finite_fails_alone(numerics: str) -> None:
    model = fixture_model(numerics)
    cache = cache_for(model, 6, 6, 6)
    three = requests(range(6))
    model.forward(StepBatch.build([request.row(40) for request in three]), cache)
    for request in three:
        request.done = 40
    cache.poison_block(Pool.WINDOW, three[1].window_blocks[0])
    cache.poison_block(Pool.GLOBAL, three[1].global_blocks[0])
    out = model.forward(StepBatch.build([request.row(1) for request in three]), cache)
    assert out.logits.isfinite().all(1).tolist() == [True, False, True]
    for index in (0, 2):
        assert same_bits(out.logits[index], reference(numerics)[index].logits[40])


def test_two_threads_give_the_same_bits() -> None:
    model = fixture_model("bf16")
    ids = random_ids(40, seed=3)
    wanted = alone(model, ids)
    torch.set_num_threads(2)
    try:
        found = alone(model, ids)
    finally:
        torch.set_num_threads(1)
    assert same_bits(found.logits, wanted.logits)


def test_only_the_logits_asked_for() -> None:
    model = fixture_model("fp32")
    wanted = reference("fp32")
    cache = cache_for(model, 6, 6, 6)
    three = requests(range(6))
    rows = [three[0].row(90, num_logits=0), three[1].row(77, 1), three[2].row(41, 3)]
    out = model.forward(StepBatch.build(rows), cache)
    assert same_bits(out.logits, torch.cat((wanted[1].logits[-1:], wanted[2].logits[-3:])))


@pytest.mark.parametrize("numerics", NUMERICS)
def test_drafts_do_not_depend_on_batch_mates(numerics: str) -> None:
    model = fixture_model(numerics)
    cache = cache_for(model, 6, 6, 6)
    three = requests([4, 2, 0, 5, 3, 1])
    batch = StepBatch.build([request.row(len(request.ids)) for request in three])
    model.forward(batch, cache)
    anchors = torch.tensor([11, 12, 13])
    positions = torch.tensor(LENGTHS)
    together = model.draft(DraftBatch(anchors, positions, batch.window_blocks), cache)
    logits = together.logits.clone()  # the next pass overwrites them
    for row in range(3):
        part = slice(row, row + 1)
        single = DraftBatch(anchors[part], positions[part], batch.window_blocks[part])
        found = model.draft(single, cache)
        assert same_bits(found.logits, logits[part])
        assert same_bits(found.confidence, together.confidence[part])
        assert torch.equal(found.ids, together.ids[part])
    assert logits.isfinite().all()


def test_a_draft_early_in_a_request_sees_fewer_rows() -> None:
    model = fixture_model("exact")
    cache = poisoned_cache(model, 1, 1, 1)
    request = Request(random_ids(3, seed=1), [0], [0], 0)
    batch = StepBatch.build([request.row(3)])
    model.forward(batch, cache)
    out = model.draft(DraftBatch(torch.tensor([9]), torch.tensor([3]), batch.window_blocks), cache)
    assert out.logits.isfinite().all()


def test_an_empty_batch() -> None:
    model = fixture_model("bf16")
    out = model.forward(StepBatch.build([]), cache_for(model, 1, 1, 1))
    assert out.logits.shape == (0, model.config.vocab_size)
