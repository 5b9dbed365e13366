"""Buffers between the operations of a program."""

import torch
from torch import Tensor

from kernels import native

_HUGE_BYTES = 1 << 20  # from which on huge pages are asked for
_advise = native.lazy("quant", "advise_huge", (native.ADDRESS, native.COUNT))


class Room:
    """Buffers with a row for each token, by what they hold; those of equal shape are shared.

    Large ones lie in huge pages: a product writes to hundreds of rows by turns, each of which
    would be a page of its own.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._made: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[num_tokens, *shape]: the same for the same arguments."""
        key = name, shape, dtype
        if key not in self._made:
            buffer = self._made[key] = torch.empty(self.num_tokens, *shape, dtype=dtype)
            if buffer.nbytes >= _HUGE_BYTES:
                _advise(buffer.data_ptr(), buffer.nbytes)
        return self._made[key]
