"""The kvstores as the scheduler sees them: which are up, what they have, what it asked them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from deepmesh.wire.messages import Hits, KvKind, KvTier, Lookup

from .outbox import Outbox
from .request import Found, Request

MAX_KNOWN = 1 << 17  # blocks and points of a kvstore that the scheduler remembers
NEW_ITEMS = 1024  # that may have come since its heartbeat
MAX_LOOKUPS = 64  # open at once, per kvstore
QUIET_NS = 1_000_000_000  # a kvstore that did not answer in time is not asked for so long

Key = tuple[bytes, KvKind]


@dataclass(slots=True)
class _Store:
    """One kvstore whose link is up."""

    name: str
    room: int = MAX_KNOWN  # keys that are remembered
    known: dict[Key, None] = field(default_factory=dict[Key, None])  # oldest first
    lookups: dict[int, tuple[Found, list[bytes]]] = field(
        default_factory=dict[int, tuple[Found, list[bytes]]]
    )
    quiet_until_ns: int = 0


class KvStores:
    """Outlives engines: what is stored does not depend on them, only on weights and numerics."""

    def __init__(self, outbox: Outbox, *, count: int, first_op: int, lookup_s: float) -> None:
        self.counters: Counter[str] = Counter()
        self._outbox = outbox
        self.count = count  # of the config, up or down
        self._lookup_ns = int(lookup_s * 1e9)
        self._stores: dict[int, _Store] = {}  # by index in the config
        self._next_op = first_op
        self._next_lookup = 1

    def up(self, name: str, index: int) -> None:
        """A kvstore is linked; nobody knows what it has."""
        self._stores[index] = _Store(name)

    def down(self, index: int) -> None:
        """A kvstore is lost: what it had may be lost, and it answers nothing any more."""
        store = self._stores.pop(index, None)
        if store is not None:
            for found, _ in store.lookups.values():
                found.is_open = False

    def next_op_id(self) -> int:
        """Ids of ops are never reused, also not after a restart."""
        self._next_op += 1
        return self._next_op

    def name_for(self, chain: list[bytes]) -> str:
        """The kvstore that has, or is to have, this prefix; empty when its link is down.

        All prefixes that begin with the same block are in the same one.
        """
        store = self._of(chain)
        return store.name if store is not None else ""

    @property
    def any_up(self) -> bool:
        """Whether any link is up."""
        return bool(self._stores)

    def is_up(self, name: str) -> bool:
        """Whether its link is up."""
        return self._named(name) is not None

    # ------------------------------------------------------------ what is there

    def is_known(self, name: str, hash_: bytes, kind: KvKind) -> bool:
        """Whether it was there when last heard of."""
        store = self._named(name)
        return store is not None and (hash_, kind) in store.known

    def learn(self, name: str, keys: Iterable[Key]) -> None:
        """These are there."""
        store = self._named(name)
        if store is None:
            return
        for key in keys:
            store.known.pop(key, None)
            store.known[key] = None
        self._fit(store)

    def holds(self, index: int, num_items: int) -> None:
        """A kvstore has so many. Who remembers more of it remembers what has left: the oldest."""
        store = self._stores.get(index)
        if store is not None:
            store.room = min(MAX_KNOWN, max(0, num_items) + NEW_ITEMS)
            self._fit(store)

    def forget(self, name: str, keys: Iterable[Key]) -> None:
        """These are not there, or not as they should be."""
        store = self._named(name)
        if store is not None:
            for key in keys:
                store.known.pop(key, None)

    # ------------------------------------------------------------ lookups

    @property
    def num_lookups(self) -> int:
        """Lookups that wait for an answer."""
        return sum(len(store.lookups) for store in self._stores.values())

    def ask(self, request: Request, chain: list[bytes], now: int) -> bool:
        """Ask how much of `chain` is there, once in an epoch; whether an answer is to come."""
        store = self._of(chain)
        if store is None or store.quiet_until_ns > now:
            return False
        if len(store.lookups) >= MAX_LOOKUPS:
            return True
        found = Found(store.name, request.epoch, deadline_ns=now + self._lookup_ns)
        request.found = found
        lookup_id, self._next_lookup = self._next_lookup, self._next_lookup + 1
        store.lookups[lookup_id] = (found, chain)
        self.counters["lookups"] += 1
        trace = request.generate.traceparent
        self._outbox.send(store.name, Lookup(lookup_id, b"".join(chain), trace))
        return True

    def hits(self, name: str, message: Hits) -> None:
        """An answer. What it lacks is stored again when it is computed again."""
        store = self._named(name)
        if store is None or message.lookup_id not in store.lookups:
            return  # over its deadline, or a repetition
        found, chain = store.lookups.pop(message.lookup_id)
        found.is_open = False
        blocks = max(0, min(message.num_blocks, len(chain)))
        found.point_blocks = max(0, min(message.num_point_blocks, blocks))
        found.tier = message.tier or KvTier.MEMORY
        self.forget(name, ((key, KvKind.BLOCK) for key in chain[blocks:]))
        self.forget(name, ((key, KvKind.POINT) for key in chain[found.point_blocks :]))
        self.learn(name, ((key, KvKind.BLOCK) for key in chain[:blocks]))
        if found.point_blocks:
            self.learn(name, [(chain[found.point_blocks - 1], KvKind.POINT)])

    def expire(self, now: int) -> None:
        """Stop waiting for answers that are late, and leave their kvstore alone for a while."""
        for store in self._stores.values():
            late = [at for at, (found, _) in store.lookups.items() if found.deadline_ns <= now]
            for lookup_id in late:
                store.lookups.pop(lookup_id)[0].is_open = False
                store.quiet_until_ns = now + QUIET_NS
                self.counters["late_lookups"] += 1

    @staticmethod
    def _fit(store: _Store) -> None:
        for key in list(islice(store.known, max(0, len(store.known) - store.room))):
            del store.known[key]

    def _of(self, chain: list[bytes]) -> _Store | None:
        if not chain or not self.count:
            return None
        return self._stores.get(int.from_bytes(chain[0][:4], "little") % self.count)

    def _named(self, name: str) -> _Store | None:
        return next((store for store in self._stores.values() if store.name == name), None)
