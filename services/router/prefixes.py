"""Which replica has probably cached the beginning of a prompt: what was sent there lately. Pure."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from deepmesh.wire.messages import Generate

CHUNK_TOKENS = 128  # prefixes are kept and found on this grid
MAX_CHUNKS = 64  # of one prompt; what is longer differs no more by its beginning
MAX_KNOWN = 65_536  # chunks; the least recently used ones are forgotten
_CHUNK_BYTES = 4 * CHUNK_TOKENS


def prefix_chain(message: Generate) -> list[bytes]:
    """Chained hashes of the prompt's full chunks; requests of another salt share none."""
    ids = message.prompt_ids
    chain: list[bytes] = []
    last = hashlib.blake2b(message.salt, digest_size=16).digest()
    for end in range(_CHUNK_BYTES, min(len(ids), MAX_CHUNKS * _CHUNK_BYTES) + 1, _CHUNK_BYTES):
        chunk = ids[end - _CHUNK_BYTES : end]
        last = hashlib.blake2b(last + chunk, digest_size=16).digest()
        chain.append(last)
    return chain


class PrefixSketch:
    """A guess, never an answer: a replica may have evicted what was sent there."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._known: OrderedDict[bytes, dict[str, int]] = OrderedDict()  # replica -> its life
        self._lives: dict[str, int] = {}

    def note(self, chain: Sequence[bytes], replica: str) -> None:
        """A prompt goes there."""
        life = self._lives.setdefault(replica, 0)
        for link in reversed(chain):  # the longest prefix is forgotten first
            self._known.setdefault(link, {})[replica] = life
            self._known.move_to_end(link)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def known_tokens(self, chain: Sequence[bytes], replica: str) -> int:
        """How much of the prompt has been there in this life of the replica."""
        life, count = self._lives.get(replica), 0
        for link in chain:
            if life is None or self._known.get(link, {}).get(replica) != life:
                break
            count += 1
        return count * CHUNK_TOKENS

    def lost(self, replica: str) -> None:
        """Its cache is gone."""
        self._lives[replica] = self._lives.get(replica, 0) + 1
