"""The pieces of a block, parallel over the sequence. Each is compiled on a GPU and plain elsewhere.

Shapes: streams [batch, tokens, hc, hidden], sublayer inputs [batch, tokens, hidden], queries
[batch, tokens, heads, head_dim], one key-and-value vector per token [batch, tokens, head_dim].
With `rounds`, activations and caches are rounded as the released checkpoint's engine rounds them.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.tiny.training.quantise import fp4_cache, fp4_index, fp8_runs
from models.tiny.training.sinkhorn import sinkhorn_scales

NEVER = -1e30
GRADIENT_ITERATIONS = 3  # of Sinkhorn; the earlier ones are taken as a fixed start

P = ParamSpec("P")
R = TypeVar("R")

torch._dynamo.config.cache_size_limit = 64


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` for CUDA arguments, one graph for each set of shapes."""
    fast = torch.compile(function, dynamic=False)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        return fast(*args, **kwargs) if first.is_cuda else function(*args, **kwargs)

    return call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMS(x) times the weight, in the type of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last channels of `x` in adjacent pairs."""
    width = 2 * cos.shape[-1]
    even, odd = x[..., -width::2].float(), x[..., 1 - width :: 2].float()
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], pairs.to(x.dtype)), -1)


@compiled_on_gpu
def embed(ids: Tensor, table: Tensor, num_streams: int, dtype: torch.dtype) -> Tensor:
    """Return the streams of the token ids, all equal."""
    return F.embedding(ids, table).to(dtype)[..., None, :].repeat(1, 1, num_streams, 1)


@compiled_on_gpu
def mix(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    num_iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sublayer's input (folded by `pre`), and its own pre, post and comb."""
    num_streams = streams.shape[-2]
    flat = streams.flatten(-2).float()
    z = (flat @ fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    scaled = z * torch.cat(
        [scale[i].expand(n) for i, n in enumerate((num_streams, num_streams, num_streams**2))]
    )
    raw_pre, raw_post, raw_comb = (scaled + base).split(
        (num_streams, num_streams, num_streams**2), -1
    )
    own_pre = torch.sigmoid(raw_pre) + hc_eps
    post = 2 * torch.sigmoid(raw_post)
    comb = raw_comb.unflatten(-1, (num_streams, num_streams)).softmax(-1) + hc_eps
    num_fixed = num_iterations - 1 - GRADIENT_ITERATIONS
    rows, columns = sinkhorn_scales(comb.detach().contiguous(), hc_eps, num_fixed)
    for _ in range(GRADIENT_ITERATIONS):
        rows = rows / (rows * (comb * columns[..., None, :]).sum(-1) + hc_eps)
        columns = columns / (columns * (comb * rows[..., None]).sum(-2) + hc_eps)
    comb = comb * rows[..., None] * columns[..., None, :]
    return _fold(streams, pre, norm, eps), own_pre, post, comb


def _fold(streams: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    return rms_norm((pre[..., None] * streams.float()).sum(-2), norm, eps).to(streams.dtype)


@compiled_on_gpu
def fold(streams: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return the normalised sum of the streams."""
    return _fold(streams, pre, norm, eps)


@compiled_on_gpu
def expand(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the new streams: post_j * output + sum over i of comb[i, j] * stream_i."""
    wide = streams.float()
    new = post[..., None] * output.float()[..., None, :]
    for source in range(streams.shape[-2]):
        new = new + comb[..., source, :, None] * wide[..., source, None, :]
    return new.to(streams.dtype)


@compiled_on_gpu
def project(
    u: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    eps: float,
    rounds: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, key-and-value rows and the low-rank query."""
    operand = fp8_runs(u) if rounds else u
    low_rank = rms_norm(operand @ wq_a.t(), q_norm, eps)
    query = ((fp8_runs(low_rank) if rounds else low_rank) @ wq_b.t()).unflatten(-1, (num_heads, -1))
    rows = rotate(rms_norm(operand @ wkv.t(), kv_norm, eps), cos, sin)
    return (
        rotate(query, cos[..., None, :], sin[..., None, :]),
        fp8_runs(rows) if rounds else rows,
        low_rank,
    )


@compiled_on_gpu
def compress(
    u: Tensor,
    wkv: Tensor,
    wgate: Tensor | None,
    norm: Tensor,
    index_wk: Tensor,
    index_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    rounds: bool,
) -> tuple[Tensor, Tensor]:
    """Return compressed rows and index keys; with a gate, one for each pair of tokens."""
    rows = u @ wkv.t()
    if wgate is not None:
        share = (u @ wgate.t()).float().unflatten(1, (-1, 2)).softmax(2)
        rows = (rows.float().unflatten(1, (-1, 2)) * share).sum(2).to(u.dtype)
    rows = rms_norm(rows, norm, eps)
    keys = rotate(rms_norm(rows.detach() @ index_wk.t(), index_norm, eps), cos, sin)
    rows = rotate(rows, cos, sin)
    return (fp4_cache(rows), fp4_index(keys)) if rounds else (rows, keys)


def visible_rows(positions: Tensor, starts: Tensor, num_rows: int) -> Tensor:
    """Return which compressed rows each query may see: complete, and of its own document."""
    ratio = positions.shape[0] // num_rows
    first = torch.arange(num_rows, device=starts.device) * ratio
    complete = first + ratio - 1 <= positions[:, None]
    return complete & (first >= starts[..., None])


def _in_window(positions: Tensor, starts: Tensor, span: Tensor, window: int) -> Tensor:
    """Return the mask [batch, tokens, 2 * window] over this chunk's and the last one's keys."""
    offsets = torch.arange(2 * window, device=starts.device) - window
    keys = (positions // window * window)[:, None] + offsets
    recent = (keys <= positions[:, None]) & (keys > positions[:, None] - span[:, None, None])
    return recent & (keys >= starts[..., None])


@compiled_on_gpu
def attend(
    query: Tensor,
    rows: Tensor,
    sink: Tensor,
    positions: Tensor,
    starts: Tensor,
    span: Tensor,
    compressed: Tensor | None,
    selected: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend to the window and the compressed rows; return the output and its log-normaliser.

    `span` [batch] narrows the window of a row. Without `selected` every visible row is read.
    """
    batch, tokens, heads, width = query.shape
    chunks = (batch, tokens // window, window, width)
    query = query * width**-0.5
    before = F.pad(rows, (0, 0, window, 0))[:, :tokens]
    keys = torch.cat((before.view(chunks), rows.view(chunks)), 2)
    by_chunk = query.reshape(batch, tokens // window, window * heads, width)
    near = (by_chunk @ keys.mT).view(batch, tokens, heads, 2 * window).float()
    near = near.masked_fill(~_in_window(positions, starts, span, window)[:, :, None], NEVER)
    top = torch.maximum(near.amax(-1, keepdim=True), sink[:, None])
    far = None
    if compressed is not None:
        seen = (
            visible_rows(positions, starts, compressed.shape[1]) if selected is None else selected
        )
        far = (query.reshape(batch, tokens * heads, width) @ compressed.mT).view(
            batch, tokens, heads, -1
        )
        far = far.float().masked_fill(~seen[:, :, None], NEVER)
        top = torch.maximum(top, far.amax(-1, keepdim=True))
    top = top.detach()
    near = torch.exp(near - top)
    total = near.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top)
    if far is not None:
        far = torch.exp(far - top)
        total = total + far.sum(-1, keepdim=True)
    share = (near / total).to(query.dtype).reshape(batch, tokens // window, window * heads, -1)
    output = (share @ keys).view(batch, tokens, heads, width)
    if far is not None:
        assert compressed is not None
        share = (far / total).to(query.dtype).view(batch, tokens * heads, -1)
        output = output + (share @ compressed).view(batch, tokens, heads, width)
    return output, (total.log() + top).squeeze(-1).detach()


@compiled_on_gpu
def project_out(
    output: Tensor,
    cos: Tensor,
    sin: Tensor,
    wo_a: Tensor,
    wo_b: Tensor,
    num_groups: int,
    rounds: bool,
) -> Tensor:
    """Undo the rotation of the values and apply the grouped output projection."""
    output = rotate(output, cos[..., None, :], -sin[..., None, :])
    grouped = output.flatten(-2).unflatten(-1, (num_groups, -1))
    ranks = torch.einsum("...gd,grd->...gr", grouped, wo_a.unflatten(0, (num_groups, -1))).flatten(
        -2
    )
    return (fp8_runs(ranks) if rounds else ranks) @ wo_b.t()


@compiled_on_gpu
def route_and_feed(
    u: Tensor,
    gate: Tensor,
    bias: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    num_chosen: int,
    limit: float,
    route_scale: float,
    rounds: bool,
) -> tuple[Tensor, Tensor]:
    """Return the mixture of experts' output and the load of each expert.

    All experts compute every token and the unchosen ones weigh nothing, which on a GPU is faster
    than gathering at this size. The last of w1, w3 [experts + 1, inner, hidden] is the shared one.
    """
    x = u.flatten(0, -2)
    scores = F.softplus(x.float() @ gate.float().t()).sqrt()
    ranking = (scores + bias).detach()
    threshold = ranking.amax(-1, keepdim=True)
    for _ in range(num_chosen - 1):
        threshold = ranking.masked_fill(ranking >= threshold, -torch.inf).amax(-1, keepdim=True)
    chosen = (ranking >= threshold).float()
    weight = scores * chosen
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * route_scale
    weight = torch.cat((weight, torch.ones_like(weight[:, :1])), 1)
    operand = fp8_runs(x) if rounds else x
    gated = (operand @ w1.flatten(0, 1).t()).float().clamp(max=limit)
    value = (operand @ w3.flatten(0, 1).t()).float().clamp(-limit, limit)
    inner = (F.silu(gated) * value).unflatten(-1, (w1.shape[0], -1)) * weight[..., None]
    inner = inner.flatten(-2).to(u.dtype)
    if rounds:
        inner = fp8_runs(inner)
    return (inner @ w2.mT.flatten(0, 1)).view(u.shape), chosen.sum(0)


@compiled_on_gpu
def add_ngrams(
    streams: Tensor,
    rows: Tensor,
    table: Tensor,
    wkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    rounds: bool,
) -> Tensor:
    """Add the gated Engram value of the hashed rows [batch, tokens, rows] to every stream."""
    num_streams, hidden = streams.shape[-2:]
    memory = F.embedding(rows, table).flatten(-2).to(streams.dtype)
    projected = ((fp8_runs(memory) if rounds else memory) @ wkv.t()).float()
    key = projected[..., : num_streams * hidden].unflatten(-1, (num_streams, hidden))
    value = projected[..., num_streams * hidden :]
    wide = streams.float()
    match = (wide * q_weight * k_weight * key).sum(-1) * hidden**-0.5
    match = (
        match * torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    )
    gate = torch.sigmoid(torch.copysign(match.abs().clamp_min(1e-6).sqrt(), match))
    return (wide + gate[..., None] * value[..., None, :]).to(streams.dtype)


@compiled_on_gpu
def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of each token and whether the likeliest token is the target."""
    logits = (hidden @ head.t()).float()
    losses = logits.logsumexp(-1) - logits.gather(-1, targets[..., None]).squeeze(-1)
    return losses, logits.argmax(-1) == targets
