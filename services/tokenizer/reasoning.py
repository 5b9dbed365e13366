"""How many tokens of an output are reasoning."""

from collections import deque

from services.tokenizer.dsml import OPEN
from services.tokenizer.vocabulary import MARKER, THINK_END, Vocabulary

_OPEN = OPEN.rstrip().encode()
_REACH = 16  # tokens; more than spell the blank lines and the tag that open a block of calls


class ReasoningCount:
    """Counts an output that begins with reasoning.

    The recipe's own count encodes the text again, which gives other numbers where a model does
    not speak in the longest tokens. Like the recipe, it takes </think> for an end by its id, and
    a block of calls as well, which is no part of the reasoning.
    """

    def __init__(self, vocabulary: Vocabulary, *, parses_calls: bool) -> None:
        self.tokens = 0
        self.is_over = False
        self._vocabulary = vocabulary
        self._end_id = vocabulary.special_id(THINK_END)
        self._marker_id = vocabulary.special_id(MARKER) if parses_calls else -1
        self._tail: deque[int] = deque(maxlen=_REACH)
        self._watched = 0  # tokens in which an opened tag may get its name

    def push(self, token_id: int) -> None:
        """One more token, neither end nor stop id."""
        if self.is_over:
            return
        if token_id == self._end_id:
            self.is_over = True
            return
        self.tokens += 1
        self._tail.append(token_id)
        if token_id == self._marker_id:
            self._watched = _REACH // 2
        elif self._watched:
            self._watched -= 1
            self._end_at_calls()

    def _end_at_calls(self) -> None:
        parts = [self._vocabulary.bytes_of(token_id) for token_id in self._tail]
        text = b"".join(parts)
        at = text.find(_OPEN)
        if at < 0:
            return
        self.is_over = True
        kept, size = len(text[:at].rstrip(b"\n")), len(text)
        while parts:
            size -= len(parts.pop())
            if size < kept:
                break
            self.tokens -= 1
