"""Reference of `compress.py`."""

from torch import Tensor

from kernels.quant.pointwise_ref import sigmoid_ref


def pool_pairs_ref(values: Tensor, gates: Tensor) -> Tensor:
    # A softmax over two is a sigmoid of the difference.
    first = sigmoid_ref(gates[:, 0] - gates[:, 1])
    return first * values[:, 0] + (1.0 - first) * values[:, 1]
