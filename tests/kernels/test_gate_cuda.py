"""Router on a GPU against the reference, and its bits."""

import pytest
import torch
from torch import Tensor

from kernels.moe.gate_cuda import choose_experts, route_decode
from kernels.moe.gate_ref import route_ref


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "hidden", "top_k", "tokens"),
    [(384, 5120, 6, 50), (256, 4096, 6, 11), (32, 96, 3, 7)],
)
def test_choices_are_those_of_the_reference_and_alone_the_same(
    experts: int, hidden: int, top_k: int, tokens: int
) -> None:
    torch.manual_seed(experts)
    x = torch.randn(tokens, hidden).bfloat16()
    weight = (torch.randn(experts, hidden) * hidden**-0.5).bfloat16()
    bias = torch.randn(experts) * 0.1
    x[1] = 0.0  # all logits equal: the bias decides
    weight[9], bias[9] = weight[4], bias[4]  # a tie wherever one of them is chosen last

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        found = route_decode(
            x[rows].cuda(), weight.cuda(), bias.cuda(), top_k, scaling=1.5, temperature=0.7
        )
        return found[0].cpu(), found[1].cpu()

    ids, shares = run(slice(tokens))
    logits = (x.double() @ weight.double().mT).float()
    want_ids, want_shares = route_ref(logits, bias, top_k, 1.5, 0.7)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(shares, want_shares, rtol=1e-4, atol=1e-6)
    for start, end in ((0, 1), (1, 2), (tokens - 3, tokens), (0, 0)):
        some_ids, some_shares = run(slice(start, end))
        assert torch.equal(some_ids, ids[start:end])
        assert torch.equal(some_shares, shares[start:end])
    chosen = choose_experts(logits.cuda(), bias.cuda(), top_k, scaling=1.5, temperature=0.7)
    assert torch.equal(chosen[0].cpu().long(), want_ids)
    torch.testing.assert_close(chosen[1].cpu(), want_shares, rtol=1e-5, atol=1e-7)
    x[0, 0] = float("nan")
    ids, shares = run(slice(1))
    assert shares.isnan().all()
    assert len(ids.unique()) == top_k


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"weight \(40, 64\), 2 of a token"):
        route_decode(torch.zeros(1, 64), torch.zeros(40, 64), torch.zeros(40), 2, scaling=1.0)
