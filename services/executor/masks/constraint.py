"""One request's output under its grammar: how far it has come, and what may follow."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from deepmesh.grammars import MAY_STOP_EARLY, MAY_USE_MARKERS
from deepmesh.wire.packed import unpack_ids
from services.executor.masks.protocol import MaskState, Open
from services.executor.masks.vocabulary import BITS, MaskVocabulary, Words

_WORN = "lexer error: too many"  # states, or expressions: what llguidance says at its limits


class Constraint:
    """A matcher behind the text that the grammar starts after (the end of thinking)."""

    def __init__(self, order: Open, matcher: LLMatcher, vocabulary: MaskVocabulary) -> None:
        """`matcher` stands at the start of an output, and stays there; that of `order` is
        replayed by a copy."""
        self.slot, self.serial, self.grammar = order.slot, order.serial, order.grammar
        output = unpack_ids(order.output).tolist()
        self.position = order.position - len(output)
        self.base, self._matcher, self._vocabulary = matcher, matcher.deep_copy(), vocabulary
        self.renewals = 0  # how often another base was asked for
        self._min_len = order.min_len
        kind, rows = order.grammar.kind, vocabulary.stops(order.stop_ids)
        self._may_stop_early = kind in MAY_STOP_EARLY
        self._stop_ids = frozenset(unpack_ids(order.stop_ids).tolist())
        self._stops, self._unended = rows.stops, rows.unended
        self._going_on = rows.with_marker if kind in MAY_USE_MARKERS else rows.plain
        self._marker = b"".join(
            vocabulary.bytes_of(token) for token in unpack_ids(order.grammar.start_after).tolist()
        )
        self._seen = b""  # end of the output that could begin the marker
        self._has_begun = not self._marker
        self._is_broken = False
        self._taken: list[int] = []  # tokens, by the matcher; those after it broke, too
        self._is_trying = False  # what comes are drafts
        self.state = MaskState.MISSING  # at `position`
        self._nothing = bytes(4 * vocabulary.num_words)
        self._row: Words | None = None  # that was filled last, and where it lies
        self._address = 0
        for token in output:
            self.consume(token)

    def consume(self, token: int) -> None:
        """The next token of the output."""
        self.position += 1
        self.state = MaskState.MISSING
        if self._has_begun:
            self._match([token])
        else:
            self._look_for_begin(token)

    def _look_for_begin(self, token: int) -> None:
        """By text: a model may spell the marker in pieces, and go on within the last of them."""
        self._seen += self._vocabulary.bytes_of(token)
        found = self._seen.find(self._marker)
        if found < 0:
            self._seen = self._seen[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""
            return
        self._has_begun = True
        if self._is_trying:  # a matcher that refuses what comes with the marker is of no more use
            self._matcher = self._matcher.deep_copy()
        rest = self._seen[found + len(self._marker) :]
        if rest:
            self._match(self._vocabulary.tokenizer.tokenize_bytes(rest))

    def _match(self, tokens: list[int]) -> None:
        """A matcher that has ended, or failed, takes nothing more."""
        if not self._is_broken:
            stopped = self._matcher.is_stopped()
            self._is_broken = stopped or not self._matcher.consume_tokens(tokens)
        self._taken += tokens

    def walk(self, drafts: Sequence[int], rows: Sequence[Words]) -> int:
        """Masks for the places behind drafts, as far as they may follow; nothing has happened
        afterwards.

        Args:
            drafts: that stand at `position` and behind; what is there for it has been filled.
            rows: one for each place; the first holds what was filled.
        Returns: how many places have a mask, the first one included; a place where anything may
            come has one that allows all.
        """
        if self.state not in (MaskState.MASK, MaskState.FREE):
            return 1
        state, position, seen, matcher = self.state, self.position, self._seen, self._matcher
        has_begun, num_taken = self._has_begun, len(self._taken)
        self._is_trying = True
        place, at = 0, state
        while place < len(drafts):
            draft = drafts[place]
            is_legal = at == MaskState.FREE or _allows(rows[place], draft)
            if not is_legal or draft in self._stop_ids:
                break
            self.consume(draft)
            at = self.fill(rows[place + 1])
            if at == MaskState.FREE:
                rows[place + 1][:] = self._vocabulary.all
            elif at != MaskState.MASK:
                break
            place += 1
        extra, was_broken = len(self._taken) - num_taken, self._is_broken
        del self._taken[num_taken:]
        self.position, self.state, self._seen, self._matcher = position, state, seen, matcher
        self._has_begun, self._is_broken, self._is_trying = has_begun, False, False
        is_lost = was_broken or matcher.is_error()
        if has_begun and (is_lost or (extra and not matcher.rollback(extra))):
            # what only drafts led to is nothing that the request may fail for
            self.renew(self.base)
        return 1 + place

    @property
    def is_worn(self) -> bool:
        """It failed because its automaton is too large, perhaps by what others said: all outputs
        that begin with one matcher share one, which grows with them."""
        return _WORN in self.problem

    @property
    def problem(self) -> str:
        """What the matcher says of itself; empty while it works."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def renew(self, matcher: LLMatcher) -> None:
        """Go on behind another matcher of the same grammar, as if it had been there always."""
        self.base, self._matcher = matcher, matcher.deep_copy()
        self._is_broken = not self._matcher.consume_tokens(self._taken)

    def fill(self, row: Words) -> MaskState:
        """What may come at `position`; for MASK, `row` says so."""
        self.state = self._fill(row)
        return self.state

    def _fill(self, row: Words) -> MaskState:
        if not self._has_begun:
            if self._may_stop_early:
                return MaskState.FREE
            # an output that ends before it has begun would be none
            row[:] = self._unended
            return MaskState.MASK
        if self._is_broken or self._matcher.is_error():
            return MaskState.BROKEN
        if self._matcher.is_stopped():
            return MaskState.COMPLETE
        if row is not self._row:
            self._row, self._address = row, row.ctypes.data
        self._matcher.unsafe_compute_mask_ptr(self._address, row.nbytes)
        if self._matcher.is_error():
            return MaskState.BROKEN
        # Where the output may end, every stop id may end it; elsewhere none, whatever it spells.
        np.bitwise_and(row, self._going_on, out=row)
        is_whole = self._matcher.is_accepting()
        if row.tobytes() == self._nothing:  # a tenth of the time of row.any()
            return MaskState.COMPLETE if is_whole else MaskState.BROKEN
        if is_whole and self.position >= self._min_len:
            row |= self._stops
        return MaskState.MASK


def _allows(row: Words, token: int) -> bool:
    return bool(int(row[token // BITS]) >> (token % BITS) & 1)
