"""Routed MXFP4 experts on Hopper, for steps with few rows an expert: `csrc/experts_decode.cu`.

Weights are packed once, at load, into runs that stream in the order in which they are used: for
each expert, unit of 64 outputs and 64 positions of K one chunk of 2,176 bytes, of which the last
128 are the scales.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda

CHUNK_BYTES = 2176
UNIT_OUTPUTS = 64
STEP = 64  # positions of K in a chunk
PASS_ROWS = 8  # rows of an expert that share a pass over its weights
MAX_EXPERTS = 1024
_BITS = ((15, 9), (12, 6), (14, 3), (13, 0))  # sign and magnitude by fragment register
_INTS = 3 * (MAX_EXPERTS + 8)  # of scratch, beside the rows


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """A rank's experts, packed by `pack_experts`."""

    w13: Tensor  # [experts, inter / 32, hidden / 64, CHUNK_BYTES], uint8
    w2: Tensor  # [experts, hidden / 64, inter / 64, CHUNK_BYTES], uint8
    hidden: int
    inter: int


def pack_experts(
    w1: Tensor, w1_scale: Tensor, w3: Tensor, w3_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> PackedExperts:
    """Pack MXFP4 weights as released: two codes a byte, the even position in the low nibble.

    Args:
        w1, w3: [experts, inter, hidden / 2], uint8; w2: [experts, hidden, inter / 2].
        *_scale: [..., K / 32], uint8: ue8m0 of 32 positions.
    Raises:
        ValueError: hidden or inter is not a multiple of 64.
    """
    experts, inter, half = w1.shape
    hidden = 2 * half
    if hidden % STEP or inter % STEP or experts > MAX_EXPERTS:
        raise ValueError(f"hidden {hidden} and inter {inter} must be multiples of {STEP}")
    w13 = _interleave(w1, w3, inter)
    scale = _interleave(w1_scale, w3_scale, inter)
    return PackedExperts(_pack(w13, scale), _pack(w2, w2_scale), hidden, inter)


def routed_experts_decode(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    first_expert: int,
    limit: float,
) -> Tensor:
    """Sum of a token's experts that are held here, as `combine_slots(routed_experts(...))`.

    Args:
        x: [num_tokens, hidden], bfloat16.
        expert_ids: [num_tokens, top_k], int32, ascending within a row.
        weights: [num_tokens, top_k], float32.
        limit: of SwiGLU; limit² times the largest weight must be below 500.
    Returns:
        [num_tokens, hidden], float32. Bits of a token depend on that token alone.
    Error against routed_experts_ref with `bf16`: 2e-2 relative to the norm of the row, where sums
    near a tie round the other way.
    """
    out = torch.empty(x.shape[0], experts.hidden, device=x.device)
    _launch(x, expert_ids, weights, experts, first_expert, limit, out)
    return out


def routed_experts_slots(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    first_expert: int,
    limit: float,
) -> Tensor:
    """As `routed_experts_decode`, not summed.

    Returns:
        [num_tokens · top_k, hidden], bfloat16; undefined where the expert is not held here.
    """
    return _launch(x, expert_ids, weights, experts, first_expert, limit, None)


def _launch(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    first_expert: int,
    limit: float,
    out: Tensor | None,
) -> Tensor:
    tokens, top_k = expert_ids.shape
    device, slots = x.device, tokens * top_k
    slot_rows = torch.empty(slots, experts.hidden, dtype=torch.bfloat16, device=device)
    if tokens == 0:
        return slot_rows
    ints = torch.empty(_INTS + slots, dtype=torch.int32, device=device)
    passes = min(slots, experts.w13.shape[0] + slots // PASS_ROWS)
    inputs = torch.empty(passes * PASS_ROWS, experts.hidden, dtype=torch.float16, device=device)
    input_unit = torch.empty(tokens, device=device)
    hidden_rows = torch.empty(passes * PASS_ROWS, experts.inter, dtype=torch.float16, device=device)
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("moe", "experts_decode").experts_decode(
            a(x.contiguous().data_ptr()),
            a(expert_ids.contiguous().data_ptr()),
            a(weights.contiguous().data_ptr()),
            n(tokens),
            n(top_k),
            a(experts.w13.data_ptr()),
            a(experts.w2.data_ptr()),
            n(first_expert),
            n(experts.w13.shape[0]),
            n(experts.hidden),
            n(experts.inter),
            ctypes.c_float(limit),
            a(ints.data_ptr()),
            a(inputs.data_ptr()),
            a(input_unit.data_ptr()),
            a(hidden_rows.data_ptr()),
            a(slot_rows.data_ptr()),
            a(None if out is None else out.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return slot_rows


def _interleave(gate: Tensor, up: Tensor, inter: int) -> Tensor:
    """Tiles of 16 gate and 16 up rows in turn, so that a unit holds both of 32 channels."""
    tiles = (part.unflatten(1, (inter // 16, 16)) for part in (gate, up))
    return torch.stack(tuple(tiles), 2).flatten(1, 3)


def _pack(codes: Tensor, scale: Tensor) -> Tensor:
    """[experts, out, K / 2] and [experts, out, K / 32] -> [experts, out / 64, K / 64, 2176]."""
    experts, outputs, half = codes.shape
    packed = torch.empty(
        experts,
        outputs // UNIT_OUTPUTS,
        2 * half // STEP,
        CHUNK_BYTES,
        dtype=torch.uint8,
        device=codes.device,
    )
    for expert in range(experts):  # one by one: the intermediates are 8 times as large
        packed[expert, ..., :2048] = _pack_codes(codes[expert])
        packed[expert, ..., 2048:] = _pack_scales(scale[expert])
    return packed


def _pack_codes(codes: Tensor) -> Tensor:
    """Words of 8 codes in the order of the fragments of m16n8k16 (see `unpack` in the source).

    Fragment registers 0..3 are pair 0 of half 0, pair 0 of half 1, pair 1 of half 0, pair 1 of
    half 1; the lower 16 bits are position 0.
    """
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    # unit, tile, half (rows 0-7, 8-15), g, chunk, group, q, step, pair, position
    parts = nibbles.unflatten(1, (-1, 2, 4, 2, 2, 2)).unflatten(0, (-1, 4, 2, 8))
    parts = parts.permute(0, 4, 1, 3, 6, 5, 7, 9, 8, 2)  # …, position, pair, half
    codes_16 = parts.flatten(-2).int()  # …, position, register
    sign, magnitude = codes_16 >> 3, codes_16 & 7
    word = torch.zeros_like(sign[..., 0])
    for register, (sign_bit, magnitude_bit) in enumerate(_BITS):
        word |= sign[..., register] << sign_bit | magnitude[..., register] << magnitude_bit
    low_byte_first = torch.stack((word & 255, word >> 8), -1)
    return low_byte_first.to(torch.uint8).flatten(2)


def _pack_scales(scale: Tensor) -> Tensor:
    """Sixteen bytes for each g: tile, half, group."""
    parts = scale.unflatten(1, (-1, 2)).unflatten(0, (-1, 4, 2, 8))
    return parts.permute(0, 4, 3, 1, 2, 5).flatten(2)
