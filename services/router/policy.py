"""Which replica gets the next request. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

BOUND = 1.25  # times the mean load: beyond it a replica is not chosen for what it has cached
BETA = 1.0  # what load weighs against work that is saved
ROUNDING = 1e-9


class Candidate(NamedTuple):
    """A replica that may take a request now. Times are ms of its device."""

    name: str
    load: float  # work that it has
    work: float = 1.0  # that the request would add there
    whole: float = 1.0  # that it would add where nothing of it is known
    num_ours: int = 0  # requests that this router has there
    is_known: bool = True  # it has told of its load lately


class Choice(NamedTuple):
    """A name, and what made the difference: only, hit, load, bound, turn or two."""

    name: str
    reason: str


def choose(candidates: Sequence[Candidate], turn: int, draw: int = 0) -> Choice:
    """The best candidate; there must be one.

    The score is the share of the work that is saved less the load above the mean, in units of the
    mean load or of this whole request, whichever is more: while loads are low the best is who has
    it done first. Of the candidates only those are looked at that stay within `BOUND` times the
    mean load (consistent hashing with bounded loads, arXiv 1608.01350), or within one such
    request: so a hot prefix spreads when its replica is over its bound. Among equals the one that
    saves most, and then they take turns. Means are of the candidates alone: replicas that cannot be
    chosen say nothing about how busy the others should be.

    Args:
        turn: number of choices made so far.
        draw: anything that differs between requests; it draws two replicas where nothing is known.
    """
    if len(candidates) == 1:
        return Choice(candidates[0].name, "only")
    if not any(c.is_known or c.work < c.whole for c in candidates):
        return _of_two(candidates, draw)
    total, num = sum(c.load for c in candidates), len(candidates)
    mean, unit = total / num, sum(c.whole for c in candidates) / num
    scale = max(unit, mean) or 1.0

    def over(candidate: Candidate) -> float:
        bound = max(BOUND * (total + candidate.work) / num, unit)
        return candidate.load + candidate.work - bound

    def rank(candidate: Candidate) -> tuple[float, float]:
        saved = 1.0 - candidate.work / (unit or 1.0)
        score = saved - BETA * (candidate.load - mean) / scale
        return round(score, 6), round(saved, 6)

    least = max(min(map(over, candidates)), 0.0) + ROUNDING * scale
    within = [c for c in candidates if over(c) <= least]
    best = max(map(rank, within))
    equals = [c for c in within if rank(c) == best]
    chosen = equals[turn % len(equals)]
    return Choice(chosen.name, _reason(chosen, candidates, within, equals))


def _of_two(candidates: Sequence[Candidate], draw: int) -> Choice:
    """The power of two choices: of two drawn ones the one with fewer requests of ours. Nobody runs
    in a herd to where load was low when it was last heard of."""
    first = draw % len(candidates)
    second = (first + 1 + draw // len(candidates) % (len(candidates) - 1)) % len(candidates)
    pair = (candidates[first], candidates[second])
    return Choice(min(pair, key=lambda c: c.num_ours).name, "two")


def _reason(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    within: Sequence[Candidate],
    equals: Sequence[Candidate],
) -> str:
    shares = {c.name: round(c.work / (c.whole or 1.0), 6) for c in candidates}
    least = min(shares.values())
    if least < max(shares.values()):
        if shares[chosen.name] == least:
            return "hit"
        if all(shares[c.name] > least for c in within):
            return "bound"
        return "load"
    return "turn" if len(equals) > 1 else "load"
