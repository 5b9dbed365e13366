"""Token ids -> text without the recipe: whole characters only, stop strings held back."""

import codecs
from collections.abc import Iterable

from services.tokenizer.vocabulary import Vocabulary


class Detokenizer:
    """Text of a growing sequence; a character appears when its last byte has come."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push_all(self, token_ids: Iterable[int]) -> str:
        """What these tokens complete."""
        return self._decoder.decode(b"".join(map(self._vocabulary.bytes_of, token_ids)))

    def push(self, token_id: int) -> str:
        """What this token completes; an unfinished character at the very end is never shown."""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))


class StopMatcher:
    """Finds the first stop string; holds back only what may be the beginning of one."""

    def __init__(self, stops: list[str], *, keep: bool = False) -> None:
        """`keep`: the stop string that is found belongs to the text."""
        self._stops = stops
        self._keep = keep
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is safe to send now. Nothing follows once `found`."""
        self._held += text
        found = [(at, len(s)) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            self.found = True
            start, length = min(found)
            safe, self._held = self._held[: start + length * self._keep], ""
            return safe
        keep = self._ambiguous()
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """The end is here: what was held back is text after all."""
        safe, self._held = self._held, ""
        return safe

    def _ambiguous(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
