"""Lowers the logits of tokens that were there before."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import native
from kernels.sampling.penalties_ref import apply_penalties_ref

_A, _N = native.ADDRESS, native.COUNT
_penalise = native.lazy("sampling", "apply_penalties", (_A, _N, _N, *[_A] * 6, _N))


def apply_penalties(
    logits: Tensor,
    *,
    tokens: Sequence[NDArray[np.int32]],
    prompt_lens: Sequence[int],
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Apply repetition, frequency and presence penalties, in this order and in place.

    All of it is worked out from the tokens: there is no state that a restart could lose.

    Args:
        logits: [rows, num_ids], float32, contiguous.
        tokens: ids before the one to sample, by row; within the vocabulary.
        prompt_lens: how many of them, the first, are the prompt.
        presence, frequency: [rows], float32; taken off once, and once per occurrence, for ids of
            the output.
        repetition: [rows], float32, > 0; ids of prompt or output: positive logits are divided by
            it, others multiplied.
    Equal to apply_penalties_ref.
    """
    rows = logits.shape[0]
    values = {"presence": presence, "frequency": frequency, "repetition": repetition}
    for name, value in values.items():
        if value.shape != (rows,):
            raise ValueError(f"{name}: {list(value.shape)} for {rows} rows")
    if len(tokens) != rows or len(prompt_lens) != rows:
        raise ValueError(f"tokens: {len(tokens)} and {len(prompt_lens)} for {rows} rows")
    if logits.is_cuda or native.library("sampling") is None:
        apply_penalties_ref(
            logits,
            tokens=tokens,
            prompt_lens=prompt_lens,
            presence=presence,
            frequency=frequency,
            repetition=repetition,
        )
        return
    assert logits.is_contiguous()
    starts = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    joined = np.concatenate([*tokens, np.zeros(0, np.int32)]).astype(np.int32, copy=False)
    lens = np.asarray(prompt_lens, np.int64)
    parts = [value.float().contiguous() for value in values.values()]
    _penalise(
        logits.data_ptr(),
        *logits.shape,
        joined.ctypes.data,
        starts.ctypes.data,
        lens.ctypes.data,
        *[part.data_ptr() for part in parts],
        torch.get_num_threads(),
    )
