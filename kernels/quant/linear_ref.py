"""Reference of `linear.py`."""

import torch
from torch import Tensor

from kernels.quant.rounding_ref import round_bf16_ref, round_fp8_ref

TILE_ROWS = 16  # BLAS picks another kernel for other row counts, with other bits
SLICE_IN = 256  # beyond it BLAS may split the inner dimension, differently by thread count


def tile_linear_ref(x: Tensor, weight_t: Tensor) -> Tensor:
    tiles = to_tiles(x)
    out = multiply_tiles(tiles, weight_t)
    return out.flatten(0, 1)[: x.shape[0]]


def to_tiles(x: Tensor) -> Tensor:
    """[num_tokens, n] -> [num_tiles, 16, n], zero rows at the end."""
    missing = -x.shape[0] % TILE_ROWS
    if missing:
        x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
    return x.unflatten(0, (-1, TILE_ROWS)) if x.shape[0] else x.new_zeros(0, TILE_ROWS, x.shape[1])


def multiply_tiles(tiles: Tensor, weight_t: Tensor) -> Tensor:
    """Every call that BLAS sees has the same shape, so it always takes the same path."""
    num_tiles, _, in_features = tiles.shape
    if in_features <= SLICE_IN:
        return torch.bmm(tiles, weight_t.expand(num_tiles, *weight_t.shape))
    out: Tensor | None = None
    for start in range(0, in_features, SLICE_IN):
        part = weight_t[start : start + SLICE_IN]
        product = torch.bmm(
            tiles[:, :, start : start + SLICE_IN], part.expand(num_tiles, *part.shape)
        )
        out = product if out is None else out.add_(product)
    assert out is not None
    return out


def linear_ref(x: Tensor, weights_t: Tensor, rounding: int, bf16: bool) -> Tensor:
    """weights_t: [groups, in, out]; rounding as in `linear.Rounding`."""
    if rounding:
        x = round_fp8_ref(x, 32) if rounding == 2 else round_bf16_ref(x)
    groups = x.unflatten(1, (weights_t.shape[0], -1)).unbind(1)
    out = [tile_linear_ref(part, w) for part, w in zip(groups, weights_t, strict=True)]
    joined = out[0] if len(out) == 1 else torch.cat(out, 1)
    return round_bf16_ref(joined) if bf16 else joined
