"""What lies between the products of a decode step on a GPU: values and bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.engram.gate_ref import add_gated_ref, engram_gate_ref
from kernels.mhc.mix import HyperMix
from kernels.mhc.rms_norm_ref import rms_norm_ref
from kernels.mhc.streams_ref import collapse_ref, expand_ref
from kernels.quant.linear_cuda import PreparedRows, linear_fp8_decode, linear_fp8_parts
from kernels.quant.linear_cuda import pack_linear_fp8 as pack
from kernels.step.rows_cuda import (
    add_engram,
    combine_shared,
    embed_rows,
    expand_rows,
    join_rows,
    mean_rows,
    pool_rows,
    rms_norm_rows,
    round_rows,
    swiglu_parts,
    swiglu_rows,
)
from tests.kernels.test_linear_cuda import random_weight

EPS = 1e-20
TOKENS = 37


def near(ours: Tensor, wanted: Tensor) -> None:
    """One unit of bfloat16 where a value is near a tie."""
    torch.testing.assert_close(ours.float().cpu(), wanted.float(), rtol=2.0**-7, atol=1e-6)


def each_alone(function: Callable[[slice], Tensor]) -> Tensor:
    """The result for all tokens, which a token alone must have, too."""
    whole = function(slice(TOKENS))
    for token in (0, 5, TOKENS - 1):
        assert torch.equal(function(slice(token, token + 1)), whole[token : token + 1])
    return whole


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="join_rows: 16392 channels"):
        join_rows(torch.zeros(1, 4, 16392), None, None, torch.zeros(1, 4), torch.ones(1), EPS)
    none = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="pool_rows: 1032 channels"):
        pool_rows(torch.zeros(1, 2064), none, none, torch.zeros(1), torch.zeros(1), EPS)


def streams_of(hidden: int) -> tuple[Tensor, Tensor, HyperMix, Tensor, Tensor]:
    torch.manual_seed(hidden)
    streams = (torch.randn(TOKENS, 4, hidden) * torch.rand(TOKENS, 1, 1) * 4).bfloat16()
    comb = torch.rand(TOKENS, 4, 4).softmax(2)
    mix = HyperMix(torch.rand(TOKENS, 4), 2 * torch.rand(TOKENS, 4), comb)
    output = torch.randn(TOKENS, hidden).bfloat16()
    return streams, output, mix, torch.rand(TOKENS, 4), torch.rand(hidden) + 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [256, 5120, 16384])
def test_streams_join_and_collapse(hidden: int) -> None:
    streams, output, mix, carried, norm = streams_of(hidden)
    for has_output in (True, False):
        held: list[Tensor] = []

        def run(some: slice, has_output: bool = has_output, held: list[Tensor] = held) -> Tensor:
            own = streams[some].cuda()
            made = HyperMix(*(part[some].cuda() for part in mix))
            behind = (output[some].cuda(), made) if has_output else (None, None)
            ahead = join_rows(own, *behind, carried[some].cuda(), norm.cuda(), EPS)
            held.append(own)
            return ahead

        ahead = each_alone(run)
        want = streams.float()
        if has_output:
            want = expand_ref(want, output.float(), mix.post, mix.comb).bfloat16().float()
        near(held[0], want)
        folded = collapse_ref(held[0].float().cpu(), carried).bfloat16().float()
        near(ahead, rms_norm_ref(folded, norm, EPS))
    own = streams.cuda()
    expand_rows(own, output.cuda(), HyperMix(*(part.cuda() for part in mix)))
    near(own, expand_ref(streams.float(), output.float(), mix.post, mix.comb))
    wide = torch.zeros(TOKENS, 3, hidden, device="cuda").bfloat16()
    mean_rows(streams.cuda(), wide[:, 1])
    near(wide[:, 1], streams.float().mean(1))
    assert not bool(wide[:, 0].any())
    assert not bool(wide[:, 2].any())


@pytest.mark.gpu
def test_embeddings_fill_all_streams() -> None:
    table = torch.randn(50, 384, device="cuda").bfloat16()
    ids = torch.tensor([3, 49, 0], dtype=torch.int32, device="cuda")
    streams, carried = embed_rows(ids, table)
    for stream in range(4):
        assert torch.equal(streams[:, stream], table[ids.long()])
    assert carried.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 3


@pytest.mark.gpu
def test_norms_and_activations() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(TOKENS, 1792).bfloat16().cuda(), torch.rand(1280) + 0.5
    norm = each_alone(lambda some: rms_norm_rows(x[some, :1280], weight.cuda(), EPS))
    near(norm, rms_norm_ref(x[:, :1280].float().cpu(), weight, EPS))
    both = (torch.randn(TOKENS, 256) * 8).bfloat16().cuda()
    hidden = each_alone(lambda some: swiglu_rows(both[some], 10.0))
    gate, up = both.float().cpu().chunk(2, 1)
    near(hidden, torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 16, 30, 70])
def test_slices_are_added_by_whoever_reads_them(tokens: int) -> None:
    torch.manual_seed(tokens)
    weight = pack(*random_weight(1, 1024, 2048, "cuda"))
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()
    x[0, :32] *= 4096  # of a scale of its own
    whole, parts = linear_fp8_decode(x, weight), linear_fp8_parts(x, weight)
    room = PreparedRows.room(tokens, weight)
    round_rows(x, room)
    assert torch.equal(linear_fp8_decode(room, weight), whole)
    assert torch.equal(swiglu_parts(parts, 10.0), swiglu_rows(whole, 10.0))
    ids = torch.randint(-1, 6, (tokens, 3), dtype=torch.int32, device="cuda").sort(1).values
    slots = torch.randn(tokens * 3, 1024, device="cuda").bfloat16()
    slots[ids.flatten() < 2] = float("nan")  # of experts elsewhere: never read into a sum
    out = combine_shared(slots, ids, parts, first_expert=2, experts=4)
    here = torch.where((ids < 2).unsqueeze(2), 0.0, slots.view(tokens, 3, 1024).float())
    near(out, (here.sum(1) + whole.float()).cpu())


@pytest.mark.gpu
def test_pairs_are_kept_and_pooled() -> None:
    torch.manual_seed(3)
    dim, weight = 512, torch.rand(512) + 0.5
    kept = torch.randn(6, 2, 2, dim, device="cuda")  # of two layers; the second is ours
    both, before = torch.randn(4, 2 * dim, device="cuda"), kept.clone()
    positions = torch.tensor([8, 9, -1, 3], dtype=torch.int32, device="cuda")
    blocks = torch.tensor([4, 0, -1, 2], dtype=torch.int32, device="cuda")
    out = pool_rows(both, positions, blocks, kept[:, 1], weight.cuda(), EPS)
    assert torch.equal(kept[4, 1].flatten(), both[0])
    kept[4, 1] = before[4, 1]
    assert torch.equal(kept, before)
    for token, block in ((1, 0), (3, 2)):
        held = before[block, 1].cpu()
        value, gate = both[token].cpu().view(2, dim)
        first = torch.sigmoid(held[1] - gate)
        pooled = (first * held[0] + (1 - first) * value).bfloat16().float()
        near(out[token], rms_norm_ref(pooled.unsqueeze(0), weight, EPS)[0])


@pytest.mark.gpu
def test_engram_is_added_as_far_as_keys_agree() -> None:
    torch.manual_seed(4)
    hidden = 384
    q_weight, k_weight = torch.rand(4, hidden) + 0.5, torch.rand(4, hidden) + 0.5
    streams = torch.randn(TOKENS, 4, hidden).bfloat16()
    both = torch.randn(TOKENS, 5 * hidden).bfloat16()

    def run(some: slice) -> Tensor:
        own = streams[some].cuda()
        add_engram(own, both[some].cuda(), q_weight.cuda(), k_weight.cuda(), EPS)
        return own

    keys = both[:, : 4 * hidden].float().unflatten(1, (4, hidden))
    gates = engram_gate_ref(streams.float(), keys, q_weight, k_weight, EPS)
    near(
        each_alone(run), add_gated_ref(streams.float(), gates, both[:, 4 * hidden :].float(), True)
    )


def test_weights_of_one_slice_have_no_parts() -> None:
    with pytest.raises(ValueError, match="the weights have one slice"):
        linear_fp8_parts(torch.zeros(1, 64), pack(*random_weight(1, 64 * 256, 64, "cpu")))
