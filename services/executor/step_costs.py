"""What steps take on this machine, measured once the weights are there: by it chunks are sized."""

import time
from collections.abc import Callable

import numpy as np
import torch

from deepmesh.wire.messages import StepCosts
from services.executor.batch import BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.models.outputs import StepOutput

ROWS = 16  # of the larger decode step
CONTEXT = 512  # positions before all rows
CHUNK = 16  # tokens of the prompt beside them
REPEATS = 5
ENOUGH_S = 0.5  # a measurement that took so long is not repeated

Forward = Callable[[StepBatch, KvCache], StepOutput]


@torch.inference_mode()
def measure_costs(
    config: ModelConfig, forward: Forward, *, packed: bool = True, device: str = "cpu"
) -> StepCosts:
    """Costs of decode rows, and of prefill beside them, on a cache of their own: what it holds does
    not matter, what is read of it does.

    The best of a few repetitions: what others do to the machine at the same time is no property
    of the model.
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

    decodes = [row(index, CONTEXT, 1) for index in range(ROWS)]
    one, many = best_ns(decodes[:1]), best_ns(decodes)
    mixed = best_ns([*decodes, row(ROWS, CONTEXT, CHUNK)])
    each = max(0, many - one) // (ROWS - 1)
    return StepCosts(
        base_ns=max(0, one - each),
        prefill_token_ns=max(1, (mixed - many) // CHUNK),
        decode_row_ns=each,
    )


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
