"""Attention of a step: tokens of one prompt share what they look at, and have their bits alone."""

import pytest
import torch
from torch import Tensor

from kernels.attention.pools import RowFormat, RowPool
from kernels.step.program import Program, can_record
from kernels.step.recorder import Choice, Recorder
from kernels.step.step import Step

DIM, WINDOW, TOP_K, ROPE_DIM = 64, 32, 16, 16
FIRST, LAST = 20, 75  # positions of the prompt: some have no whole window yet
BLOCK_TOKENS = 64
WINDOW_BLOCKS, GLOBAL_BLOCKS = (1, 0), (0, 2)

pytestmark = pytest.mark.skipif(not can_record(), reason="programs need the native kernels")


def pool(row_format: RowFormat, rows: int) -> RowPool:
    """Random codes, scales around one, some values of each row below the normal ones."""
    width = row_format.row_bytes(DIM)
    data = torch.randint(0, 256, (rows, width), dtype=torch.uint8)
    if row_format is RowFormat.FP8:
        data[:, :DIM][(data[:, :DIM] & 127) == 127] = 5  # no NaN
        data[:, DIM:] = torch.randint(118, 123, (rows, width - DIM), dtype=torch.uint8)
    else:
        data[:, DIM // 2 :] = torch.randint(1, 80, (rows, width - DIM // 2), dtype=torch.uint8)
    return RowPool(data, row_format, DIM)


class Prompt:
    """Queries of positions FIRST to LAST, the pools, and what each token has chosen."""

    def __init__(self, heads: int, ratio: int, chosen: int) -> None:
        torch.manual_seed(heads + ratio)
        count = LAST + 1 - FIRST
        self.heads, self.ratio = heads, ratio
        self.queries = torch.randn(count, heads * DIM).bfloat16().float()
        self.sinks = torch.randn(heads)
        self.window = pool(RowFormat.FP8, 3 * BLOCK_TOKENS)
        self.compressed = pool(RowFormat.FP4_E4M3, 3 * BLOCK_TOKENS // max(1, ratio))
        self.positions = torch.arange(FIRST, LAST + 1)
        self.entries = torch.zeros(count, TOP_K, dtype=torch.int32)
        self.counts = torch.zeros(count, dtype=torch.int32)
        for token, position in enumerate(self.positions.tolist()):
            visible = (position + 1) // max(1, ratio)
            some = torch.randperm(visible)[: min(chosen, visible)].sort().values
            self.entries[token, : len(some)] = some
            self.counts[token] = len(some)
        angles = torch.rand(LAST + 1, ROPE_DIM // 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def attend(self, first: int, end: int, threads: int, width: int = 0) -> Tensor:
        """[end - first, heads · dim]: these tokens in a step of their own; `width`: in rows of so
        many tokens, as those whose drafts are verified."""
        count, step, program = end - first, Step(), Program()
        queries = self.queries[first:end].clone()
        choice = Choice(
            self.entries[first:end].contiguous(),
            self.counts[first:end].contiguous(),
            torch.zeros(count, 1, dtype=torch.int32),
            torch.zeros(count, dtype=torch.int32),
            8,
        )
        record = Recorder(program, step, bf16=True, rounds_caches=True, eps=1e-6)
        record.begin(TOP_K)
        record.attention(
            queries,
            self.heads,
            self.sinks,
            self.window,
            WINDOW,
            rope_dim=ROPE_DIM,
            ratio=self.ratio,
            compressed=self.compressed if self.ratio else None,
            choice=choice if self.ratio else None,
        )
        positions = self.positions[first:end].contiguous()
        starts = torch.tensor([*range(0, count, width or count), count])
        unused, num_rows = torch.zeros(2, count, dtype=torch.int64), len(starts) - 1
        blocks = [
            torch.tensor([b] * num_rows, dtype=torch.int32) for b in (WINDOW_BLOCKS, GLOBAL_BLOCKS)
        ]
        step.fill(
            threads=threads,
            num_tokens=count,
            num_rows=num_rows,
            positions=positions.data_ptr(),
            row_starts=starts.data_ptr(),
            window_blocks=blocks[0].data_ptr(),
            window_width=blocks[0].shape[1],
            global_blocks=blocks[1].data_ptr(),
            global_width=blocks[1].shape[1],
            plain_cos=self.cos.data_ptr(),
            plain_sin=self.sin.data_ptr(),
            turned_cos=self.cos.data_ptr(),
            turned_sin=self.sin.data_ptr(),
            row_of=unused[0].data_ptr(),
            ending=unused[1].data_ptr(),
        )
        program.run()
        return queries


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chosen", [TOP_K, 3], ids=["many looks at an entry", "few"])
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("heads", [16, 32, 8])
def test_tokens_of_a_prompt_have_the_bits_that_they_have_alone(
    heads: int, ratio: int, chosen: int, threads: int
) -> None:
    prompt = Prompt(heads, ratio, chosen)
    count = LAST + 1 - FIRST
    alone = torch.cat([prompt.attend(i, i + 1, 1) for i in range(count)])
    together = prompt.attend(0, count, threads)
    assert together.isfinite().all()
    assert together.abs().amax() > 0.1
    assert torch.equal(together.view(torch.int32), alone.view(torch.int32))


def test_a_prompt_cut_anywhere_gives_the_same_bits() -> None:
    prompt = Prompt(16, 2, TOP_K)
    whole = prompt.attend(0, 56, 1)
    for cut in (3, 17, 40):
        parts = torch.cat([prompt.attend(0, cut, 1), prompt.attend(cut, 56, 1)])
        assert torch.equal(parts.view(torch.int32), whole.view(torch.int32))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_prompt_in_rows_of_pairs_gives_the_same_bits(ratio: int, threads: int) -> None:
    prompt = Prompt(16, ratio, TOP_K)
    whole = prompt.attend(0, 56, 1)
    pairs = prompt.attend(0, 56, threads, width=2)
    assert torch.equal(pairs.view(torch.int32), whole.view(torch.int32))
