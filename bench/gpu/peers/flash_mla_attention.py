"""sgl-flash-mla: sparse attention of decode rows, V4's rows of 584 bytes (Hopper has no kernel of
it for V4.1's), window and compressed rows in two caches of that format.

The rotation of the result and how its split over blocks is planned are not timed, in its favour.
"""

import sys
from collections.abc import Iterator

import torch
from flash_mla import (  # pyright: ignore[reportMissingImports] where it is not
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from torch import Tensor

from bench.gpu.peers.job import Answer, Job, run
from bench.gpu.timing import graph_us

ROW_BYTES = 584
PAGE = 64
PAGES = 2048
SETS = 4
LARGEST_CODE = 120  # of e4m3: no NaN among the bytes


def cache() -> Tensor:
    """Random rows, all finite."""
    rows = torch.randint(0, LARGEST_CODE, (PAGES, PAGE, 1, ROW_BYTES), device="cuda")
    return rows.to(torch.uint8)


def attention(job: Job) -> Iterator[Answer]:
    """Times by batch."""
    heads, dim = job.shape["heads"], job.shape["dim"]
    window, compressed = cache(), cache()
    sinks = torch.zeros(heads, device="cuda")
    rows = PAGES * PAGE
    for batch in job.batches:
        queries = torch.randn(batch, 1, heads, dim, device="cuda").bfloat16()
        near, far = (
            [torch.randint(rows, (batch, 1, width), device="cuda").int() for _ in range(SETS)]
            for width in (job.shape["window"], job.shape["top_k"])
        )
        plan, _ = get_mla_metadata()

        def attend(
            at: int,
            queries: Tensor = queries,
            near: list[Tensor] = near,
            far: list[Tensor] = far,
            plan: object = plan,
        ) -> Tensor:
            out, _ = flash_mla_with_kvcache(
                queries,
                window,
                None,
                None,
                dim,
                plan,
                indices=near[at],
                attn_sink=sinks,
                extra_k_cache=compressed,
                extra_indices_in_kvcache=far[at],
                use_legacy=True,
                kv_format="V4",
            )
            return out

        attend(0)
        median, _ = graph_us(attend, SETS)
        yield Answer("flash_mla V4 rows", batch, median)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(run(attention))
