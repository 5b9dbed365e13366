"""What the executor says its steps cost: recovered from a model whose costs are known."""

import time

import pytest
import torch

from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import load_config
from services.executor.models.outputs import StepOutput
from services.executor.step_costs import CHUNK, ROWS, measure_costs
from tests.tiny import MODEL_FOLDER

MS = 1_000_000


@pytest.mark.parametrize(("row_ns", "token_ns"), [(MS // 10, MS // 5), (MS // 5, MS // 20)])
def test_costs_are_those_of_rows_and_of_prompt_tokens_beside_them(
    row_ns: int, token_ns: int
) -> None:
    torch.set_num_threads(1)
    widths: set[tuple[int, int]] = set()

    def forward(batch: StepBatch, cache: KvCache) -> StepOutput:
        """Works for 1 ms, and for what its rows are said to cost."""
        extra = batch.num_tokens - batch.num_rows
        is_mixed = extra > 0
        rows, tokens = batch.num_rows - is_mixed, extra + is_mixed
        widths.add((rows, tokens))
        until = time.thread_time_ns() + MS + rows * row_ns + tokens * token_ns
        while time.thread_time_ns() < until:
            pass
        return StepOutput(torch.zeros(0), torch.zeros(0))

    costs = measure_costs(load_config(MODEL_FOLDER), forward)
    assert widths == {(1, 0), (ROWS, 0), (ROWS, CHUNK)}
    assert costs.base_ns == pytest.approx(MS, rel=0.2)
    assert costs.decode_row_ns == pytest.approx(row_ns, rel=0.2)
    assert costs.prefill_token_ns == pytest.approx(token_ns, rel=0.2)
