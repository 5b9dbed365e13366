"""The Sinkhorn iterations of the stream mix, as one operator that compilers leave alone."""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK_TOKENS = 128

if triton is not None:

    @triton.jit
    def _sinkhorn_kernel(  # noqa: ANN202 (Triton knows no annotations but its own)
        comb,  # noqa: ANN001
        rows_out,  # noqa: ANN001
        columns_out,  # noqa: ANN001
        num_tokens,  # noqa: ANN001
        eps,  # noqa: ANN001
        num_iterations: tl.constexpr,
        block: tl.constexpr,
    ):
        token = tl.program_id(0) * block + tl.arange(0, block)
        inside = token < num_tokens
        stream = tl.arange(0, 4)
        cell = token[:, None, None] * 16 + stream[None, :, None] * 4 + stream[None, None, :]
        e = tl.load(comb + cell, mask=inside[:, None, None], other=1.0)
        rows = tl.full((block, 4), 1.0, tl.float32)
        columns = 1.0 / (tl.sum(e, 1) + eps)
        for _ in range(num_iterations):
            rows = rows / (rows * tl.sum(e * columns[:, None, :], 2) + eps)
            columns = columns / (columns * tl.sum(e * rows[:, :, None], 1) + eps)
        place = token[:, None] * 4 + stream[None, :]
        tl.store(rows_out + place, rows, mask=inside[:, None])
        tl.store(columns_out + place, columns, mask=inside[:, None])


def _plain(comb: Tensor, eps: float, num_iterations: int) -> tuple[Tensor, Tensor]:
    rows = torch.ones_like(comb[..., 0])
    columns = 1 / (comb.sum(-2) + eps)
    for _ in range(num_iterations):
        rows = rows / (rows * (comb * columns[..., None, :]).sum(-1) + eps)
        columns = columns / (columns * (comb * rows[..., None]).sum(-2) + eps)
    return rows, columns


@torch.library.custom_op("deepmesh_tiny::sinkhorn_scales", mutates_args=())
def sinkhorn_scales(comb: Tensor, eps: float, num_iterations: int) -> tuple[Tensor, Tensor]:
    """Return row and column scales that make `comb` [..., 4, 4] nearly doubly stochastic.

    A column step, then `num_iterations` times a row and a column step. No gradient passes.
    """
    if triton is None or not comb.is_cuda:
        return _plain(comb, eps, num_iterations)
    num_tokens = comb.numel() // 16
    rows = torch.empty(comb.shape[:-1], dtype=torch.float32, device=comb.device)
    columns = torch.empty_like(rows)
    grid = (triton.cdiv(num_tokens, BLOCK_TOKENS),)
    _sinkhorn_kernel[grid](comb, rows, columns, num_tokens, eps, num_iterations, BLOCK_TOKENS)
    return rows, columns


@sinkhorn_scales.register_fake
def _(comb: Tensor, eps: float, num_iterations: int) -> tuple[Tensor, Tensor]:
    scales = comb.new_empty(comb.shape[:-1])
    return scales, torch.empty_like(scales)
