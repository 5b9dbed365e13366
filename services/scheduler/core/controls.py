"""Pause, resume and drain: fields of a group step, in force between two numbered steps."""

from deepmesh.wire.messages import GroupFlag

from .group import Group
from .registry import Registry

DRAIN_WAIT_NS = 2_000_000_000  # who does not run the last step, or store, is not waited for


class Controls:
    """Says which flags the next step carries, or that none may follow.

    PAUSE and DRAIN each travel on one step, a dummy if nothing else runs, so every rank learns of
    them behind the same number and no message can overtake a step. Everything is idempotent: what
    is in force is sent once, and what was asked for and not yet sent can be taken back.
    """

    def __init__(self, group: Group, registry: Registry) -> None:
        self._group = group
        self._registry = registry
        self._pause_ns = 0  # since when a pause is asked for; 0: it is not
        self._is_held = False  # the step with PAUSE has left
        self._drain_ns = 0  # since when nothing but the step with DRAIN is left to do; 0: more is
        self._has_drained = False  # it has left

    # ------------------------------------------------------------ pause

    @property
    def is_pausing(self) -> bool:
        """A pause is asked for, in force or not: requests make no progress by intent."""
        return self._pause_ns > 0

    @property
    def is_paused(self) -> bool:
        """The pause is in force, and nothing is in flight any more."""
        return self._is_held and not self._group.unresolved

    def pause(self, now: int) -> None:
        """Hold behind the next step. Without a loaded group there is nobody to tell."""
        self._pause_ns = self._pause_ns or now
        self._is_held |= not self._group.ready

    def resume(self, now: int) -> None:
        """Go on; the time of the pause does not count as time without progress."""
        if not self._pause_ns:
            return
        paused_ns, self._pause_ns, self._is_held = now - self._pause_ns, 0, False
        residency = self._registry.residency
        for request in self._registry.live.values():
            request.progress_ns = min(now, request.progress_ns + paused_ns)
            if request.slot >= 0 and residency is not None:
                progress = int(residency.table.progress_ns[request.slot])
                residency.table.progress_ns[request.slot] = min(now, progress + paused_ns)

    # ------------------------------------------------------------ steps

    def finish(self, now: int) -> None:
        """The replica drains, and its last request has ended: one more step, even in a pause."""
        self._drain_ns = self._drain_ns or now

    def next_flags(self) -> int | None:
        """Flags of the next step; None if none may follow."""
        if self._has_drained:
            return None
        if self._drain_ns:
            return GroupFlag.DRAIN
        if self._is_held:
            return None
        return GroupFlag.PAUSE if self.is_pausing else 0

    def sent(self, flags: int) -> None:
        """A step with these flags has left."""
        self._is_held |= bool(flags & GroupFlag.PAUSE)
        self._has_drained |= bool(flags & GroupFlag.DRAIN)

    def has_drained(self, now: int, *, is_storing: bool = False) -> bool:
        """All ranks have run the step with DRAIN, and what was published is in its kvstore; or
        there is nobody to wait for."""
        if not self._drain_ns:
            return False
        is_idle = self._has_drained and not self._group.unresolved and not is_storing
        if not self._group.ready or is_idle:
            return True
        return now - self._drain_ns >= DRAIN_WAIT_NS
