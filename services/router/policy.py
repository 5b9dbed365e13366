"""Which replica gets the next request. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

BOUND = 1.25  # times the mean load: beyond it a replica is not chosen for what it has cached


class Candidate(NamedTuple):
    """A replica that may take a request now."""

    name: str
    load: int  # requests there
    affinity: int = 0  # prompt tokens that it need not compute


def choose(candidates: Sequence[Candidate], turn: int) -> str:
    """The name of the best candidate; there must be one.

    Of the replicas that stay within `BOUND` times the mean load (consistent hashing with bounded
    loads, arXiv 1608.01350), the one that knows most of the prompt, then the least loaded one;
    equals take turns, `turn` counts the choices made so far.
    """
    total = sum(candidate.load for candidate in candidates) + 1
    bound = max(BOUND * total / len(candidates), 1.0)
    within = [candidate for candidate in candidates if candidate.load + 1 <= bound]
    within = within or [min(candidates, key=lambda candidate: candidate.load)]
    best = max((candidate.affinity, -candidate.load) for candidate in within)
    equals = [c.name for c in within if (c.affinity, -c.load) == best]
    return equals[turn % len(equals)]
