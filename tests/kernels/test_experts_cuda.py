"""MXFP4 experts on a GPU: packing (anywhere), results, bits and parts of a group (on a device)."""

import pytest
import torch
from torch import Tensor

from kernels.moe.experts_cuda import (
    CHUNK_BYTES,
    PackedExperts,
    pack_experts,
    routed_experts_decode,
)
from kernels.moe.experts_ref import combine_slots_ref, routed_experts_ref
from kernels.quant.unpack_ref import unpack_fp4_ref

LIMIT = 10.0
SIGN_AND_MAGNITUDE = ((15, 9), (12, 6), (14, 3), (13, 0))  # bits of a half word, by register


def random_weights(experts: int, hidden: int, inter: int, device: str) -> list[Tensor]:
    """w1, w3, w2, each with its scales, as released."""
    found: list[Tensor] = []
    for outputs, inputs in ((inter, hidden), (inter, hidden), (hidden, inter)):
        codes = torch.randint(0, 256, (experts, outputs, inputs // 2), device=device)
        scales = torch.randint(117, 122, (experts, outputs, inputs // 32), device=device)
        found += [codes.to(torch.uint8), scales.to(torch.uint8)]
    return found


def code_at(chunk: Tensor, row: int, k: int) -> int:
    """The code of a row of a unit and a position of a chunk, by the layout of mma.m16n8k16."""
    tile, half, g = row // 16, row // 8 % 2, row % 8
    group, q, step, pair, position = k // 32, k // 8 % 4, k // 4 % 2, k // 2 % 2, k % 2
    lane = g * 4 + q
    word_at = ((tile * 32 + lane) * 4 + group * 2 + step) * 4 + position * 2
    word = int(chunk[word_at]) | int(chunk[word_at + 1]) << 8
    sign, magnitude = SIGN_AND_MAGNITUDE[half + 2 * pair]
    return (word >> sign & 1) << 3 | word >> magnitude & 7


def test_packed_chunks_hold_every_code_and_scale_once() -> None:
    torch.manual_seed(0)
    experts, hidden, inter = 2, 128, 64
    w1, s1, w3, s3, w2, s2 = random_weights(experts, hidden, inter, "cpu")
    packed = pack_experts(w1, s1, w3, s3, w2, s2)
    assert packed.w13.shape == (experts, inter // 32, hidden // 64, CHUNK_BYTES)
    assert packed.w2.shape == (experts, hidden // 64, inter // 64, CHUNK_BYTES)
    nibbles = [torch.stack((w & 15, w >> 4), -1).flatten(-2) for w in (w1, w3, w2)]
    for expert, unit, step in ((0, 0, 0), (1, 1, 1), (0, 1, 0)):
        chunk = packed.w13[expert, unit, step]
        for row in range(64):
            source, channel = row // 16 % 2, unit * 32 + row // 32 * 16 + row % 16
            for k in range(0, 64, 3):
                want = int(nibbles[source][expert, channel, step * 64 + k])
                assert code_at(chunk, row, k) == want
            for group in range(2):
                scale_at = 2048 + row % 8 * 16 + row // 16 * 4 + row // 8 % 2 * 2 + group
                assert chunk[scale_at] == (s1, s3)[source][expert, channel, step * 2 + group]
    chunk = packed.w2[1, 1, 0]
    assert all(
        code_at(chunk, row, k) == int(nibbles[2][1, 64 + row, k])
        for row in range(64)
        for k in range(0, 64, 5)
    )


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="inter 96 must be multiples of 64"):
        pack_experts(*random_weights(1, 128, 96, "cpu"))


def route(tokens: int, experts: int, top_k: int) -> Tensor:
    """Busy experts and idle ones: [tokens, top_k], ascending."""
    odds = 1.0 / torch.arange(1, experts + 1, device="cuda")
    return torch.multinomial(odds.expand(tokens, -1), top_k).sort(1).values.to(torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inter", "tokens"),
    [(8, 2, 256, 64, 5), (16, 4, 320, 192, 40), (12, 6, 5120, 2304, 9), (8, 3, 4096, 2048, 70)],
)
def test_rows_are_right_and_have_the_same_bits_alone_and_split(
    experts: int, top_k: int, hidden: int, inter: int, tokens: int
) -> None:
    torch.manual_seed(tokens)
    raw = random_weights(experts, hidden, inter, "cuda")
    packed = pack_experts(*raw)
    spread = torch.exp2(torch.randint(-6, 7, (tokens, hidden // 32, 1), device="cuda").float())
    x = (torch.randn(tokens, hidden // 32, 32, device="cuda") * spread).flatten(1).bfloat16()
    ids = route(tokens, experts, top_k)
    weights = torch.rand(tokens, top_k, device="cuda") + 0.1

    def run(rows: slice, first: int = 0, end: int = experts) -> Tensor:
        mine = PackedExperts(packed.w13[first:end], packed.w2[first:end], hidden, inter)
        return routed_experts_decode(
            x[rows], ids[rows], weights[rows], mine, first_expert=first, limit=LIMIT
        )

    out = run(slice(tokens))
    for start, end in ((0, 1), (tokens - 1, tokens), (tokens // 3, tokens), (0, 0)):
        assert torch.equal(run(slice(start, end)), out[start:end])
    halves = run(slice(tokens), 0, experts // 2) + run(slice(tokens), experts // 2, experts)
    torch.testing.assert_close(halves, out, rtol=1e-5, atol=1e-5 * float(out.abs().max()))
    w1, s1, w3, s3, w2, s2 = (part.cpu() for part in raw)
    slots = routed_experts_ref(
        x.float().cpu(),
        ids.long().cpu(),
        weights.cpu(),
        torch.cat((unpack_fp4_ref(w1, s1), unpack_fp4_ref(w3, s3)), 1).mT.contiguous(),
        unpack_fp4_ref(w2, s2).mT.contiguous(),
        0,
        LIMIT,
        True,
    )
    want = combine_slots_ref(slots)
    error = (out.cpu() - want).norm(dim=1) / want.norm(dim=1)
    assert float(error.max()) < 2e-2
