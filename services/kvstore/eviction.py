"""What leaves a tier first: queues that a scan cannot flush, and room for two kinds of things."""

from collections import OrderedDict

from deepmesh.wire.messages import KvKind

Key = bytes  # 16 bytes of chained hash, then one byte of KvKind

MAX_USES = 3
SMALL_SHARE = 10  # newcomers may take a tenth before they have to be used to stay


def kind_of(key: Key) -> KvKind:
    """The kind that is part of a key."""
    return KvKind(key[-1])


class ScanResistantQueue:
    """S3-FIFO (Yang et al., SOSP 2023) over sizes in bytes.

    Newcomers wait in a small queue; those used there move on to the main queue, the others leave
    and are remembered by name only. Who comes back while remembered goes to the main queue at
    once. What is held is in neither queue and cannot leave.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # in both queues: what could leave
        self.held_bytes = 0
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._uses: dict[Key, int] = {}
        self._held: dict[Key, tuple[int, int]] = {}  # size, how many hold it
        self._small_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def add(self, key: Key, num_bytes: int, *, held: bool = False) -> None:
        """A new thing; with `held`, until the first `release`."""
        assert key not in self._uses
        self._uses[key] = 1 if self._ghosts.pop(key, 0) is None else 0
        if held:
            self._held[key] = (num_bytes, 1)
            self.held_bytes += num_bytes
        else:
            self._enqueue(key, num_bytes)

    def touch(self, key: Key) -> None:
        """It was used."""
        uses = self._uses[key]
        if uses < MAX_USES:
            self._uses[key] = uses + 1

    def hold(self, key: Key) -> None:
        """Keep it until it has been released as often as it was held."""
        num_bytes, holders = self._held.get(key) or (self._dequeue(key), 0)
        self._held[key] = (num_bytes, holders + 1)
        if holders == 0:
            self.held_bytes += num_bytes

    def release(self, key: Key) -> None:
        """Undo one `hold`."""
        num_bytes, holders = self._held[key]
        if holders > 1:
            self._held[key] = (num_bytes, holders - 1)
            return
        del self._held[key]
        self.held_bytes -= num_bytes
        self._enqueue(key, num_bytes)

    def is_held(self, key: Key) -> bool:
        """Whether it cannot leave now."""
        return key in self._held

    def remove(self, key: Key) -> None:
        """Forget it, held or not."""
        if key in self._held:
            self.held_bytes -= self._held.pop(key)[0]
        else:
            self._dequeue(key)
        del self._uses[key]

    def evict(self) -> Key:
        """Take out what should leave first; something must be there that is not held."""
        while True:
            if self._small and (self._small_bytes * SMALL_SHARE > self.num_bytes or not self._main):
                key, num_bytes = next(iter(self._small.items()))
                self._dequeue(key)
                if self._uses[key]:
                    self._enqueue(key, num_bytes)
                    continue
                self._remember(key)
            else:
                key = next(iter(self._main))
                if self._uses[key]:
                    self._uses[key] -= 1
                    self._main.move_to_end(key)
                    continue
                self._dequeue(key)
            del self._uses[key]
            return key

    def _enqueue(self, key: Key, num_bytes: int) -> None:
        if self._uses[key]:
            self._uses[key] -= 1
            self._main[key] = num_bytes
        else:
            self._small[key] = num_bytes
            self._small_bytes += num_bytes
        self.num_bytes += num_bytes

    def _dequeue(self, key: Key) -> int:
        num_bytes = self._main.pop(key, -1)
        if num_bytes < 0:
            num_bytes = self._small.pop(key)
            self._small_bytes -= num_bytes
        self.num_bytes -= num_bytes
        return num_bytes

    def _remember(self, key: Key) -> None:
        self._ghosts[key] = None
        while len(self._ghosts) > max(64, len(self._uses)):
            self._ghosts.popitem(last=False)


class TierRoom:
    """The bytes of one tier, shared by blocks and points.

    Either kind may use what the other leaves free; when there is no room, the kind that has more
    than its share gives way.
    """

    def __init__(
        self, budget: int, *, unit: int = 1, overhead: int = 0, point_share: float = 0.5
    ) -> None:
        self.unit = unit
        self.overhead = overhead  # bytes that each thing takes beside its payload
        self._point_share = point_share
        # By kind. Keys end in their kind: this is looked up for every block of every order.
        self._queues = [ScanResistantQueue() for _ in sorted(KvKind)]
        self.budget = budget
        self._sizes: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def used(self) -> int:
        """Bytes taken, in whole units."""
        return self._evictable_bytes + self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that cannot leave now."""
        blocks, points = self._queues
        return blocks.held_bytes + points.held_bytes

    @property
    def _evictable_bytes(self) -> int:
        blocks, points = self._queues
        return blocks.num_bytes + points.num_bytes

    def add(self, key: Key, num_bytes: int, *, held: bool = False) -> list[Key] | None:
        """Take room for a new thing; returns what has to leave for it, None if it has no room."""
        size = -(-(num_bytes + self.overhead) // self.unit) * self.unit
        room = self.budget - self.held_bytes - size  # for what could leave
        if room < 0:
            return None
        kind = kind_of(key)
        victims: list[Key] = []
        while self._evictable_bytes > room:
            victims.append(self._evict(kind, size))
        self._sizes[key] = size
        self._queues[kind].add(key, size, held=held)
        return victims

    def shrink(self, budget: int) -> list[Key]:
        """The tier turned out to be smaller; what has to leave. What is held stays for now."""
        self.budget = budget
        victims: list[Key] = []
        while self.used > budget and self.used > self.held_bytes:
            victims.append(self._evict(KvKind.BLOCK, 0))
        return victims

    def remove(self, key: Key) -> None:
        """Give its room back."""
        del self._sizes[key]
        self._queues[key[-1]].remove(key)

    def touch(self, key: Key) -> None:
        """It was used."""
        self._queues[key[-1]].touch(key)

    def hold(self, key: Key) -> None:
        """It must stay until `release`."""
        self._queues[key[-1]].hold(key)

    def release(self, key: Key) -> None:
        """Undo one `hold`."""
        self._queues[key[-1]].release(key)

    def is_held(self, key: Key) -> bool:
        """Whether it cannot leave now."""
        return self._queues[key[-1]].is_held(key)

    def _evict(self, newcomer: KvKind, size: int) -> Key:
        other = KvKind.POINT if newcomer is KvKind.BLOCK else KvKind.BLOCK
        share = self._point_share if newcomer is KvKind.POINT else 1 - self._point_share
        own = self._queues[newcomer]
        over = own.num_bytes + own.held_bytes + size > share * self.budget
        first, second = (newcomer, other) if over else (other, newcomer)
        chosen = first if self._queues[first].num_bytes else second
        key = self._queues[chosen].evict()
        del self._sizes[key]
        return key
