"""Every kernel of a GPU at small shapes, one family a process: for compute-sanitizer.

`python -m tests.kernels.small_kernels PART`. Inputs are made and packed on the host, so that hardly
any kernel runs but our own: each launch costs a sanitizer much, and so does each access.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.attention.down_rows_cuda import down_rows
from kernels.attention.index_prefill_cuda import index_scores_prefill
from kernels.attention.index_scores_cuda import index_scores_decode
from kernels.attention.packed_rows import (
    pack_compressed_rows,
    pack_keys,
    pack_window_rows,
)
from kernels.attention.select_cuda import candidate_blocks_decode, top_k_decode
from kernels.attention.sparse_cuda import sparse_attention_decode
from kernels.attention.sparse_prefill_cuda import sparse_attention_prefill
from kernels.attention.store_rows_cuda import DIMS, PackedFormat, store_rows_decode
from kernels.comm.one_sided import OneSidedExchange
from kernels.mhc.mix import HyperMix
from kernels.mhc.seam_cuda import CLUSTER_TOKENS, SeamWeights, pack_seam, seam
from kernels.mhc.seam_prefill_cuda import pack_wide_seam, seam_prefill
from kernels.moe.experts_cuda import (
    PackedExperts,
    pack_experts,
    routed_experts_decode,
    routed_experts_slots,
)
from kernels.moe.experts_prefill_cuda import routed_experts_prefill, routed_experts_prefill_slots
from kernels.moe.gate_cuda import choose_experts, route_decode
from kernels.quant.linear_bf16_cuda import (
    linear_bf16,
    pack_linear_bf16,
    pack_linear_codes,
)
from kernels.quant.linear_cuda import (
    PackedLinear,
    PreparedRows,
    linear_fp8_decode,
    linear_fp8_parts,
    pack_linear_fp8,
)
from kernels.quant.linear_prefill_cuda import NARROW, WIDE, linear_prefill
from kernels.quant.rows_prefill_cuda import (
    expand_linear,
    norm_round_rows,
    round_rows,
    swiglu_round_rows,
)
from kernels.step import rows_cuda
from services.executor.gpu.random_model import random_device_model
from services.executor.presets import preset_config
from tests.kernels.one_sided_rig import CAPACITY, geometry, group, moe, on_every_rank, split
from tests.kernels.one_sided_rig import tokens as exchanged_tokens
from tests.kernels.small_forwards import Requests, sample
from tests.kernels.test_experts_cuda import random_weights
from tests.kernels.test_index_cuda import paged
from tests.kernels.test_linear_cuda import random_weight

EPS, LIMIT = 1e-20, 10.0
MIXING = {"num_iters": 4, "hc_eps": 1e-6, "norm_eps": EPS}
Parts = dict[str, Callable[[], list[Tensor]]]
PARTS: Parts = {}


def part(function: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Under its name; what it returns must be finite."""
    PARTS[function.__name__] = function
    return function


def rows_of(count: int, width: int) -> Tensor:
    """Activations."""
    return torch.randn(count, width).bfloat16().cuda()


def turn(count: int) -> tuple[Tensor, Tensor]:
    """cos and sin of a rotation."""
    angles = torch.rand(count, 32) * 6.28
    return angles.cos().cuda(), angles.sin().cuda()


def experts_of(experts: int, hidden: int, inter: int) -> PackedExperts:
    """Packed on the host."""
    made = pack_experts(*random_weights(experts, hidden, inter, "cpu"))
    return PackedExperts(made.w13.cuda(), made.w2.cuda(), hidden, inter)


def routed(count: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Ids, the first of which is busy, and shares."""
    odds = 1.0 / torch.arange(1, experts + 1)
    ids = torch.multinomial(odds.expand(count, -1), top_k).sort(1).values.int()
    return ids.cuda(), (torch.rand(count, top_k) + 0.1).cuda()


@part
def experts_decode() -> list[Tensor]:
    """More rows of an expert than a pass has; a part of the experts; slots."""
    held, found = experts_of(4, 128, 64), list[Tensor]()
    for count in (1, 11):
        ids, shares = routed(count, 4, 2)
        x = rows_of(count, 128)
        found.append(routed_experts_decode(x, ids, shares, held, first_expert=0, limit=LIMIT))
        half = PackedExperts(held.w13[:2], held.w2[:2], 128, 64)
        found.append(routed_experts_decode(x, ids, shares, half, first_expert=1, limit=LIMIT))
        routed_experts_slots(x, ids, shares, held, first_expert=0, limit=LIMIT)
    return found


@part
def experts_prefill() -> list[Tensor]:
    """Tiles of several widths, one of them not full."""
    held, found = experts_of(3, 128, 64), list[Tensor]()
    for count in (3, 70):
        ids, shares = routed(count, 3, 2)
        x, shared = rows_of(count, 128), rows_of(count, 128)
        found += [
            routed_experts_prefill(
                x, ids, shares, held, first_expert=0, limit=LIMIT, shared=with_shared
            )
            for with_shared in (None, shared)
        ]
        routed_experts_prefill_slots(x, ids, shares, held, first_expert=0, limit=LIMIT)
    return found


def fp8_weight(groups: int, outputs: int, depth: int) -> PackedLinear:
    """Packed on the host."""
    made = pack_linear_fp8(*random_weight(groups, outputs, depth, "cpu"))
    return replace(made, data=made.data.cuda())


@part
def linear_fp8() -> list[Tensor]:
    """Few rows and many; slices that their readers add."""
    found = list[Tensor]()
    for weight, counts in ((fp8_weight(2, 128, 320), (1, 9, 40)), (fp8_weight(1, 64, 2048), (3,))):
        for count in counts:
            x = rows_of(count, weight.groups * weight.depth)
            found.append(linear_fp8_decode(x, weight))
    sliced = fp8_weight(1, 128, 2048)
    x, room = rows_of(5, 2048), PreparedRows.room(5, sliced)
    rows_cuda.round_rows(x, room)
    parts = linear_fp8_parts(room, sliced)
    ids, _ = routed(5, 4, 2)
    slots = rows_of(10, 128)
    found.append(rows_cuda.swiglu_parts(parts, LIMIT))
    found.append(rows_cuda.combine_shared(slots, ids, parts, first_expert=0, experts=4))
    return found


@part
def linear_fp8_wide() -> list[Tensor]:
    """As many rows as take the other kernel."""
    weight = fp8_weight(1, 256, 128)
    return [linear_fp8_decode(rows_of(count, 128), weight) for count in (64, 70)]


@part
def linear_bf16_weights() -> list[Tensor]:
    """Weights as values: few rows, many, and all that slices of K are added for."""
    found = list[Tensor]()
    for groups, outputs, depth in ((1, 96, 192), (1, 32, 1280), (2, 64, 128)):
        made = pack_linear_bf16(torch.randn(groups, outputs, depth).bfloat16())
        weight = replace(made, data=made.data.cuda())
        for count in (1, 30, 140):
            x = rows_of(count, groups * depth)
            found.append(linear_bf16(x, weight, unrounded=True))
    return found


@part
def linear_bf16_codes() -> list[Tensor]:
    """Weights as codes."""
    made = pack_linear_codes(*random_weight(2, 128, 192, "cpu"))
    weight = replace(made, data=made.data.cuda())
    return [linear_bf16(rows_of(count, 384), weight) for count in (1, 30, 140)]


@part
def linear_of_prompts() -> list[Tensor]:
    """Tiles of both widths; sums, rounded results, turned heads."""
    made = pack_linear_bf16(torch.randn(1, 256, 128).bfloat16())
    weight = replace(made, data=made.data.cuda())
    found = list[Tensor]()
    for tile in (NARROW, WIDE):
        x = rows_of(150, 128)
        found.append(linear_prefill(x, weight, tile=tile))
        found.append(linear_prefill(x, weight, tile=tile, floats=True))
        found.append(linear_prefill(x, weight, tile=tile, rounds=True))
    head = pack_linear_bf16(torch.randn(1, 512, 64).bfloat16())
    turned = replace(head, data=head.data.cuda())
    found.append(linear_prefill(rows_of(130, 64), turned, rope=turn(130), head=512))
    return found


@part
def rows_of_prompts() -> list[Tensor]:
    """Rounding, norm, activation; weights expanded."""
    x = rows_of(19, 512)
    expanded = expand_linear(fp8_weight(2, 128, 192))
    return [
        round_rows(x),
        norm_round_rows(x[:, :256], torch.ones(256).cuda(), EPS),
        swiglu_round_rows(x, LIMIT),
        expanded.data,
    ]


@part
def router() -> list[Tensor]:
    """Logits and choice in one, and the choice alone."""
    weight, bias = (torch.randn(64, 256) * 0.06).bfloat16().cuda(), torch.zeros(64).cuda()
    found = [
        route_decode(rows_of(count, 256), weight, bias, 6, scaling=1.5)[1] for count in (1, 13)
    ]
    logits = torch.randn(40, 64).cuda()
    return [*found, choose_experts(logits, bias, 6, scaling=1.5)[1]]


def index_inputs(count: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor]:
    """Arguments of both kernels up to the rows of tokens."""
    entries = 32
    blocks = keys // entries
    return (
        torch.randn(count, 32, 128).bfloat16().cuda(),
        (torch.randn(count, 32) * 0.02).bfloat16().cuda(),
        pack_keys(torch.randn(3 * keys, 128), entries).cuda(),
        paged(3, blocks, 3 * blocks).cuda(),
        entries,
        torch.arange(count).remainder(3).sort().values.int().cuda(),
    )


@part
def index_decode() -> list[Tensor]:
    """Scores, candidates, choices."""
    keys, found = 160, list[Tensor]()
    for count in (1, 5):
        inputs = index_inputs(count, keys)
        visible = torch.randint(100, keys + 1, (count,)).int().cuda()
        scores = index_scores_decode(*inputs, visible, keys)
        bits = candidate_blocks_decode(scores, visible, 8, 9)
        paging = inputs[3], inputs[4], inputs[5]
        found += [
            top_k_decode(scores, visible, top_k, *paging, allowed=allowed)[0].float()
            for top_k, allowed in ((64, None), (16, bits))
        ]
    return found


@part
def index_of_prompts() -> list[Tensor]:
    """Tokens of several rows in a tile."""
    keys, count = 160, 40
    visible = torch.full((count,), keys).int().cuda()
    return [index_scores_prefill(*index_inputs(count, keys), visible, keys)]


def pools(slots: int) -> tuple[Tensor, Tensor]:
    """Window rows, compressed rows."""
    window, compressed = torch.randn(slots, 512), torch.randn(slots, 512)
    return pack_window_rows(window).cuda(), pack_compressed_rows(compressed).cuda()


def chosen(count: int, width: int, slots: int) -> Tensor:
    """Slots of each token, some of them missing."""
    found = torch.stack([torch.randperm(slots)[:width] for _ in range(count)]).int()
    found[-1, width // 2 :] = -1
    return found.cuda()


@part
def attention_decode() -> list[Tensor]:
    """Every division of heads into blocks; window alone, and with compressed rows."""
    window, compressed = pools(150)
    count, sinks = 3, torch.randn(64).cuda()
    queries = (0.3 * torch.randn(count, 64, 512)).bfloat16().cuda()
    near, far = chosen(count, 96, 150), chosen(count, 100, 150)
    found = list[Tensor]()
    for block_heads in (8, 16, 32, 64):
        with_far = compressed, far
        for more in ((None, None), with_far):
            found.append(
                sparse_attention_decode(
                    queries, window, near, *more, sinks, rope=turn(count), block_heads=block_heads
                )
            )
    return found


@part
def attention_of_prompts() -> list[Tensor]:
    """Tokens that share a tile."""
    window, compressed = pools(150)
    count, sinks = 9, torch.randn(64).cuda()
    queries = (0.3 * torch.randn(count, 64, 512)).bfloat16().cuda()
    near, far = chosen(count, 64, 150), chosen(count, 40, 150)
    return [
        sparse_attention_prefill(queries, window, near, *more, sinks, rope=turn(count))
        for more in ((None, None), (compressed, far))
    ]


def mixes(count: int) -> HyperMix:
    """How streams join."""
    comb = torch.rand(count, 4, 4).softmax(2)
    return HyperMix(torch.rand(count, 4).cuda(), (2 * torch.rand(count, 4)).cuda(), comb.cuda())


@part
def seam_decode() -> list[Tensor]:
    """Every size of a cluster."""
    hidden, found = 384, list[Tensor]()
    made = pack_seam(
        torch.randn(24, 4 * hidden) * 0.02, torch.ones(3), torch.zeros(24), torch.ones(hidden)
    )
    weights = SeamWeights(**{name: value.cuda() for name, value in vars(made).items()})
    for cluster_tokens in CLUSTER_TOKENS:
        count = cluster_tokens + 1
        streams = torch.randn(count, 4, hidden).bfloat16().cuda()
        carried = torch.rand(count, 4).cuda()
        behind = rows_of(count, hidden), mixes(count)
        ahead, _ = seam(streams, *behind, carried, weights, cluster_tokens=cluster_tokens, **MIXING)
        found.append(ahead)
    return found


@part
def seam_of_prompts() -> list[Tensor]:
    """First seam and a later one."""
    hidden, count = 384, 70
    fn = (torch.randn(24, 4 * hidden) * 0.02).cuda()
    weights = pack_wide_seam(
        fn, torch.ones(3).cuda(), torch.zeros(24).cuda(), torch.ones(hidden).cuda()
    )
    found = list[Tensor]()
    for behind in ((None, None), (rows_of(count, hidden), mixes(count))):
        streams = torch.randn(count, 4, hidden).bfloat16().cuda()
        carried = torch.rand(count, 4).cuda()
        found += seam_prefill(streams, *behind, carried, weights, **MIXING)[:2]
    return found


@part
def rows_between_products() -> list[Tensor]:
    """Streams, norms, activations, pairs, Engram."""
    hidden, count = 384, 5
    streams, carried = rows_cuda.embed_rows(
        torch.tensor([3, 9, 0, 1, 2], dtype=torch.int32).cuda(), rows_of(10, hidden)
    )
    norm = torch.ones(hidden).cuda()
    behind = rows_of(count, hidden), mixes(count)
    ahead = rows_cuda.join_rows(streams, *behind, carried, norm, EPS)
    rows_cuda.expand_rows(streams, *behind)
    wide = torch.zeros(count, 3, hidden).bfloat16().cuda()
    rows_cuda.mean_rows(streams, wide[:, 1])
    both, kept = torch.randn(4, 1024).cuda(), torch.randn(6, 2, 2, 512).cuda()
    positions = torch.tensor([8, 9, -1, 3], dtype=torch.int32).cuda()
    blocks = torch.tensor([4, 0, -1, 2], dtype=torch.int32).cuda()
    pooled = rows_cuda.pool_rows(both, positions, blocks, kept[:, 1], torch.ones(512).cuda(), EPS)
    weights = torch.ones(4, hidden).cuda()
    rows_cuda.add_engram(streams, rows_of(count, 5 * hidden), weights, weights, EPS)
    normed = rows_cuda.rms_norm_rows(rows_of(count, hidden), norm, EPS)
    active = rows_cuda.swiglu_rows(rows_of(count, 256), LIMIT)
    queries = rows_cuda.index_queries(rows_of(count, 4096).view(count, 32, 128), turn(count))
    return [streams, ahead, wide, pooled[[0, 1, 3]], normed, active, queries]


@part
def stored_rows() -> list[Tensor]:
    """All formats; the first linear's results."""
    count, slots = 5, 64
    at = torch.randperm(slots)[:count].int()
    at[3] = -1
    for packed_format in PackedFormat:
        dim = DIMS[packed_format]
        pool = torch.zeros(slots, dim)
        made = {
            PackedFormat.WINDOW: pack_window_rows,
            PackedFormat.COMPRESSED: pack_compressed_rows,
            PackedFormat.KEY: lambda x: pack_keys(x, 32),
        }[packed_format](pool)
        for norm in (None, torch.ones(dim).cuda()):
            store_rows_decode(
                rows_of(count, dim),
                turn(count),
                made.cuda(),
                at.cuda(),
                packed_format,
                norm=norm,
                eps=EPS,
                entries=32,
            )
    down = linear_fp8_parts(rows_of(count, 2048), fp8_weight(1, 128 + 512, 2048))
    norms = torch.ones(128).cuda(), torch.ones(512).cuda()
    window, _ = pools(slots)
    return [down_rows(down, norms, EPS, turn(count), at.cuda(), window)]


@part
def sampler() -> list[Tensor]:
    """All kinds of sampling; scores of ids."""
    return [sample(torch.randn(3, 512).cuda()).float()]


@part
def exchange() -> list[Tensor]:
    """Dispatch and combine of two ranks on one device."""

    def run(rank: OneSidedExchange) -> Tensor:
        rank.begin(0, CAPACITY)
        return moe(rank, owners, exchanged_tokens(rank.rank, 5, "cuda")).float()

    owners = split(2, "cuda")
    with group(geometry(2), "cuda") as exchanges:
        return on_every_rank(exchanges, run)


@part
def forward_of_any_shape() -> list[Tensor]:
    """Kernels of any shape: a chunk, and tokens behind it."""
    requests = Requests(random_device_model(preset_config("v41-nano", layers=4), fast=False))
    model, cache = requests.model, requests.cache
    model.launch(requests.batch(requests.row(0, 0, 20), requests.row(1, 0, 7)), cache)
    rows = requests.row(0, 20, 21), requests.row(1, 7, 8), requests.row(2, 0, 1)
    return [model.launch(requests.batch(*rows), cache).logits]


def main() -> int:
    """0 if all results are finite."""
    torch.manual_seed(0)
    began = time.monotonic()
    found = PARTS[sys.argv[1]]()
    torch.cuda.synchronize()
    finite = all(bool(torch.isfinite(each.cpu().float()).all()) for each in found)
    print(f"{sys.argv[1]}: finite {finite}, {time.monotonic() - began:.1f} s", flush=True)
    return 0 if finite else 1


if __name__ == "__main__":
    sys.exit(main())
