"""Packed weights share memory pages, not memory."""

import pytest

from kernels import native
from kernels.quant.weight_memory import empty_words

pytestmark = pytest.mark.skipif(
    native.library("quant") is None, reason="packed weights need a compiler"
)

SHAPES = [(1, 1, 272), (3, 7, 5), (1,), (0, 4), (1 << 20,), (2, 1 << 21), (5 << 20,), (1000, 1000)]


def test_each_has_words_of_its_own() -> None:
    taken = [empty_words(*shape) for shape in SHAPES]
    for index, (shape, words) in enumerate(zip(SHAPES, taken, strict=True)):
        assert words.shape == shape
        assert words.is_contiguous()
        assert words.data_ptr() % 64 == 0
        words.fill_(index)
    for index, words in enumerate(taken):
        assert bool((words == index).all())
