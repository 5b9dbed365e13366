"""Which replica gets the next request. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

BOUND = 1.25  # times the mean load: beyond it a replica is not chosen for what it has cached


class Candidate(NamedTuple):
    """A replica that may take a request now."""

    name: str
    load: int  # requests there
    affinity: int = 0  # prompt tokens that it need not compute


def choose(candidates: Sequence[Candidate], turn: int, prompt_tokens: int = 1) -> str:
    """The name of the best candidate; there must be one.

    Of the replicas that stay within `BOUND` times the mean load (consistent hashing with bounded
    loads, arXiv 1608.01350), the one with the greatest share of the prompt less its load above
    the mean; among equals the one that knows most of the prompt, and they take turns: `turn`
    counts the choices made so far. The mean is of the candidates alone: replicas that cannot be
    chosen say nothing about how busy the others should be.
    """
    total, num = sum(candidate.load for candidate in candidates), len(candidates)
    bound = max(BOUND * (total + 1) / num, 1.0)
    within = [candidate for candidate in candidates if candidate.load + 1 <= bound]
    within = within or [min(candidates, key=lambda candidate: candidate.load)]
    mean = total / num

    def rank(candidate: Candidate) -> tuple[float, int]:
        share = candidate.affinity / max(1, prompt_tokens)
        return share - (candidate.load - mean) / max(1.0, mean), candidate.affinity

    best = max(map(rank, within))
    equals = [candidate.name for candidate in within if rank(candidate) == best]
    return equals[turn % len(equals)]
