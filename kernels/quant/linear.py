"""Matrix products whose rows do not depend on their batch mates."""

from torch import Tensor

from kernels.quant.linear_ref import tile_linear_ref


def tile_linear(x: Tensor, weight_t: Tensor) -> Tensor:
    """x @ weight_t, every output row's bits a function of its input row alone.

    Args:
        x: [num_tokens, in_features], float32; any number of rows, 0 included.
        weight_t: [in_features, out_features], float32, contiguous: the checkpoint's [out, in]
            weight transposed once at load.
    Returns:
        [num_tokens, out_features], float32.
    Error against float64: 1e-6 relative to the norm of the row. Bits are equal for any batch
    around the row, any row order and any number of threads.
    Source: zero-padded tiles of 16 rows, slices of 256 along the inner dimension.
    """
    if x.dim() != 2 or weight_t.dim() != 2 or x.shape[1] != weight_t.shape[0]:
        raise ValueError(f"tile_linear: x {tuple(x.shape)} and weight {tuple(weight_t.shape)}")
    return tile_linear_ref(x, weight_t)
