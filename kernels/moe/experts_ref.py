"""Reference of `experts.py`."""

import torch
from torch import Tensor

from kernels.quant.linear_ref import TILE_ROWS, multiply_tiles, to_tiles
from kernels.quant.pointwise_ref import silu_ref
from kernels.quant.rounding_ref import round_fp8_ref


def expert_mlp_ref(x: Tensor, w13_t: Tensor, w2_t: Tensor, limit: float, bf16: bool) -> Tensor:
    tiles = to_tiles(_rounded(x, bf16))
    hidden = _swiglu(_down(multiply_tiles(tiles, w13_t), bf16), limit)
    out = _down(multiply_tiles(_rounded(_down(hidden, bf16), bf16), w2_t), bf16)
    return out.flatten(0, 1)[: x.shape[0]]


def routed_experts_ref(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13_t: Tensor,
    w2_t: Tensor,
    first_expert: int,
    limit: float,
    bf16: bool,
) -> Tensor:
    top_k = expert_ids.shape[1]
    rows, tiles_by_expert = _tile_rows(expert_ids - first_expert, w13_t.shape[0])
    if rows.numel() == 0:
        return x.new_zeros(x.shape[0], top_k, x.shape[1])
    # Row -1 of a tile is padding: it reads a row of zeros and its result is never looked at.
    padded_x = torch.cat((_rounded(x, bf16), x.new_zeros(1, x.shape[1])))
    padded_weights = torch.cat((weights.flatten(), weights.new_zeros(1)))
    tiles = padded_x[rows.div(top_k, rounding_mode="floor")].unflatten(0, (-1, TILE_ROWS))
    gate_up = torch.cat([multiply_tiles(tiles[a:b], w13_t[e]) for e, a, b in tiles_by_expert])
    hidden = _swiglu(_down(gate_up, bf16), limit)
    hidden *= padded_weights[rows].unflatten(0, (-1, TILE_ROWS)).unsqueeze(2)
    hidden = _rounded(_down(hidden, bf16), bf16)
    out = torch.cat([multiply_tiles(hidden[a:b], w2_t[e]) for e, a, b in tiles_by_expert])
    slots = x.new_zeros(x.shape[0] * top_k + 1, x.shape[1])
    slots[rows] = _down(out, bf16).flatten(0, 1)
    return slots[:-1].unflatten(0, (-1, top_k))


def _tile_rows(local_ids: Tensor, num_local: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Slots sorted by expert, each expert's run padded with -1 to whole tiles.

    Returns:
        rows: [num_tiles · 16], int64: flat slot numbers (token · top_k + slot).
        (expert, first tile, end tile) of every expert that has work.
    """
    flat = local_ids.flatten()
    flat = torch.where((flat >= 0) & (flat < num_local), flat, num_local)
    counts = torch.bincount(flat, minlength=num_local + 1)[:num_local]
    order = flat.argsort(stable=True)[: int(counts.sum())]
    tiles = (counts + TILE_ROWS - 1).div(TILE_ROWS, rounding_mode="floor")
    ends = tiles.cumsum(0)
    shift = (ends - tiles) * TILE_ROWS - (counts.cumsum(0) - counts)
    rows = torch.full((int(tiles.sum()) * TILE_ROWS,), -1, dtype=torch.int64)
    rows[torch.arange(order.shape[0]) + shift[flat[order]]] = order
    bounds = zip(range(num_local), (ends - tiles).tolist(), ends.tolist(), strict=True)
    return rows, [(expert, a, b) for expert, a, b in bounds if b > a]


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu_ref(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def _rounded(x: Tensor, bf16: bool) -> Tensor:
    return round_fp8_ref(x, 32) if bf16 else x


def _down(x: Tensor, bf16: bool) -> Tensor:
    return x.bfloat16().float() if bf16 else x


def combine_slots_ref(slots: Tensor) -> Tensor:
    out = slots[:, 0].clone()
    for slot in range(1, slots.shape[1]):
        out += slots[:, slot]
    return out
