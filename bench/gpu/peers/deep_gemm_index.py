"""sgl-deep-gemm: index scores of decode rows over paged FP8 keys of 132 bytes.

How its blocks are scheduled is not timed, in its favour.
"""

import sys
from collections.abc import Iterator

import deep_gemm  # pyright: ignore[reportMissingImports] where it is not
import torch
from torch import Tensor

from bench.gpu.peers.job import Answer, Job, run
from bench.gpu.timing import graph_us

PAGE = 64
SCALE_BYTES = 4
SETS = 4
LARGEST_CODE = 120  # of e4m3: no NaN among the bytes


def scores(job: Job) -> Iterator[Answer]:
    """Times by batch, over `keys` of each row."""
    heads, dim, keys = job.shape["heads"], job.shape["dim"], job.shape["keys"]
    pages = keys // PAGE
    for batch in job.batches:
        count = max(batch * pages, 1 << 13)
        size = count, PAGE, 1, dim + SCALE_BYTES
        pool = torch.randint(0, LARGEST_CODE, size, device="cuda").to(torch.uint8)
        queries = torch.randn(batch, 1, heads, dim, device="cuda").to(torch.float8_e4m3fn)
        weights = torch.rand(batch, heads, device="cuda")
        lengths = torch.full((batch, 1), keys, dtype=torch.int32, device="cuda")
        tables = [
            torch.randperm(count, device="cuda")[: batch * pages].view(batch, pages).int()
            for _ in range(SETS)
        ]
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())

        def score(
            at: int,
            queries: Tensor = queries,
            pool: Tensor = pool,
            weights: Tensor = weights,
            lengths: Tensor = lengths,
            tables: list[Tensor] = tables,
            plan: Tensor = plan,
        ) -> Tensor:
            return deep_gemm.fp8_paged_mqa_logits(
                queries, pool, weights, lengths, tables[at], plan, keys
            )

        score(0)
        median, _ = graph_us(score, SETS)
        yield Answer("deep_gemm fp8 keys", batch, median)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(run(scores))
