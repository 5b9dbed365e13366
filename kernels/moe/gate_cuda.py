"""Router of the experts on Hopper, for decode rows: `csrc/gate_decode.cu`."""

import ctypes

import torch
from torch import Tensor

from kernels import cuda

SLICES = 8  # of the inputs
MAX_EXPERTS = 1024
MAX_TOP_K = 32


def route_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    scaling: float,
    temperature: float = 1.0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Router logits of x and `route` of them.

    Args:
        x: [num_tokens, hidden], bfloat16; hidden a multiple of 32.
        weight: [num_experts, hidden], bfloat16; experts a multiple of 32.
        bias: [num_experts], float32.
        positions: [num_tokens], int32: negative for rows that go to no expert; None: all do.
    Returns:
        expert_ids: [num_tokens, top_k], int32, ascending, -1 for none; a tie goes to the lower id.
        weights: [num_tokens, top_k], float32. Bits of a token depend on that token alone.
    Error: logits 2e-6 relative to Σ|x · w|, weights what follows from that and 1e-6.
    Raises:
        ValueError: shapes that the kernel has no code for.
    """
    tokens, hidden = x.shape
    experts = weight.shape[0]
    if (
        hidden % 32
        or weight.shape[1] != hidden
        or experts % 32
        or not 1 <= top_k <= min(experts, MAX_TOP_K)
        or experts > MAX_EXPERTS
    ):
        raise ValueError(
            f"route_decode: x {tuple(x.shape)}, weight {tuple(weight.shape)}, {top_k} of a token"
        )
    device = x.device
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    shares = torch.empty(tokens, top_k, device=device)
    if tokens == 0:
        return ids, shares
    parts = torch.empty(SLICES, tokens, experts, device=device)
    a, n, r = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    cuda.check(
        cuda.load("moe", "gate_decode").gate_decode(
            a(x.contiguous().data_ptr()),
            n(tokens),
            n(hidden),
            a(weight.contiguous().data_ptr()),
            n(experts),
            a(bias.data_ptr()),
            n(top_k),
            r(scaling),
            r(temperature),
            a(None if positions is None else positions.data_ptr()),
            a(parts.data_ptr()),
            a(ids.data_ptr()),
            a(shares.data_ptr()),
            a(torch.cuda.current_stream(device).cuda_stream),
        )
    )
    return ids, shares


def choose_experts(
    logits: Tensor, bias: Tensor, top_k: int, *, scaling: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`route` of router logits [num_tokens, num_experts], float32; see `route_decode`."""
    rows, experts = logits.shape
    if experts % 32 or experts > MAX_EXPERTS or not 1 <= top_k <= min(experts, MAX_TOP_K):
        raise ValueError(f"choose_experts: {top_k} of {experts} experts")
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(rows, top_k, device=logits.device)
    if rows == 0:
        return ids, shares
    a, n, r = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    cuda.check(
        cuda.load("moe", "gate_decode").gate_choose(
            a(logits.contiguous().data_ptr()),
            n(rows),
            n(experts),
            a(bias.data_ptr()),
            n(top_k),
            r(scaling),
            r(temperature),
            a(ids.data_ptr()),
            a(shares.data_ptr()),
            a(torch.cuda.current_stream(logits.device).cuda_stream),
        )
    )
    return ids, shares
