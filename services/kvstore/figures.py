"""How long transfers took, how old things were when they left, and what could have been a hit."""

import struct
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from deepmesh.wire.messages import AGES_S, TRANSFERS_S, StoreHistogram

_BITS = 1 << 23  # of a filter: 1 MiB
_PER_FILTER = 1 << 19  # names; then one in four hundred unknown ones seems known
_indices = struct.Struct("<4I")


class Histogram:
    """Counts by bound (in messages.py), and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def report(self, tier: str, op: str) -> StoreHistogram:
        """As it travels."""
        return StoreHistogram(tier, op, list(self._counts), self._sum)


class Timings:
    """Transfers by tier and kind. Written by one thread, read by another: a late count is fine."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], Histogram] = {}

    @contextmanager
    def of(self, tier: str, op: str) -> Iterator[None]:
        """Count what is done inside, unless it fails."""
        began = time.perf_counter()
        yield
        self.observe(tier, op, time.perf_counter() - began)

    def observe(self, tier: str, op: str, seconds: float) -> None:
        """Count one."""
        found = self._by_name.get((tier, op))
        if found is None:
            found = self._by_name[tier, op] = Histogram(TRANSFERS_S)
        found.observe(seconds)

    def report(self) -> list[StoreHistogram]:
        """As they travel."""
        return [each.report(tier, op) for (tier, op), each in list(self._by_name.items())]


class Ages:
    """How long things had been there when they had to leave, by tier."""

    def __init__(self) -> None:
        self._by_tier: dict[str, Histogram] = {}

    def observe(self, tier: str, age_s: float) -> None:
        """Something left."""
        self._by_tier.setdefault(tier, Histogram(AGES_S)).observe(age_s)

    def report(self) -> list[StoreHistogram]:
        """As they travel."""
        return [each.report(tier, "age") for tier, each in self._by_tier.items()]


class SeenBlocks:
    """Which blocks were asked for or kept before, in 2 MiB; the oldest are forgotten.

    It gives the upper bound of the hit rate: what a store would find that never forgets. One in
    some hundred blocks that are new may seem known.
    """

    def __init__(self) -> None:
        self._now, self._before = bytearray(_BITS // 8), bytearray(_BITS // 8)
        self._count = 0

    def take(self, hashes: list[bytes]) -> int:
        """Remember a chain; returns how many blocks from its start were known."""
        known, count = True, 0
        for hash_ in hashes:
            places = [(at % _BITS >> 3, 1 << (at & 7)) for at in _indices.unpack(hash_[:16])]
            if known:
                known = self._has(self._now, places) or self._has(self._before, places)
                count += known
            for byte, bit in places:
                self._now[byte] |= bit
        self._count += len(hashes)
        if self._count > _PER_FILTER:
            self._now, self._before = bytearray(_BITS // 8), self._now
            self._count = 0
        return count

    @staticmethod
    def _has(filter_: bytearray, places: list[tuple[int, int]]) -> bool:
        return all(filter_[byte] & bit for byte, bit in places)
