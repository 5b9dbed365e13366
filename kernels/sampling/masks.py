"""Bans the ids that a grammar does not allow."""

import torch
from torch import Tensor

from kernels import native
from kernels.sampling.masks_ref import apply_masks_ref

_A, _N = native.ADDRESS, native.COUNT
_masks = native.lazy("sampling", "apply_masks", (_A, _N, _N, _A, _N, _N))


def apply_masks(logits: Tensor, masks: Tensor) -> None:
    """Set the logits of ids that are not allowed to -inf, in place.

    Args:
        logits: [rows, num_ids], float32, contiguous.
        masks: [rows, words], int32, words * 32 >= num_ids: bit i % 32 of word i // 32 is set if
            id i is allowed.
    Equal to apply_masks_ref.
    """
    rows, num_ids = logits.shape
    if masks.dtype != torch.int32 or masks.dim() != 2 or masks.shape[0] != rows:
        raise ValueError(f"masks: {list(masks.shape)} {masks.dtype} for {rows} rows")
    if masks.shape[1] * 32 < num_ids:
        raise ValueError(f"masks: {masks.shape[1]} words for {num_ids} ids")
    if logits.is_cuda or native.library("sampling") is None:
        apply_masks_ref(logits, masks)
        return
    assert logits.is_contiguous()
    masks = masks.contiguous()
    threads = torch.get_num_threads()
    _masks(logits.data_ptr(), rows, num_ids, masks.data_ptr(), masks.shape[1], threads)
