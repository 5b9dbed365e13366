"""Log-probabilities of the drawn tokens and of the best ones."""

import torch
from torch import Tensor

from kernels import native
from kernels.sampling.order_key import key_ids, order_key
from kernels.sampling.scores_cuda import token_scores

_A, _N = native.ADDRESS, native.COUNT
_logprobs = native.lazy("sampling", "token_logprobs", (_A, _N, _N, _A, _N, _A, _A, _A, _N))


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under softmax(logits) of `ids` and of the `num_top` best ids.

    Args:
        logits: [rows, num_ids], float32, finite.
        ids: [rows], int64, within the vocabulary.
        num_top: 0 <= num_top <= num_ids; on a GPU at most 20.
    Returns:
        logprobs: of `ids`, [rows], float32.
        top_ids: [rows, num_top], int64, best first; a tie goes to the lower id.
        top_logprobs: [rows, num_top], float32.
        The bits of a row depend on that row alone; those of a best id do not depend on num_top.
    Error against token_logprobs_ref: ids equal, values within 1e-5.
    """
    rows, num_ids = logits.shape
    if not 0 <= num_top <= num_ids:
        raise ValueError(f"num_top: {num_top} is not between 0 and {num_ids}")
    if logits.is_cuda:
        logprobs, _, top_ids, top_logprobs = token_scores(logits, ids.to(torch.int32), num_top)
        return logprobs, top_ids.long(), top_logprobs
    if native.library("sampling") is None:
        table = logits.log_softmax(dim=1)
        top_ids = key_ids(order_key(logits).topk(num_top, dim=1).values)
        return table.gather(1, ids[:, None])[:, 0], top_ids, table.gather(1, top_ids)
    logits, ids = logits.contiguous(), ids.contiguous()
    logprobs = torch.empty(rows)
    top_ids = torch.empty(rows, num_top, dtype=torch.int64)
    top_logprobs = torch.empty(rows, num_top)
    _logprobs(
        logits.data_ptr(),
        rows,
        num_ids,
        ids.data_ptr(),
        num_top,
        logprobs.data_ptr(),
        top_ids.data_ptr(),
        top_logprobs.data_ptr(),
        torch.get_num_threads(),
    )
    return logprobs, top_ids, top_logprobs
