"""Memory of packed weights, in huge pages: page tables slow down a stream of weights by a fifth."""

import math
import threading

import torch
from torch import Tensor

from kernels import native

_HUGE = 2 << 20  # bytes of a huge page
_SLAB = 16 << 20  # bytes that small weights share
_LINE = 64
_WORD = 4
_advise = native.lazy("quant", "advise_huge", (native.ADDRESS, native.COUNT))


class _Slab:
    """Words given away one after another; they live as long as a tensor that has some."""

    def __init__(self, size: int) -> None:
        raw = torch.empty((size + _HUGE) // _WORD, dtype=torch.int32)
        skip = -raw.data_ptr() % _HUGE // _WORD
        self._words = raw[skip : skip + size // _WORD]
        self._used = 0
        _advise(self._words.data_ptr(), size)

    def take(self, words: int) -> Tensor | None:
        """None: it does not fit any more."""
        if self._used + words > len(self._words):
            return None
        taken = self._words[self._used : self._used + words]
        self._used += -(-words // (_LINE // _WORD)) * (_LINE // _WORD)
        return taken


_lock = threading.Lock()
_slab: _Slab | None = None


def empty_words(*shape: int) -> Tensor:
    """int32, not filled, contiguous, at a cache line's beginning; only for native kernels.

    Small ones are neighbours in shared huge pages, in the order in which they are asked for.
    """
    global _slab
    words = math.prod(shape)
    if words * _WORD >= _SLAB // 4:
        found = _Slab(-(-words * _WORD // _HUGE) * _HUGE).take(words)
    else:
        with _lock:
            found = _slab.take(words) if _slab is not None else None
            if found is None:
                _slab = _Slab(_SLAB)
                found = _slab.take(words)
    assert found is not None
    return found.view(shape)
