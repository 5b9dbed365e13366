"""Released weight formats -> float32, once at load."""

from torch import Tensor

from kernels.quant.unpack_ref import unpack_fp4_ref, unpack_fp8_ref, unpack_scale_ref


def unpack_scale(scale: Tensor) -> Tensor:
    """UE8M0 bytes (float8_e8m0fnu or uint8) -> 2^(byte - 127), float32 of the same shape."""
    return unpack_scale_ref(scale)


def unpack_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 weight with block scales -> float32. Exact.

    Args:
        weight: [n, k], float8_e4m3fn.
        scale: [ceil(n / rows), ceil(k / cols)], UE8M0; the block (rows, cols) follows from the
            two shapes and is one of (32, 32) for linears and (1, 32) for Engram rows.
    """
    return unpack_fp8_ref(weight, scale)


def unpack_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Packed FP4 experts -> float32. Exact.

    Args:
        packed: [n, k / 2], int8: low nibble the even channel; bit 3 of a code is the sign.
        scale: [n, k / 32], UE8M0.
    """
    return unpack_fp4_ref(packed, scale)
