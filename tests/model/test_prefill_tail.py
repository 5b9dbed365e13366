"""A prompt that leaves out the upper layers where nothing depends on them: the same bits."""

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.executor.batch import BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.models.outputs import StepOutput
from services.executor.prefill_tail import bounded_halo, exact_halo
from tests.model.driving import fixture_model, poisoned_cache, random_ids, same_bits

BLOCK = 64
LENGTH, MORE = 550, 12  # of the prompt, and tokens behind it
BLOCKS = -(-(LENGTH + MORE) // BLOCK)
NUMERICS = ("exact", "fp32", "bf16")


class Prompt:
    """One request over blocks of its own; `tail`: the first position of the upper layers."""

    def __init__(self, model: DeepseekV41, seed: int, at: int = 0) -> None:
        self.model, self.at = model, at
        self.ids = random_ids(LENGTH + MORE, seed)

    def row(self, start: int, end: int, tail: int = 0, *, sees_from: int = 0) -> BatchRow:
        """Positions start..end, of which those below `tail` leave out the upper layers."""
        own = range(self.at * BLOCKS, (self.at + 1) * BLOCKS)
        skip = max(0, min(tail, end) - start)
        return BatchRow(
            ids=self.ids[start:end],
            start=start,
            global_blocks=own,
            window_blocks=own,
            state_block=self.at,
            context=self.ids[max(0, start - 3) : start],
            num_logits=1 if skip < end - start else 0,
            skip=skip,
            window_from=sees_from or (start + skip if skip else 0),
        )


def run(model: DeepseekV41, cache: KvCache, rows: Sequence[BatchRow]) -> StepOutput:
    return model.forward(StepBatch.build(rows, model.config.context_ids), cache)


def tail_of(model: DeepseekV41, end: int = LENGTH) -> int:
    return max(0, end - exact_halo(model.config)) // BLOCK * BLOCK


def decode(model: DeepseekV41, cache: KvCache, prompt: Prompt) -> list[Tensor]:
    rows = [prompt.row(at, at + 1) for at in range(LENGTH, LENGTH + MORE)]
    return [run(model, cache, [row]).logits for row in rows]


@functools.cache
def whole(numerics: str, seed: int) -> list[Tensor]:
    """Logits at the end of the prompt, and of each token behind, with every layer everywhere."""
    model = fixture_model(numerics)
    cache, prompt = poisoned_cache(model, BLOCKS, BLOCKS, 1), Prompt(model, seed)
    return [run(model, cache, [prompt.row(0, LENGTH)]).logits, *decode(model, cache, prompt)]


def check(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert wanted[0].isfinite().all()
    for ours, theirs in zip(found, wanted, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("numerics", NUMERICS)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5))
@settings(max_examples=6, deadline=None)
def test_however_a_prompt_is_cut_its_tail_has_the_bits_of_the_whole(
    numerics: str, cuts: set[int]
) -> None:
    model = fixture_model(numerics)
    tail = tail_of(model)
    assert 0 < tail < LENGTH
    cache, prompt = poisoned_cache(model, BLOCKS, BLOCKS, 1), Prompt(model, 1)
    ends, outputs = [*sorted(cuts), LENGTH], list[StepOutput]()
    for start, end in zip([0, *ends], ends, strict=False):
        sees = tail if start >= tail else 0
        outputs.append(run(model, cache, [prompt.row(start, end, tail, sees_from=sees)]))
    check([outputs[-1].logits, *decode(model, cache, prompt)], whole(numerics, 1))


@pytest.mark.parametrize("numerics", NUMERICS)
def test_beside_rows_that_run_every_layer(numerics: str) -> None:
    model = fixture_model(numerics)
    cache = poisoned_cache(model, 3 * BLOCKS, 3 * BLOCKS, 3)
    prompts = [Prompt(model, seed, at) for at, seed in enumerate((1, 2, 3))]
    tail = tail_of(model)
    run(model, cache, [prompts[1].row(0, LENGTH)])
    run(model, cache, [prompts[0].row(0, 128, tail), prompts[2].row(0, 50)])
    mixed = run(
        model,
        cache,
        [
            prompts[1].row(LENGTH, LENGTH + 1),
            prompts[0].row(128, LENGTH, tail),
            prompts[2].row(50, LENGTH),
        ],
    ).logits
    wanted = [whole(numerics, seed) for seed in (1, 2, 3)]
    check([mixed[0:1], mixed[1:2], mixed[2:3]], [wanted[1][1], wanted[0][0], wanted[2][0]])
    check(decode(model, cache, prompts[0]), wanted[0][1:])
    check(decode(model, cache, prompts[2]), wanted[2][1:])


def test_a_bounded_tail_is_near_and_no_more() -> None:
    """What is left out by the exact halo is not more than needed: a block less changes bits."""
    model = fixture_model("fp32")
    cache, prompt = poisoned_cache(model, BLOCKS, BLOCKS, 1), Prompt(model, 1)
    tail = (LENGTH - bounded_halo(model.config)) // BLOCK * BLOCK
    assert tail == tail_of(model) + BLOCK
    output = run(model, cache, [prompt.row(0, LENGTH, tail)])
    found, wanted = [output.logits, *decode(model, cache, prompt)], whole("fp32", 1)
    errors = torch.stack(found) - torch.stack(wanted)
    assert 0 < errors.abs().max().item() < wanted[0].std().item()
