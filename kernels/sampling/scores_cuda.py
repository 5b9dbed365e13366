"""Log-probabilities and ranks of given ids on a GPU: `csrc/scores.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda

MAX_TOP = 20
MAX_IDS = 1 << 19  # of a vocabulary


def token_scores(
    logits: Tensor, ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`token_logprobs` and `token_ranks` in one call, without a look at the device.

    Args:
        logits: [rows, num_ids], float32; rows of any stride.
        ids: [rows], int32, within the vocabulary.
        num_top: at most MAX_TOP.
    Returns:
        logprobs [rows], float32; ranks [rows], int32; top_ids [rows, num_top], int32, best first;
        top_logprobs [rows, num_top], float32. Meaningless numbers for a row that is not finite.
        The bits are those of the CPU's kernels, as `sample_rows` says.
    Raises:
        ValueError: shapes that the kernel has no code for.
    """
    rows, num_ids = logits.shape
    if not 0 <= num_top <= min(MAX_TOP, num_ids) or num_ids > MAX_IDS or ids.shape != (rows,):
        raise ValueError(f"token_scores: {num_top} of {list(logits.shape)}, ids {list(ids.shape)}")
    assert logits.dtype is torch.float32, logits.dtype
    assert ids.dtype is torch.int32, ids.dtype
    assert logits.stride(1) == 1, "logits of a row lie side by side"
    device = logits.device
    logprobs, ranks = torch.empty(rows, device=device), torch.empty_like(ids)
    top_ids = torch.empty(rows, num_top, dtype=torch.int32, device=device)
    top_logprobs = torch.empty(rows, num_top, device=device)
    if rows == 0:
        return logprobs, ranks, top_ids, top_logprobs
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("sampling", "scores", ("-fmad=false",)).token_scores(
            a(logits.data_ptr()),
            n(logits.stride(0)),
            n(rows),
            n(num_ids),
            a(ids.contiguous().data_ptr()),
            n(num_top),
            a(logprobs.data_ptr()),
            a(ranks.data_ptr()),
            a(top_ids.data_ptr()),
            a(top_logprobs.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return logprobs, ranks, top_ids, top_logprobs
