"""Random MXFP4 experts as released, and what a token's experts give in float32."""

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LIMIT = 10.0
CHECKED_ROWS = 16  # of a case, at most, for which float32 values are worked out


def random_mxfp4(
    experts: int, outputs: int, inputs: int, *, scales: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, the even position low, [E, N, K / 2]; ue8m0 scales [E, N, K / 32].

    Args:
        scales: exponents of two, drawn from this half-open range.
    """
    codes = torch.empty(experts, outputs, inputs // 2, dtype=torch.uint8, device="cuda").random_()
    low, high = (127 + each for each in scales)
    shape = experts, outputs, inputs // 32
    return codes, torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Of one expert, [N, K] float32."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    factors = torch.exp2(scales.float() - 127)
    return table[both.int()] * factors.repeat_interleave(32, 1)


def reference(
    x: Tensor, ids: Tensor, shares: Tensor, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
) -> Tensor:
    """[tokens, hidden] float32; w13 has gate rows before up rows."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        both = x[tokens].float() @ values(w13[0][expert], w13[1][expert]).mT
        gate, up = both.chunk(2, 1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        hidden = torch.nn.functional.silu(gate) * up
        part = hidden @ values(w2[0][expert], w2[1][expert]).mT
        out.index_add_(0, tokens, part * shares[tokens, places].float().unsqueeze(1))
    return out


def error_of(
    found: Tensor,
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
) -> float | None:
    """Relative, of the norm, against `reference`; NaN stays NaN; None for cases of many rows."""
    if x.shape[0] > CHECKED_ROWS:
        return None
    wanted = reference(x, ids, shares, w13, w2)
    return float((found.float() - wanted).norm() / wanted.norm())
