"""Draws one token per row: filters, then the maximum of logits plus scaled Gumbel noise."""

import torch
from torch import Tensor

from kernels import native
from kernels.sampling.draws import Draws
from kernels.sampling.philox import PURPOSE_SAMPLE
from kernels.sampling.sample_tokens_torch import sample_tokens_torch

__all__ = ["Draws", "sample_tokens"]

_A, _N = native.ADDRESS, native.COUNT
_sample = native.lazy("sampling", "sample_tokens", (_A, _N, _N, *[_A] * 7, _N, _A, _N))
_TYPES = (torch.float32, torch.int64, torch.float32, torch.float32, *[torch.int64] * 3)


def sample_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token for each row from softmax(logits / temperature), filtered.

    Filters, in this order: min_p drops ids less probable than min_p times the best one; top_k
    keeps the k best; top_p keeps the smallest set of best ids that holds at least top_p of what
    is left. The draw is the argmax of logit + temperature * gumbel over the ids that are left,
    with noise keyed by (seed, sub_index, position): greedy is its limit at temperature 0.
    A tie goes to the lower id, everywhere.

    Args:
        logits: [rows, num_ids], float32, no NaN; -inf bans an id.
        draws: parameters by row.
    Returns:
        ids: [rows], int64; 0 where all ids are banned. A row's id depends on that row alone.
    Error against sample_tokens_ref: ids equal, unless a filter's sum is within 1e-12 of its bound
    or min_p is below 1e-17.
    """
    _check(logits, draws)
    if logits.is_cuda or native.library("sampling") is None:
        return sample_tokens_torch(logits, draws)
    logits = logits.contiguous()
    parts = [values.to(dtype).contiguous() for values, dtype in zip(draws, _TYPES, strict=True)]
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    _sample(
        logits.data_ptr(),
        *logits.shape,
        *[part.data_ptr() for part in parts],
        PURPOSE_SAMPLE,
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return ids


def _check(logits: Tensor, draws: Draws) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"logits: {list(logits.shape)} {logits.dtype}, not [rows, num_ids] float32"
        )
    for name, values in draws._asdict().items():
        if values.shape != logits.shape[:1]:
            raise ValueError(f"draws.{name}: {list(values.shape)} for {logits.shape[0]} rows")
