"""Wall clocks of different machines: how far each is ahead of scheduler 0's, found by heartbeats.

A message takes some time and its stamps come from two clocks, so one direction alone shows the way
plus the offset. Both sides tell each other the shortest way that they have seen; half the
difference of the two is the offset, as far as the ways are alike. Processes of one machine read one
clock: there nothing is estimated.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WINDOW_NS = 30_000_000_000  # clocks drift: ways of two windows ago are forgotten
MAX_LINKS = 4  # gateway, tokenizer, scheduler 0; executor, scheduler 1, tokenizer, scheduler 0


def this_clock() -> bytes:
    """Whose clock this process reads: the same on one machine, in containers as well."""
    boot_id = b""
    with suppress(OSError):
        boot_id = _BOOT_ID.read_bytes()
    return hashlib.blake2b(boot_id, digest_size=8).digest() if boot_id else b""


class ShortestWay:
    """The shortest way of messages from a peer lately, by both clocks; may be negative."""

    def __init__(self) -> None:
        self._now: int | None = None
        self._before: int | None = None
        self._since_ns = 0

    def saw(self, sent_ns: int, received_ns: int) -> None:
        """A message came."""
        way_ns = received_ns - sent_ns
        if received_ns - self._since_ns >= WINDOW_NS:
            self._before, self._now, self._since_ns = self._now, None, received_ns
        if self._now is None or way_ns < self._now:
            self._now = way_ns

    @property
    def ns(self) -> int:
        """0 as long as none came."""
        return min((way for way in (self._now, self._before) if way is not None), default=0)


class MeshClock:
    """How far this process's clock is ahead of scheduler 0's, by the peers that know it best."""

    def __init__(self, *, is_reference: bool = False) -> None:
        self.ahead_ns = 0
        self.links = 0 if is_reference else -1  # over which it was found; -1: not known
        self._is_reference = is_reference
        self._known: dict[str, tuple[int, int]] = {}  # links, ahead, by peer

    def hear(self, peer: str, links: int, ahead_ns: int) -> None:
        """By this peer our clock is so far ahead; it is so many links away from scheduler 0."""
        if self._is_reference:
            return
        if 0 <= links < MAX_LINKS:
            self._known[peer] = (links, ahead_ns)
        else:
            self._known.pop(peer, None)
        self._choose()

    def forget(self, peer: str) -> None:
        """Its link is gone. What the last one said is kept until another peer says something."""
        if self._known.pop(peer, None) is not None:
            self._choose()

    def _choose(self) -> None:
        if self._known:
            links, self.ahead_ns = min(self._known.values(), key=lambda known: known[0])
            self.links = links + 1
