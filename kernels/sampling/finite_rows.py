"""Which rows of logits hold numbers only."""

import torch
from torch import Tensor

from kernels import native
from kernels.sampling.finite_rows_ref import finite_rows_ref

_A, _N = native.ADDRESS, native.COUNT
_finite = native.lazy("sampling", "finite_rows", (_A, _N, _N, _A, _N))


def finite_rows(logits: Tensor) -> Tensor:
    """Whether no logit of a row is NaN or infinite.

    Args:
        logits: [rows, num_ids], float32.
    Returns:
        [rows], bool. Equal to finite_rows_ref.
    """
    if logits.is_cuda or native.library("sampling") is None:
        return finite_rows_ref(logits)
    logits = logits.contiguous()
    finite = torch.empty(logits.shape[0], dtype=torch.bool)
    _finite(logits.data_ptr(), *logits.shape, finite.data_ptr(), torch.get_num_threads())
    return finite
