"""Router, experts, hyper-connections and Engram against naive loops."""

import math

import pytest
import torch
from torch import Tensor

from kernels.engram.gate import engram_gate
from kernels.engram.gather import gather_rows
from kernels.engram.hash import ngram_rows
from kernels.mhc.mix import hyper_mix
from kernels.mhc.rms_norm import rms_norm
from kernels.mhc.streams import collapse, expand
from kernels.moe.experts import combine_slots, expert_mlp, routed_experts
from kernels.moe.gate import route
from kernels.quant.linear import LinearWeight, pack_linear


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_router_of_a_loop() -> None:
    scores, bias = torch.randn(20, 8) * 3, torch.randn(8) * 0.2
    ids, weights = route(scores, bias, 3, scaling=1.5)
    for token in range(20):
        affinity = [math.sqrt(math.log1p(math.exp(s))) for s in scores[token].tolist()]
        order = sorted(range(8), key=lambda e: -(affinity[e] + float(bias[e])))
        assert ids[token].tolist() == sorted(order[:3])
        total = sum(affinity[e] for e in order[:3])
        wanted = [affinity[e] / total * 1.5 for e in sorted(order[:3])]
        assert weights[token].tolist() == pytest.approx(wanted, abs=1e-6)


def test_router_ties_go_to_the_lower_expert() -> None:
    ids, weights = route(torch.zeros(2, 6), torch.zeros(6), 2, scaling=1.0)
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_router_with_all_scores_vanishing() -> None:
    """Affinities of e^-100 and less: no division by zero."""
    _, weights = route(torch.full((1, 4), -500.0), torch.zeros(4), 2, scaling=1.5)
    assert weights.isfinite().all()


def test_a_token_that_is_not_finite_fails_alone() -> None:
    scores = torch.randn(4, 8)
    clean = route(scores, torch.zeros(8), 2, scaling=1.5)
    scores[1], scores[2, 3] = float("nan"), float("inf")
    ids, weights = route(scores, torch.zeros(8), 2, scaling=1.5)
    assert ((ids >= 0) & (ids < 8)).all()
    assert not weights[1:3].isfinite().all(1).any()
    for row in (0, 3):
        assert torch.equal(ids[row], clean[0][row])
        assert torch.equal(weights[row], clean[1][row])


def packed(weights_t: Tensor) -> LinearWeight:
    """[in, out], or [groups, in, out]."""
    return pack_linear(weights_t.mT)


def swiglu(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight: float, limit: float) -> Tensor:
    gate, up = (x @ w1).clamp(max=limit), (x @ w3).clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up * weight) @ w2


def test_experts_of_a_loop() -> None:
    x, w13, w2 = torch.randn(21, 32), torch.randn(5, 32, 48), torch.randn(5, 24, 32)
    ids = torch.stack([torch.randperm(5)[:2].sort().values for _ in range(21)])
    weights = torch.rand(21, 2)
    slots = routed_experts(
        x, ids, weights, packed(w13), packed(w2), first_expert=0, limit=3.0, bf16=False
    )
    for token in range(21):
        for slot, expert in enumerate(ids[token].tolist()):
            w1, w3 = w13[expert].chunk(2, 1)
            wanted = swiglu(x[token], w1, w3, w2[expert], float(weights[token, slot]), 3.0)
            assert (slots[token, slot] - wanted).abs().max() < 1e-3
    shared = expert_mlp(x, packed(w13[0]), packed(w2[0]), limit=3.0, bf16=False)
    w1, w3 = w13[0].chunk(2, 1)
    assert (shared[3] - swiglu(x[3], w1, w3, w2[0], 1.0, 3.0)).abs().max() < 1e-3


@pytest.mark.parametrize("bf16", [False, True])
def test_ranks_add_up_to_the_whole_bit_for_bit(bf16: bool) -> None:
    x, w13, w2 = torch.randn(9, 32), torch.randn(5, 32, 64), torch.randn(5, 32, 32)
    ids = torch.stack([torch.randperm(5)[:3].sort().values for _ in range(9)])
    weights = torch.rand(9, 3)

    def part(first: int, end: int) -> Tensor:
        return routed_experts(
            x,
            ids,
            weights,
            packed(w13[first:end]),
            packed(w2[first:end]),
            first_expert=first,
            limit=10.0,
            bf16=bf16,
        )

    whole, low, high = part(0, 5), part(0, 2), part(2, 5)
    assert torch.equal(torch.where(ids.unsqueeze(2) < 2, low, high), whole)
    assert not low[ids >= 2].any()
    assert not part(5, 5).any()
    assert torch.equal(combine_slots(whole), (whole[:, 0] + whole[:, 1]) + whole[:, 2])


def test_mix_of_a_loop() -> None:
    hc, hidden, eps = 4, 32, 1e-6
    streams, fn = torch.randn(3, hc, hidden), torch.randn(hc * hidden, 24) * 0.1
    scale, base = torch.randn(3), torch.randn(24)
    found = hyper_mix(streams, packed(fn), scale, base, num_iters=20, hc_eps=eps, norm_eps=1e-20)
    for token in range(3):
        flat = streams[token].flatten()
        z = (flat @ fn) / flat.square().mean().sqrt()
        pre = torch.sigmoid(z[:4] * scale[0] + base[:4]) + eps
        post = 2 * torch.sigmoid(z[4:8] * scale[1] + base[4:8])
        comb = (z[8:] * scale[2] + base[8:]).view(4, 4).softmax(1) + eps
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        for _ in range(19):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0, keepdim=True) + eps)
        assert (found.pre[token] - pre).abs().max() < 1e-5
        assert (found.post[token] - post).abs().max() < 1e-5
        assert (found.comb[token] - comb).abs().max() < 1e-5


@pytest.mark.parametrize("hc", [1, 2, 3, 5])
def test_mix_of_any_number_of_streams(hc: int) -> None:
    streams, width = torch.randn(7, hc, 32), (2 + hc) * hc
    mix = hyper_mix(
        streams,
        packed(torch.randn(hc * 32, width) * 0.1),
        torch.ones(3),
        torch.zeros(width),
        num_iters=30,
        hc_eps=1e-6,
        norm_eps=1e-20,
    )
    assert (mix.comb.sum(1) - 1).abs().max() < 1e-3
    assert (mix.comb.sum(2) - 1).abs().max() < 1e-3


def test_streams_of_a_loop() -> None:
    streams, out = torch.randn(2, 3, 8), torch.randn(2, 8)
    pre, post, comb = torch.rand(2, 3), torch.rand(2, 3), torch.rand(2, 3, 3)
    for token in range(2):
        wanted = sum((pre[token, i] * streams[token, i] for i in range(3)), torch.zeros(8))
        assert (collapse(streams, pre)[token] - wanted).abs().max() < 1e-5
        for j in range(3):
            wanted = post[token, j] * out[token]
            for i in range(3):  # the FIRST index of comb is the source
                wanted = wanted + comb[token, i, j] * streams[token, i]
            assert (expand(streams, out, post, comb)[token, j] - wanted).abs().max() < 1e-5


def test_norm() -> None:
    x, weight = torch.randn(5, 96), torch.randn(96)
    wanted = weight * x / (x.double().square().mean(-1, keepdim=True)).sqrt()
    assert torch.allclose(rms_norm(x, weight, 1e-20), wanted.float(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.zeros(95), 1e-20)


def test_hash_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    last = torch.randint(-1, 50, (200, 4), generator=generator)
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    primes = torch.tensor([[101, 103], [107, 109], [113, 127]])
    offsets = torch.tensor([[0, 101], [204, 311], [420, 533]])
    found = ngram_rows(last, 7, multipliers, primes, offsets)
    for token in range(200):
        ids = last[token].tolist()
        for back in range(4):
            if ids[back] < 0:
                ids[back:] = [7] * (4 - back)
        terms = [i * m for i, m in zip(ids, multipliers.tolist(), strict=True)]
        mixed, wanted = terms[0], []
        for n in range(3):
            mixed ^= terms[n + 1]
            for head in range(2):
                wanted.append(mixed % int(primes[n, head]) + int(offsets[n, head]))
        assert found[token].tolist() == wanted


def test_gather_dequantises_rows() -> None:
    table = torch.randn(10, 64).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (10, 2), dtype=torch.uint8)
    found = gather_rows(table, scales.view(torch.float8_e8m0fnu), torch.tensor([[3, 9], [0, 3]]))
    assert found.shape == (2, 128)
    factor = (2.0 ** (scales[9].float() - 127)).repeat_interleave(32)
    assert torch.equal(found[0, 64:], table[9].float() * factor)
    assert torch.equal(found[0, :64], found[1, 64:])


def test_engram_gate_of_a_loop() -> None:
    streams, keys = torch.randn(3, 4, 32), torch.randn(3, 4, 32)
    q, k = torch.randn(4, 32), torch.randn(4, 32)
    streams[0, 0] = 0.0  # a dot product of zero gates at sigmoid(sqrt(1e-6))
    found = engram_gate(streams, keys, q, k, 1e-20)
    for token in range(3):
        for i in range(4):
            x, y = streams[token, i], keys[token, i]
            dot = float((x * q[i] * k[i] * y).sum())
            dot /= math.sqrt(float(x.square().mean()) + 1e-20)
            dot /= math.sqrt(float(y.square().mean())) * math.sqrt(32)
            root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
            assert found[token, i] == pytest.approx(1 / (1 + math.exp(-root)), abs=1e-5)
