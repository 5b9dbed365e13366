"""Token ids -> text without the recipe: whole characters only, stop strings held back."""

import codecs

from services.tokenizer.vocabulary import Vocabulary


class Detokenizer:
    """Text of a growing sequence; a character appears when its last byte has come."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """What this token completes; an unfinished character at the very end is never shown."""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))


class StopMatcher:
    """Finds the first stop string; holds back only what may be the beginning of one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is safe to send now. Nothing follows once `found`."""
        self._held += text
        starts = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self.found = True
            safe, self._held = self._held[: min(starts)], ""
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
