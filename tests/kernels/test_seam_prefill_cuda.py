"""The seam of many tokens: how weights are split (anywhere); on a GPU its parts and its bits."""

import pytest
import torch

from kernels.mhc.mix import HyperMix
from kernels.mhc.mix_ref import hyper_mix_ref
from kernels.mhc.rms_norm_ref import rms_norm_ref
from kernels.mhc.seam_prefill_cuda import pack_wide_seam, seam_prefill
from kernels.mhc.streams_ref import collapse_ref, expand_ref
from kernels.quant.rounding_ref import round_fp8_ref

MIXING = {"num_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}


def test_three_parts_of_a_weight_are_the_weight() -> None:
    torch.manual_seed(0)
    hidden = 128
    fn = torch.randn(24, 4 * hidden) * torch.exp2(torch.randint(-20, 20, (24, 1)).float())
    packed = pack_wide_seam(fn, torch.ones(3), torch.zeros(24), torch.ones(hidden)).fn
    assert (packed.groups, packed.outputs, packed.depth) == (4, 128, hidden)
    pieces = packed.data.view(4, 2, 2, 64, 8, 8)  # stream, unit, step, output, piece, position
    row, stream, k = 7, 2, 74
    step, piece = k // 64, k % 64 // 8
    parts = [row + 24 * part for part in range(3)]
    found = [float(pieces[stream, n // 64, step, n % 64, piece ^ (n % 8), k % 8]) for n in parts]
    assert sum(found) == float(fn[row, stream * hidden + k])
    assert not packed.data.view(4, 2, 2, 64, 64)[:, 1, :, 8:].any()


def test_widths_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="for 40 channels"):
        pack_wide_seam(torch.zeros(24, 160), torch.ones(3), torch.zeros(24), torch.ones(40))


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "tokens"), [(384, 5), (4096, 9), (5120, 300)])
def test_it_is_its_parts_and_has_the_same_bits_alone(hidden: int, tokens: int) -> None:
    torch.manual_seed(hidden)
    fn = torch.randn(24, 4 * hidden) * hidden**-0.5 * 0.5
    scale, base = torch.rand(3) + 0.5, torch.randn(24)
    norm = torch.rand(hidden) + 0.5
    streams = (torch.randn(tokens, 4, hidden) * torch.rand(tokens, 1, 1) * 4).bfloat16()
    output = torch.randn(tokens, hidden).bfloat16()
    mix = HyperMix(
        torch.rand(tokens, 4), 2 * torch.rand(tokens, 4), torch.rand(tokens, 4, 4).softmax(2)
    )
    carried = torch.rand(tokens, 4)
    weights = pack_wide_seam(fn.cuda(), scale.cuda(), base.cuda(), norm.cuda())

    def run(rows: slice, *, first: bool = False) -> list[torch.Tensor]:
        mixed = streams[rows].cuda()
        ahead, rounded, made = seam_prefill(
            mixed,
            None if first else output[rows].cuda(),
            None if first else HyperMix(*(part[rows].cuda() for part in mix)),
            carried[rows].cuda(),
            weights,
            **MIXING,
        )
        return [part.cpu() for part in (mixed, ahead, rounded, *made)]

    out = run(slice(tokens))
    for start, end in ((0, 1), (tokens - 3, tokens), (0, 0)):
        for part, whole in zip(run(slice(start, end)), out, strict=True):
            assert torch.equal(part, whole[start:end])

    for first, found in ((False, out), (True, run(slice(tokens), first=True))):
        want = streams.float()
        if not first:
            want = expand_ref(want, output.float(), mix.post, mix.comb).bfloat16().float()
        torch.testing.assert_close(found[0].float(), want, rtol=2.0**-7, atol=1e-6)
        given = found[0].float()
        folded = collapse_ref(given, carried).bfloat16().float()
        ahead = rms_norm_ref(folded, norm, 1e-20).bfloat16().float()
        torch.testing.assert_close(found[1].float(), ahead, rtol=2.0**-6, atol=1e-6)
        assert torch.equal(found[2].float(), round_fp8_ref(found[1].float(), 32))
        raw = (given.flatten(1).double() @ fn.double().mT).float()
        made = hyper_mix_ref(given, raw, scale, base, 20, 1e-6, 1e-20)
        for part, exact in zip(found[3:], made, strict=True):
            torch.testing.assert_close(part, exact, rtol=0, atol=1e-4)
