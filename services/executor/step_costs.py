"""What steps take on this machine, measured once the weights are there: by it chunks are sized."""

import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from deepmesh.wire.messages import StepCosts
from services.executor.batch import BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.models.outputs import DraftBatch, StepOutput

ROWS = 16  # of the larger decode step
CONTEXT = 512  # positions before all rows
CHUNK = 16  # tokens of the prompt beside them
REPEATS = 5
ENOUGH_S = 0.5  # a measurement that took so long is not repeated

VERIFIED = (1, 2, 4, 8, 16, 32, 64)  # tokens of the steps that show what drafts cost to verify
TIER_RATIO = 1.15  # of one tier of verified tokens to the next, from which on they are sparser

Forward = Callable[[StepBatch, KvCache], StepOutput]
Draft = Callable[[DraftBatch, KvCache], object]


@torch.inference_mode()
def measure_costs(
    config: ModelConfig,
    forward: Forward,
    *,
    packed: bool = True,
    device: str = "cpu",
    draft: Draft | None = None,
    most_verified: int = 0,
) -> StepCosts:
    """Costs of decode rows, and of prefill beside them, on a cache of their own: what it holds does
    not matter, what is read of it does.

    The best of a few repetitions: what others do to the machine at the same time is no property
    of the model.

    Args:
        draft: the model's draft pass, if drafts are to be verified.
        most_verified: tokens of a step of drafts and the tokens before them.
    """
    last = CONTEXT + CHUNK
    blocks = -(-last // BLOCK_TOKENS)
    count = (ROWS + 1) * blocks
    cache = KvCache(config, count, count, ROWS + 1, packed=packed, device=device)
    is_own = device == "cpu" and torch.get_num_threads() == 1
    draw = np.random.default_rng(0)

    def row(index: int, start: int, width: int) -> BatchRow:
        own = range(index * blocks, (index + 1) * blocks)
        ids = draw.integers(0, config.vocab_size, width + config.context_ids).astype(np.int32)
        return BatchRow(
            ids=ids[config.context_ids :],
            start=start,
            global_blocks=own,
            window_blocks=own,
            state_block=index,
            context=ids[: config.context_ids] if start else (),
        )

    def best_ns(rows: list[BatchRow]) -> int:
        batch = StepBatch.build(rows, config.context_ids)
        return min(_times(lambda: forward(batch, cache), is_own=is_own))

    def drafts_ns(draft: Draft, num: int) -> int:
        table = torch.arange(num * blocks, dtype=torch.int32).view(num, blocks)
        given = DraftBatch(torch.zeros(num).long(), torch.full((num,), CONTEXT), table)
        return min(_times(lambda: draft(given, cache), is_own=is_own))

    decodes = [row(index, CONTEXT, 1) for index in range(ROWS)]
    one, many = best_ns(decodes[:1]), best_ns(decodes)
    mixed = best_ns([*decodes, row(ROWS, CONTEXT, CHUNK)])
    each = max(0, many - one) // (ROWS - 1)
    costs = StepCosts(
        base_ns=max(0, one - each),
        prefill_token_ns=max(1, (mixed - many) // CHUNK),
        decode_row_ns=each,
    )
    if draft is None:
        return costs
    measured = [
        (tokens, best_ns([row(i, CONTEXT, -(-tokens // ROWS)) for i in range(min(tokens, ROWS))]))
        for tokens in VERIFIED
    ]
    few, all_rows = drafts_ns(draft, 1), drafts_ns(draft, ROWS)
    row_ns = max(0, all_rows - few) // (ROWS - 1)
    return msgspec.structs.replace(
        costs,
        verify=verify_tiers(measured, most_verified),
        draft_base_ns=max(0, few - row_ns),
        draft_row_ns=row_ns,
    )


def verify_tiers(measured: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """StepCosts.verify up to `most` tokens: every number of them at first, then some; along lines
    through what was measured, which never fall."""
    tokens = [1]
    while tokens[-1] < most:
        tokens.append(min(most, max(tokens[-1] + 1, int(tokens[-1] * TIER_RATIO))))
    at = np.array([count for count, _ in measured], np.float64)
    times = np.maximum.accumulate([float(ns) for _, ns in measured])
    slope = (times[-1] - times[0]) / (at[-1] - at[0])
    found = np.interp(tokens, at, times) + slope * np.maximum(0, np.array(tokens) - at[-1])
    return [(count, int(ns)) for count, ns in zip(tokens, found.tolist(), strict=True)]


def _times(work: Callable[[], object], *, is_own: bool) -> list[int]:
    """Nanoseconds of a few runs, the first one, which may allocate, among them.

    A thread's CPU time is its own, whoever else has the core meanwhile; where there are several,
    or a device, only the clock says it all.

    Args:
        is_own: this thread alone does the work.
    """
    clock_ns = time.thread_time_ns if is_own else time.perf_counter_ns
    found: list[int] = []
    began = time.perf_counter()
    while len(found) < REPEATS and (not found or time.perf_counter() - began < ENOUGH_S):
        start = clock_ns()
        work()
        found.append(clock_ns() - start)
    return found
