"""Routed MXFP4 experts on Hopper, for steps with many rows an expert: `csrc/experts_prefill.cu`.

Weights are packed as for `experts_cuda.py`: one copy serves both. Rows of activations lie sorted by
expert, FP8-rounded, as bfloat16: [K / 64, rows, 64], an expert's from a multiple of 8 on; the 16
byte pieces of a row are swizzled over eight rows, so that one bulk copy brings a tile's part of K.
"""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.moe.experts_cuda import PackedExperts

MAX_TILE_ROWS = 160
ROW_ALIGN = 8
_COUNT_SLOTS = 512  # that a block counts
_HEADS = 4


def routed_experts_prefill(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    first_expert: int,
    limit: float,
    shared: Tensor | None = None,
) -> Tensor:
    """Sum of a token's experts that are held here, as `combine_slots(routed_experts(...))`.

    Works in about tokens · top_k · (hidden + inter) · 2 bytes of scratch.

    Args:
        x: [num_tokens, hidden], bfloat16.
        expert_ids: [num_tokens, top_k], int32, ascending within a row; -1: none.
        weights: [num_tokens, top_k], float32.
        experts: scales of up to 2^33.
        limit: of SwiGLU.
        shared: [num_tokens, hidden], bfloat16: added last.
    Returns:
        [num_tokens, hidden], float32, or with `shared` bfloat16. Bits of a token depend on that
        token alone; they are not those of `routed_experts_decode`.
    Error against routed_experts_ref with `bf16`: 2e-2 relative to the norm of the row, where sums
    near a tie round the other way.
    """
    kind = torch.float32 if shared is None else torch.bfloat16
    out = torch.empty(x.shape[0], experts.hidden, dtype=kind, device=x.device)
    shared = None if shared is None else shared.contiguous()
    _launch(x, expert_ids, weights, experts, first_expert, limit, shared, out)
    return out


def routed_experts_prefill_slots(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    first_expert: int,
    limit: float,
) -> Tensor:
    """As `routed_experts_prefill`, not summed; ids in any order.

    Returns:
        [num_tokens · top_k, hidden], bfloat16; undefined where the expert is not held here.
    """
    return _launch(x, expert_ids, weights, experts, first_expert, limit, None, None)


def _launch(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    first_expert: int,
    limit: float,
    shared: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Rows of slots; with `out` their sums."""
    x, expert_ids, weights = x.contiguous(), expert_ids.contiguous(), weights.contiguous()
    tokens, top_k = expert_ids.shape
    device, slots, held = x.device, tokens * top_k, experts.w13.shape[0]
    if tokens == 0:
        return x.new_empty(0, experts.hidden)
    rows = _aligned(slots) + ROW_ALIGN * min(held, slots)
    blocks = (slots + _COUNT_SLOTS - 1) // _COUNT_SLOTS
    integers = torch.empty(
        _HEADS + held * (1 + blocks) + slots + rows, dtype=torch.int32, device=device
    )
    tiles = torch.empty(held + slots // MAX_TILE_ROWS, 4, dtype=torch.int32, device=device)
    row_share = torch.empty(rows, device=device)
    # The second product writes where the first has read: [slots, hidden] is the smaller.
    inputs = torch.empty(rows, experts.hidden, dtype=torch.bfloat16, device=device)
    hidden_rows = torch.empty(rows, experts.inter, dtype=torch.bfloat16, device=device)
    a, n = ctypes.c_void_p, ctypes.c_int64
    cuda.check(
        cuda.load("moe", "experts_prefill").experts_prefill(
            a(x.data_ptr()),
            a(expert_ids.data_ptr()),
            a(weights.data_ptr()),
            n(tokens),
            n(top_k),
            a(experts.w13.data_ptr()),
            a(experts.w2.data_ptr()),
            n(first_expert),
            n(held),
            n(experts.hidden),
            n(experts.inter),
            ctypes.c_float(limit),
            a(integers.data_ptr()),
            a(tiles.data_ptr()),
            a(row_share.data_ptr()),
            n(rows),
            a(inputs.data_ptr()),
            a(hidden_rows.data_ptr()),
            a(inputs.data_ptr()),
            a(None if shared is None else shared.data_ptr()),
            a(None if out is None else out.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return inputs[:slots]


def _aligned(rows: int) -> int:
    return (rows + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
