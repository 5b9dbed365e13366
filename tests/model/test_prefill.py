"""Prompt chunks on a GPU: their index tensors (anywhere), results and bits (on a device)."""

import functools

import pytest
import torch
from torch import Tensor

from services.executor.batch import BatchRow, StepBatch
from services.executor.gpu.model import DeviceModel
from services.executor.gpu.prefill_plan import MAX_SLICE, PrefillPlanner, PrefillStep, token_slices
from services.executor.gpu.random_model import random_device_model
from services.executor.gpu.step import DeviceStep, to_device
from services.executor.kv_cache import KvCache
from services.executor.model_config import load_config
from services.executor.models.engram import last_compressed_ids
from services.executor.models.plan import Ropes, plan_step
from tests.model.driving import FIXTURE, Request, random_ids, run_steps, same_bits
from tests.model.test_device_model import small_flash

ROWS = [
    BatchRow([5, 6, 7, 8, 9] * 25, 0, [4, 2], [1, 3], 0),
    BatchRow([11, 12], 105, [-1, 0], [5, 0], 1, context=[9, 8, 7]),
    BatchRow([3, 4, 5], 64, [0, 5], [6, 7], 2, context=[1, 2, 3], num_logits=2),
]


def both_plans(rows: list[BatchRow]) -> tuple[PrefillStep, DeviceStep]:
    """By the planner, and as all other forwards have it."""
    config = load_config(FIXTURE)
    cache, batch = KvCache(config, 8, 8, 4), StepBatch.build(rows)
    plan = plan_step(batch, cache, config, Ropes(config))
    table = torch.arange(config.vocab_size)
    last = last_compressed_ids(batch, table, plan.row_of, config.engram_max_ngram_size)
    planner = PrefillPlanner(config, Ropes(config), torch.device("cpu"))
    null_row = cache.window.shape[1] - 1
    return planner(batch, last), to_device(plan, torch.device("cpu"), torch.int32, null_row)


def test_plans_are_those_of_other_forwards() -> None:
    ours, wanted = both_plans(ROWS)
    assert ours.ids.tolist() == [5, 6, 7, 8, 9] * 25 + [11, 12, 3, 4, 5]
    assert ours.logit_tokens.tolist() == [124, 126, 128, 129]
    assert ours.last_ids[125].tolist() == [11, 7, 8, 9]
    assert torch.equal(ours.window_slots, wanted.window_slots)
    assert torch.equal(ours.window_writes, wanted.window_writes)
    for mine, other in zip(
        (*ours.plain, *ours.compressed), (*wanted.plain, *wanted.compressed), strict=True
    ):
        assert torch.equal(mine, other)
    assert ours.ratios.keys() == wanted.ratios.keys() == {1, 2}
    for ratio, mine in ours.ratios.items():
        other = wanted.ratios[ratio]
        assert torch.equal(mine.ending, other.ending)
        assert torch.equal(mine.write_slots, other.write_slots)
        assert torch.equal(mine.angles[0], other.angles[0])
        assert torch.equal(mine.angles[1], other.angles[1])
        chosen = torch.cat([group.tokens for group in other.groups])
        assert torch.equal((mine.visible > 16).nonzero().squeeze(1), chosen)
        assert [(part.first, part.last) for part in mine.slices] == [(0, 130)]
    pairs = zip(vars(ours.pairs).values(), vars(wanted.pairs).values(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_tokens_are_scored_together_as_memory_allows() -> None:
    assert token_slices([]) == []
    many = token_slices([1] * (MAX_SLICE + 1))
    assert [(part.first, part.last, part.num_keys) for part in many] == [
        (0, MAX_SLICE, 1),
        (MAX_SLICE, MAX_SLICE + 1, 1),
    ]
    wide = token_slices([1 << 16] * 1000 + [1 << 17] * 600)
    assert [(part.first, part.last) for part in wide] == [(0, 1000), (1000, 1512), (1512, 1600)]
    assert [part.num_keys for part in wide] == [1 << 16, 1 << 17, 1 << 17]


def prefill_logits(ids: list[int], steps: list[list[tuple[int, int]]]) -> tuple[Tensor, KvCache]:
    """Of one request in chunks, with all that it left behind."""
    model = flash()
    assert model.prefill is not None
    cache = KvCache(model.config, 9, 9, 2, device="cuda")
    request = Request(ids, [4, 2, 0, 1, 3, 8, 7], [3, 1, 2, 0, 4, 5, 6], 1)
    return run_steps(model.prefill, cache, [request], steps)[0].logits.cpu(), cache


@functools.cache
def flash() -> DeviceModel:
    """The shapes that the kernels were made for."""
    return random_device_model(small_flash())


@pytest.mark.gpu
def test_a_prompt_has_the_same_bits_in_any_chunks() -> None:
    ids = random_ids(400, seed=3)
    whole, held = prefill_logits(ids, [])
    assert bool(whole.isfinite().all())
    for steps in ([[(0, 128)]] * 4, [[(0, 1)], [(0, 130)], [(0, 64)]]):
        again, cache = prefill_logits(ids, steps)
        assert same_bits(again, whole)
        for ours, other in zip(cache.compressed.values(), held.compressed.values(), strict=True):
            assert torch.equal(ours, other)
        for ours, other in zip(cache.index_keys.values(), held.index_keys.values(), strict=True):
            assert torch.equal(ours, other)
        assert torch.equal(cache.window, held.window)
        assert torch.equal(cache.pairs, held.pairs)


@pytest.mark.gpu
def test_a_prompt_is_what_the_decode_kernels_make_of_it() -> None:
    ids = random_ids(400, seed=4)
    ours, _ = prefill_logits(ids, [])
    model = flash()
    cache = KvCache(model.config, 9, 9, 2, device="cuda")
    request = Request(ids, [4, 2, 0, 1, 3, 8, 7], [3, 1, 2, 0, 4, 5, 6], 1)
    wanted = run_steps(model, cache, [request], [])[0].logits
    errors = (ours - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < 0.3  # see test_device_model.py: ties change experts


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    model = flash()
    assert model.prefill is not None
    cache = KvCache(model.config, 9, 9, 2, device="cuda")
    batch = StepBatch.build([Request(random_ids(200, 5), range(4), range(4), 0).row(200, 1)])
    wanted = model.prefill.forward(batch, cache).logits.cpu()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = model.prefill.forward(batch, cache).logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(again.cpu(), wanted)
