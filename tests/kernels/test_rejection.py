"""Rejection sampling of drafts: the exact distribution, from any drafts."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.draws import Draws
from kernels.sampling.rejection import DRAFT_STREAM, accept_drafts, token_probs
from kernels.sampling.rejection_ref import accept_drafts_ref
from kernels.sampling.sample_tokens import sample_tokens

NUM_IDS = 24
TOKENS = 100_000
# of 99.9 % of samples of a chi-square with so many degrees of freedom (Wilson and Hilferty)
Z = 3.09


def draws_of(num: int, *, temperature: float = 1.0, position: int = 7, top_k: int = 0) -> Draws:
    """Rows that differ by their seeds."""
    return Draws(
        temperature=torch.full((num,), temperature),
        top_k=torch.full((num,), top_k),
        top_p=torch.ones(num),
        min_p=torch.zeros(num),
        seed=torch.arange(num) * 2_654_435_761 % (1 << 40),
        sub_index=torch.zeros(num, dtype=torch.int64),
        position=torch.full((num,), position),
    )


def drafted(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Drafts from a distribution, and it."""
    stream = draws._replace(sub_index=draws.sub_index + DRAFT_STREAM)
    return sample_tokens(logits, stream), token_probs(logits, draws)


def assert_distributed(ids: Tensor, probs: NDArray[np.float64]) -> None:
    """Chi-square of the counts of ids against exact probabilities."""
    counts = np.bincount(ids.numpy(), minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    order = np.argsort(-probs)
    wanted, seen = probs[order] * counts.sum(), counts[order].astype(float)
    cells = max(2, int((wanted > 5).sum()))  # what is rarer counts as one
    wanted = np.append(wanted[: cells - 1], wanted[cells - 1 :].sum())
    seen = np.append(seen[: cells - 1], seen[cells - 1 :].sum())
    found = float(((seen - wanted) ** 2 / wanted).sum())
    free = len(wanted) - 1
    bound = free * (1 - 2 / (9 * free) + Z * (2 / (9 * free)) ** 0.5) ** 3
    assert found < bound, f"{found} with {free} degrees of freedom; {bound} is the bound"


@pytest.fixture(scope="module")
def tables() -> tuple[Tensor, Tensor]:
    """Logits of a target and of a draft model behind each id: [NUM_IDS, NUM_IDS]."""
    draw = torch.Generator().manual_seed(3)
    target = 1.2 * torch.randn(NUM_IDS, NUM_IDS, generator=draw)
    return target, target + torch.randn(NUM_IDS, NUM_IDS, generator=draw)


@pytest.mark.parametrize(
    ("temperature", "top_k", "tokens"), [(1.0, 0, TOKENS), (0.7, 9, TOKENS // 10)]
)
def test_a_hundred_thousand_tokens_have_the_exact_distribution(
    tables: tuple[Tensor, Tensor], temperature: float, top_k: int, tokens: int
) -> None:
    """Pairs of tokens, the second of them behind a first that was accepted, replaced, or drawn
    without a draft; and the same token twice in a row never comes of a refused draft."""
    target, model = tables
    first = draws_of(tokens // 2, temperature=temperature, top_k=top_k)
    second = first._replace(position=first.position + 1)
    anchors = torch.zeros(tokens // 2, dtype=torch.int64)
    drafts, given = drafted(model[anchors], first)
    ids = accept_drafts(target[anchors], first, drafts, given)
    accepted = ids == drafts
    assert 0.3 < float(accepted.float().mean()) < 0.95
    behind, theirs = drafted(model[drafts], second)
    verified = accept_drafts(target[ids], second, behind, theirs)
    alone = sample_tokens(target[ids], second)  # the step behind one that refused
    others = torch.where(accepted, verified, alone)
    p_first = token_probs(target[:1], draws_of(1, temperature=temperature, top_k=top_k))[0]
    p_second = token_probs(target, draws_of(NUM_IDS, temperature=temperature, top_k=top_k))
    assert_distributed(ids, p_first.numpy())
    common = int(p_first.argmax())
    assert_distributed(others[ids == common], p_second[common].numpy())
    marginal = (p_first[:, None] * p_second).sum(0).numpy()
    assert_distributed(others, marginal)


def test_a_fault_in_the_rest_is_found(tables: tuple[Tensor, Tensor]) -> None:
    """What the check is worth: tokens of refused drafts drawn from p are not distributed as p."""
    target, model = tables
    draws = draws_of(TOKENS // 2)
    anchors = torch.zeros(TOKENS // 2, dtype=torch.int64)
    drafts, given = drafted(model[anchors], draws)
    ids = accept_drafts(target[anchors], draws, drafts, given)
    wrong = torch.where(ids == drafts, ids, sample_tokens(target[anchors], draws))
    with pytest.raises(AssertionError, match="degrees of freedom"):
        assert_distributed(wrong, token_probs(target[:1], draws_of(1))[0].numpy())


def test_the_reference_agrees(tables: tuple[Tensor, Tensor]) -> None:
    target, model = tables
    draws, rows = draws_of(400, temperature=0.9), torch.arange(400) % NUM_IDS
    drafts, given = drafted(model[rows], draws)
    ours = accept_drafts(target[rows], draws, drafts, given)
    assert torch.equal(ours, accept_drafts_ref(target[rows], draws, drafts, given))
    alone = accept_drafts(
        target[rows][5:6], Draws(*(v[5:6] for v in draws)), drafts[5:6], given[5:6]
    )
    assert alone.tolist() == ours[5:6].tolist()


def test_greedy_accepts_what_is_best_and_nothing_else(tables: tuple[Tensor, Tensor]) -> None:
    target, model = tables
    draws = draws_of(NUM_IDS, temperature=0.0)
    drafts, given = drafted(model, draws)
    assert torch.equal(accept_drafts(target, draws, drafts, given), target.argmax(dim=1))


def test_banned_ids_never_come_of_drafts(tables: tuple[Tensor, Tensor]) -> None:
    target, model = tables
    draws = draws_of(NUM_IDS)
    drafts, given = drafted(model, draws)
    masked = target.clone()
    masked[torch.arange(NUM_IDS), drafts] = float("-inf")
    ids = accept_drafts(masked, draws, drafts, given)
    assert (ids != drafts).all()
    one = torch.full((NUM_IDS, NUM_IDS), float("-inf"))
    one[:, 3] = 0.0
    assert (accept_drafts(one, draws, drafts, given) == 3).all()
