"""Log-probabilities and ranks on a GPU against those of the CPU: the same bits."""

import pytest
import torch

from kernels.sampling.scores_cuda import token_scores
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.token_ranks import token_ranks


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1, 21, 300, 4096, 5001, 129_280])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_are_those_of_the_cpu(vocab: int, num_top: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows, num_top = 9, min(vocab, num_top)
    logits = torch.randn(rows, vocab + 3, generator=generator)[:, :vocab] * 3  # of another stride
    logits[1] = logits[1].round()  # ties
    logits[2] = 1.5
    logits[3] = logits[3].sort().values
    ids = torch.randint(0, vocab, (rows,), generator=generator)
    logits[8, vocab // 2] = torch.nan
    own, best, values = token_logprobs(logits[:8], ids[:8], num_top)
    found = token_scores(logits.cuda(), ids.int().cuda(), num_top)
    logprobs, ranks, top_ids, top_logprobs = (part.cpu() for part in found)
    assert torch.equal(logprobs[:8], own)
    assert torch.equal(top_ids[:8].long(), best)
    assert torch.equal(top_logprobs[:8], values)
    assert torch.equal(ranks[:8].long(), token_ranks(logits[:8], ids[:8]))
    assert logprobs.isfinite().all()
    assert top_logprobs.isfinite().all()
    alone = token_logprobs(logits[4:5].cuda(), ids[4:5].cuda(), num_top)
    assert torch.equal(alone[0].cpu(), own[4:5])
    assert torch.equal(alone[2].cpu(), values[4:5])
    assert torch.equal(token_ranks(logits[:8].cuda(), ids[:8].cuda()).cpu(), ranks[:8].long())


def test_what_the_kernel_has_no_code_for_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"21 of \[2, 50\]"):
        token_scores(torch.zeros(2, 50), torch.zeros(2, dtype=torch.int32), 21)
