"""What lies between the products of a decode step, on Hopper: `csrc/rows_decode.cu`.

Everything is bfloat16 unless it says otherwise, contiguous, and widths are multiples of 8. Bits of
a row depend on that row alone; values are those of the functions named, in another order of sums.
"""

import ctypes

import torch
from torch import Tensor

from kernels import cuda
from kernels.mhc.mix import HyperMix
from kernels.quant.linear_cuda import PartialSums, PreparedRows

STREAMS = 4
MAX_POOLED = 1024  # channels
MAX_JOINED = 16384  # channels
Angles = tuple[Tensor, Tensor]

_Value = Tensor | int | float | None


def embed_rows(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `table` [vocab, hidden], four times each, and the pre-mix before the first sublayer.

    Args:
        ids: [num_tokens], int32, all within the table.
    Returns:
        [num_tokens, 4, hidden]; [num_tokens, 4], float32.
    """
    tokens, hidden = ids.shape[0], table.shape[1]
    streams = table.new_empty(tokens, STREAMS, hidden)
    carried = torch.empty(tokens, STREAMS, device=table.device)
    _run("embed", tokens, ids, tokens, table, hidden, streams, carried)
    return streams, carried


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of rows [n, width], `x.stride(0)` apart; weight float32."""
    rows, width = x.shape
    if x.stride(1) != 1 or x.stride(0) % 8 or width % 8:
        raise ValueError(f"rms_norm_rows: rows {tuple(x.shape)}, {x.stride(0)} apart")
    out = x.new_empty(rows, width)
    _run("rms_norm", rows, x, x.stride(0), rows, weight, width, float(eps), out)
    return out


def index_queries(x: Tensor, angles: Angles) -> Tensor:
    """`rotate` and `round_fp4_ue8m0` of [num_tokens, heads, dim]; angles float32.

    dim and what is not rotated of it are multiples of 32.
    """
    tokens, heads, dim = x.shape
    cos, sin = angles
    out = torch.empty_like(x)
    _run("index_query", tokens, x, cos, sin, tokens, heads, dim, 2 * cos.shape[1], out)
    return out


def swiglu_rows(both: Tensor, limit: float) -> Tensor:
    """gate | up, [rows, 2 · inter], to silu(min(gate, limit)) · clamp(up, ±limit)."""
    rows, width = both.shape
    out = both.new_empty(rows, width // 2)
    _run("swiglu", rows, both, rows, width // 2, float(limit), out)
    return out


def swiglu_parts(both: PartialSums, limit: float, room: PreparedRows | None = None) -> Tensor:
    """As `swiglu_rows`, of a linear's slices; `room` gets the result for the next linear."""
    slices, rows, width = both.parts.shape
    if width // 2 > MAX_JOINED:
        raise ValueError(f"swiglu_parts: {width // 2} channels")
    out = torch.empty(rows, width // 2, dtype=torch.bfloat16, device=both.parts.device)
    sums = both.parts, both.unit, slices
    _run("swiglu_parts", rows, *sums, rows, width // 2, float(limit), out, *_of(room))
    return out


def combine_shared(
    slots: Tensor, ids: Tensor, shared: PartialSums, *, first_expert: int, experts: int
) -> Tensor:
    """A token's experts in ascending order, and the shared one.

    Args:
        slots: [num_tokens · top_k, hidden], of `routed_experts_slots`.
        ids: [num_tokens, top_k], int32; those held here count.
        shared: the shared expert's second linear.
    Returns:
        [num_tokens, hidden].
    """
    slices, tokens, hidden = shared.parts.shape
    out = slots.new_empty(tokens, hidden)
    held = ids.shape[1], first_expert, experts
    sums = shared.parts, shared.unit, slices
    _run("combine_shared", tokens, slots, ids, *held, *sums, tokens, hidden, out)
    return out


def add_shared(sums: Tensor, shared: Tensor) -> Tensor:
    """Sums of experts, float32, and the shared one's output."""
    out = torch.empty_like(shared)
    _run("add_shared", shared.numel(), sums, shared, shared.numel(), out)
    return out


def expand_rows(streams: Tensor, output: Tensor, mix: HyperMix) -> None:
    """`expand` of streams [num_tokens, 4, hidden], in place."""
    tokens, _, hidden = streams.shape
    _run("expand", tokens, streams, output, mix.post, mix.comb, tokens, hidden)


def join_rows(
    streams: Tensor,
    output: Tensor | None,
    mix: HyperMix | None,
    carried: Tensor,
    norm: Tensor,
    eps: float,
    room: PreparedRows | None = None,
) -> Tensor:
    """`expand` of streams [num_tokens, 4, hidden], in place, and `collapse_norm` of them.

    Args:
        output, mix: of the sublayer behind; None: the streams stay as they are.
        carried: [num_tokens, 4], float32: weights of the collapse.
        norm: [hidden], float32.
        room: gets the result for a linear with FP8 inputs.
    Returns:
        [num_tokens, hidden], the input of the sublayer ahead.
    """
    tokens, _, hidden = streams.shape
    if hidden > MAX_JOINED or (output is None) != (mix is None):
        raise ValueError(f"join_rows: {hidden} channels, or an output without its mix")
    ahead = streams.new_empty(tokens, hidden)
    made = (None, None) if mix is None else (mix.post, mix.comb)
    sizes = tokens, hidden, float(eps)
    _run("join", tokens, streams, output, *made, carried, norm, *sizes, ahead, *_of(room))
    return ahead


def round_rows(x: Tensor, room: PreparedRows) -> None:
    """Rows [num_tokens, width], rounded for a linear with FP8 inputs."""
    tokens, width = x.shape
    if width > MAX_JOINED or not x.is_contiguous():
        raise ValueError(f"round_rows: rows {tuple(x.shape)}")
    _run("round_rows", tokens, x, tokens, width, *_of(room))


def mean_rows(streams: Tensor, out: Tensor) -> None:
    """The mean of the streams into `out` [num_tokens, hidden], whose rows are some stride apart."""
    tokens, _, hidden = streams.shape
    _run("mean", tokens, streams, tokens, hidden, out.stride(0), out)


def pool_rows(
    both: Tensor, positions: Tensor, blocks: Tensor, kept: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """`pool_pairs` and `rms_norm` of tokens that come one by one.

    Args:
        both: [num_tokens, 2 · dim], float32: values | gates.
        positions, blocks: [num_tokens], int32; an even position replaces its block of `kept`, an
            odd one is pooled with it; negative: neither. No block twice, but of an even position
            and the odd one behind it, the next token: that is pooled with this one.
        kept: [num_blocks, 2, dim], float32; blocks are some stride apart.
    Returns:
        [num_tokens, dim], undefined but for odd positions.
    """
    tokens, dim = both.shape[0], both.shape[1] // 2
    if dim > MAX_POOLED:
        raise ValueError(f"pool_rows: {dim} channels, {MAX_POOLED} at most")
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=both.device)
    place = positions, blocks, kept, kept.stride(0)
    _run("pool", tokens, both, tokens, *place, dim, weight, float(eps), out)
    return out


def add_engram(
    streams: Tensor, both: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> None:
    """`add_gated` behind `engram_gate`, in place.

    Args:
        streams: [num_tokens, 4, hidden].
        both: [num_tokens, 5 · hidden]: a key for each stream | the value.
        q_weight, k_weight: [4, hidden], float32.
    """
    tokens, _, hidden = streams.shape
    _run("engram", tokens, streams, both, q_weight, k_weight, tokens, hidden, float(eps))


def _of(room: PreparedRows | None) -> tuple[_Value, ...]:
    if room is None:
        return None, None, 0, 0
    return room.inputs, room.unit, room.rows_of_pass, int(room.is_swizzled)


def _run(function: str, count: int, *values: _Value) -> None:
    if count == 0:
        return
    device = next(value.device for value in values if isinstance(value, Tensor))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    entry = getattr(cuda.load("step", "rows_decode"), function)
    cuda.check(entry(*map(_converted, values), stream))


def _converted(value: _Value) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
