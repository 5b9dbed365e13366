"""What the prefix caches of one group did since the start, whatever became of its engines."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepmesh.wire.messages import CacheStats, KvTier, PointEnd, PointSource

DEVICE = int(KvTier.NONE)  # the first of the tiers that are counted
PLACES = 1 << 17  # for prefixes that are remembered; 1 MiB


class SeenPrefixes:
    """Prefixes on the chunk grid that were computed, whatever became of them: what a cache that
    keeps everything could hit.

    All memory is taken at the start, so that a process that grows is one that leaks. A prefix has
    two places by its hash; the newer one of those that want them is kept, and the one before.
    """

    def __init__(self, places: int = PLACES) -> None:
        """`places`: a power of two."""
        self._newer = array("Q", [0]) * (places // 2)
        self._older = array("Q", [0]) * (places // 2)
        self._mask = places // 2 - 1

    def add(self, keys: Sequence[bytes]) -> None:
        """Chain hashes at the ends of grid chunks."""
        for key in keys:
            name = _name(key)
            at = name & self._mask
            if self._newer[at] != name:
                self._older[at], self._newer[at] = self._newer[at], name

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of these chunks, the first ones, somebody had computed."""
        return next((at for at, key in enumerate(keys) if not self._has(key)), len(keys))

    def _has(self, key: bytes) -> bool:
        name = _name(key)
        at = name & self._mask
        return self._newer[at] == name or self._older[at] == name


def _name(key: bytes) -> int:
    """64 bits of a hash, not 0: that is an empty place."""
    return int.from_bytes(key[:8], "little") or 1


@dataclass(slots=True)
class CacheCounts:
    """Counters, as `messages.CacheStats` has them."""

    hits: list[int] = field(default_factory=lambda: [0] * len(KvTier))  # tokens, by tier
    possible_tokens: int = 0
    seen: SeenPrefixes = field(default_factory=SeenPrefixes)
    kept: list[int] = field(default_factory=lambda: [0] * len(PointSource))
    ended: list[int] = field(default_factory=lambda: [0] * len(PointEnd))
    prefetches: int = 0
    prefetched_tokens: int = 0
    skipped_tokens: int = 0

    def stats(self, points: int) -> CacheStats:
        """For heartbeats; `points` are those that are there now."""
        device, memory, disk, shared = self.hits
        return CacheStats(
            hit_tokens=(device, memory, disk, shared),
            possible_tokens=self.possible_tokens,
            points=points,
            kept_points=list(self.kept),
            ended_points=list(self.ended),
            prefetches=self.prefetches,
            prefetched_tokens=self.prefetched_tokens,
            skipped_tokens=self.skipped_tokens,
        )
