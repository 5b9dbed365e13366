"""Which replicas and kvstores have how much of a prompt: what they say, and what was sent. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from deepmesh.prefix_hash import HASH_BYTES, extend_chain, root_hash
from deepmesh.wire.messages import Generate

MAX_POINTS = 1 << 17  # of one replica or kvstore; the oldest are forgotten
MAX_GUESSED = 1 << 13  # positions of prompts that were sent somewhere, for each replica
MAX_LINKS = 64  # of one prompt that are guessed about


class Grid:
    """Where the points of an engine lie, and how they are named."""

    def __init__(self, fingerprint: str, block_size: int = 64, chunk_align: int = 128) -> None:
        self.fingerprint = fingerprint
        self.block_size = max(1, block_size)
        self.step = max(self.block_size, chunk_align) // self.block_size * self.block_size

    @property
    def key(self) -> tuple[str, int, int]:
        """Engines of the same key share the names of their points."""
        return self.fingerprint, self.block_size, self.step

    def chain(self, message: Generate) -> list[bytes]:
        """Names of the prompt's points, one per `step` tokens; another salt shares none."""
        ids = message.prompt_ids + message.confirmed_ids
        words = np.frombuffer(ids[: len(ids) // 4 * 4], "<i4")
        chain: list[bytes] = []
        root = root_hash(message.salt, self.fingerprint)
        end = max(0, len(words) - 1) // self.step * self.step  # a hit never covers the last token
        extend_chain(chain, root, words, self.block_size, end)
        per_step = self.step // self.block_size
        return chain[per_step - 1 :: per_step]


class PrefixSketch:
    """What is known is a hint, never an answer: a point may be gone when the request is there."""

    def __init__(self, max_points: int = MAX_POINTS, max_guessed: int = MAX_GUESSED) -> None:
        self._max_points = max_points
        self._max_guessed = max_guessed
        self._points: dict[str, dict[bytes, None]] = {}  # by who has them, oldest first
        self._guessed: OrderedDict[bytes, dict[str, int]] = OrderedDict()  # replica -> its life
        self._lives: dict[str, int] = {}
        self._rooms: dict[str, int] = {}  # links that are guessed, by replica

    def num_points(self, source: str) -> int:
        """Points that it is known to have."""
        return len(self._points.get(source, ()))

    def tell(
        self, source: str, added: Iterable[bytes], dropped: Iterable[bytes], *, first: bool
    ) -> None:
        """A replica or kvstore has points, and has others no more; `first`: and nothing else."""
        if first:
            self.lose(source)
        points = self._points.setdefault(source, {})
        for key in dropped:
            points.pop(key, None)
            guess = self._guessed.get(key)
            if guess is not None:
                guess.pop(source, None)
                if not guess:
                    del self._guessed[key]
        for key in added:
            points.pop(key, None)
            points[key] = None
        while len(points) > self._max_points:
            del points[next(iter(points))]

    def lose(self, source: str) -> None:
        """What it had is gone, or not known any more."""
        self._points.pop(source, None)
        self._lives[source] = self._lives.get(source, 0) + 1

    def can_have(self, replica: str, num_links: int) -> None:
        """The replica has room for so many: of more than that a guess cannot be right."""
        self._rooms[replica] = max(0, min(num_links, self._max_guessed))

    def guess(self, chain: Sequence[bytes], replica: str) -> None:
        """A prompt goes there: soon it has its beginning, unless it says otherwise."""
        life = self._lives.setdefault(replica, 0)
        self._rooms.setdefault(replica, self._max_guessed)
        for link in reversed(chain[:MAX_LINKS]):  # the longest prefix is forgotten first
            self._guessed.setdefault(link, {})[replica] = life
            self._guessed.move_to_end(link)
        most = sum(self._rooms.values())
        while len(self._guessed) > most:
            self._guessed.popitem(last=False)

    def known_links(self, chain: Sequence[bytes], source: str) -> int:
        """Links of the chain below its last point there."""
        points = self._points.get(source)
        if points:
            for count in range(len(chain), 0, -1):
                if chain[count - 1] in points:
                    return count
        return 0

    def guessed_links(self, chain: Sequence[bytes], replica: str) -> int:
        """Links that have been sent there in this life of the replica."""
        life, count = self._lives.get(replica), 0
        for link in chain:
            if life is None or self._guessed.get(link, {}).get(replica) != life:
                break
            count += 1
        return count


def split(packed: bytes) -> list[bytes]:
    """Hashes that lie one behind another."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
