"""The seam between sublayers on a GPU: against its parts on the CPU, and its bits."""

import pytest
import torch

from kernels.mhc.mix import HyperMix
from kernels.mhc.mix_ref import hyper_mix_ref
from kernels.mhc.rms_norm_ref import rms_norm_ref
from kernels.mhc.seam_cuda import (
    CLUSTER_TOKENS,
    best_cluster_tokens,
    pack_seam,
    seam,
)
from kernels.mhc.streams_ref import collapse_ref, expand_ref

MIXING = {"num_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}


def test_packed_projections_hold_every_weight_once() -> None:
    torch.manual_seed(0)
    hidden = 384
    fn = torch.randn(24, 4 * hidden)
    packed = pack_seam(fn, torch.ones(3), torch.zeros(24), torch.ones(hidden)).fn
    assert packed.shape == (16, 1, 24, 256)
    for column, stream, channel in ((0, 0, 0), (23, 3, 383), (7, 2, 100)):
        rank, at = channel // 24, stream * 24 + channel % 24
        assert packed[rank, 0, column, at] == fn[column, stream * hidden + channel]
    assert int(packed.count_nonzero()) == fn.numel()


def test_widths_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="for 96 channels"):
        pack_seam(torch.zeros(24, 384), torch.ones(3), torch.zeros(24), torch.ones(96))


def test_clusters_take_more_tokens_once_they_do_not_all_run_at_once() -> None:
    at_once = dict.fromkeys(CLUSTER_TOKENS, 8)
    found = [best_cluster_tokens(n, at_once) for n in (1, 8, 9, 128, 1000)]
    assert found == [1, 1, 2, 16, 20]


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "tokens"), [(384, 5), (4096, 9), (5120, 150)])
def test_it_is_its_parts_and_has_the_same_bits_in_any_cluster(hidden: int, tokens: int) -> None:
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
    weights = pack_seam(fn.cuda(), scale.cuda(), base.cuda(), norm.cuda())

    def run(rows: slice, cluster_tokens: int, first: bool = False) -> list[torch.Tensor]:
        mixed = streams[rows].cuda()
        ahead, made = seam(
            mixed,
            None if first else output[rows].cuda(),
            None if first else HyperMix(*(part[rows].cuda() for part in mix)),
            carried[rows].cuda(),
            weights,
            cluster_tokens=cluster_tokens,
            **MIXING,
        )
        return [part.cpu() for part in (mixed, ahead, *made)]

    out = run(slice(tokens), 1)
    for cluster_tokens in (*CLUSTER_TOKENS, 0):
        for start, end in ((0, tokens), (0, 1), (tokens - 3, tokens)):
            for part, whole in zip(run(slice(start, end), cluster_tokens), out, strict=True):
                assert torch.equal(part, whole[start:end])

    for first, found in ((False, out), (True, run(slice(tokens), 0, first=True))):
        want = streams.float()
        if not first:
            want = expand_ref(want, output.float(), mix.post, mix.comb).bfloat16().float()
        torch.testing.assert_close(found[0].float(), want, rtol=2.0**-7, atol=1e-6)
        given = found[0].float()
        folded = collapse_ref(given, carried).bfloat16().float()
        ahead = rms_norm_ref(folded, norm, 1e-20).bfloat16().float()
        torch.testing.assert_close(found[1].float(), ahead, rtol=2.0**-6, atol=1e-6)
        raw = (given.flatten(1).double() @ fn.double().mT).float()
        made = hyper_mix_ref(given, raw, scale, base, 20, 1e-6, 1e-20)
        for part, exact in zip(found[2:], made, strict=True):
            torch.testing.assert_close(part, exact, rtol=0, atol=1e-5)
