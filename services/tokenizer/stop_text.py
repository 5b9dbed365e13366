"""Which stop string ended a text, for answers that keep it."""

from services.tokenizer.detokenize import Detokenizer
from services.tokenizer.vocabulary import Vocabulary

_SLACK = 1024  # more characters than the longest token stands for


class StopText:
    """Follows the tokens of an output; the recipe says that a stop string came, not which."""

    def __init__(self, stops: list[str], vocabulary: Vocabulary) -> None:
        self._stops = stops
        self._detokenizer = Detokenizer(vocabulary)
        self._kept = max(map(len, stops), default=0) + _SLACK
        self._text = ""

    def push(self, token_id: int) -> None:
        """One more token."""
        self._text = (self._text + self._detokenizer.push(token_id))[-self._kept :]

    def found(self) -> str:
        """The stop string that begins first in the latest text; empty if none is there."""
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop)) >= 0]
        return min(found)[1] if found else ""
