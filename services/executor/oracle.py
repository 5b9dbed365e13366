"""What the fake samples: tokens and accepted drafts as hashes of everything before them."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15  # odd: it has an inverse modulo 2**64
FIRST_ID = 512  # special tokens and single bytes lie below: replies are plain text
LUCK = 77  # keeps the draw for accepted drafts apart from that for tokens

Hashes = NDArray[np.uint64]


def mix(value: int) -> int:
    """The finaliser of SplitMix64: 64 bits in, 64 well-mixed bits out."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def mix_all(values: Hashes) -> Hashes:
    """`mix` of every element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def chain(previous: int, ids: NDArray[np.int32]) -> Hashes:
    """Chain hash behind each id: c_i = BASE * c_(i-1) + id_i + 1, modulo 2**64."""
    forth = np.cumprod(np.full(len(ids), BASE, np.uint64))
    back = np.cumprod(np.full(len(ids), pow(BASE, -1, 1 << 64), np.uint64))
    terms = back * (ids.astype(np.uint64) + np.uint64(1))
    return forth * (np.uint64(previous) + np.cumsum(terms))


def extend_all(previous: Hashes, ids: NDArray[np.int32]) -> Hashes:
    """Chain hashes behind one more id of each row."""
    return np.uint64(BASE) * previous + ids.astype(np.uint64) + np.uint64(1)


def key_of(seed: int, sub_index: int) -> int:
    """What a request's draws depend on beside its tokens."""
    return mix(seed ^ mix(sub_index))


class Oracle:
    """What the fake samples: a function of the tokens before, the seed and the sub-index."""

    def __init__(self, vocab_size: int, *, stop_one_in: int = 0) -> None:
        """`stop_one_in`: about every so many tokens is a stop id; 0 is never."""
        self.vocab_size = vocab_size
        self.stop_one_in = stop_one_in
        self.first_id = FIRST_ID if vocab_size > 2 * FIRST_ID else 0

    def token(
        self,
        before: int,
        key: int,
        *,
        stop_ids: Collection[int],
        may_stop: bool,
        masked: bool = False,
    ) -> int:
        """The token behind a prefix with chain hash `before` (which covers the position).

        Args:
            key: `key_of` the request.
            masked: a grammar is in force; the fake's grammars allow every second id.
        """
        draw = mix(before ^ key)
        if self.stop_one_in and may_stop and stop_ids and draw % self.stop_one_in == 0:
            return min(stop_ids)
        span = self.vocab_size - self.first_id
        offset = mix(draw) % span
        if masked:
            offset -= offset % 2
        stride = 2 if masked else 1
        while self.first_id + offset in stop_ids:
            offset = (offset + stride) % (span - span % stride)
        return self.first_id + offset

    def tokens(
        self, before: Hashes, keys: Hashes, masked: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """`token` of many rows as if none had stop ids, and which rows may draw a stop id."""
        draws = mix_all(before ^ keys)
        offsets = (mix_all(draws) % np.uint64(self.vocab_size - self.first_id)).astype(np.int32)
        offsets -= offsets % 2 * masked
        stops = np.zeros(len(draws), np.bool_)
        if self.stop_one_in:
            stops = draws % np.uint64(self.stop_one_in) == 0
        return self.first_id + offsets, stops

    def accepted(self, before: Hashes, keys: Hashes, draft_len: int) -> NDArray[np.int64]:
        """How many drafts survive behind each prefix, if so many are verified."""
        draws = mix_all(mix_all(before ^ keys) + np.uint64(LUCK))
        return (draws % np.uint64(draft_len + 1)).astype(np.int64)

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        seed: int = 0,
        sub_index: int = 0,
        stop_ids: Collection[int] = (),
        min_len: int = 0,
        masked: bool = False,
    ) -> list[int]:
        """The output of a request in closed form: what any schedule must give."""
        ids, key = list(prompt), key_of(seed, sub_index)
        state = int(chain(0, np.asarray(ids, np.int32))[-1])
        while len(ids) < len(prompt) + count and not (set(ids[len(prompt) :]) & set(stop_ids)):
            may_stop = len(ids) >= min_len
            token = self.token(state, key, stop_ids=stop_ids, may_stop=may_stop, masked=masked)
            state = int(chain(state, np.asarray([token], np.int32))[0])
            ids.append(token)
        return ids[len(prompt) :]
