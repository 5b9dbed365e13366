"""`prompt_logprobs` of an answer: how likely each token of its prompt was, in vLLM's form."""

from typing import NamedTuple

import numpy as np

from deepmesh.wire.messages import PromptLogprobs
from services.tokenizer.reading import Json
from services.tokenizer.text_stream import Token, clamp_logprob
from services.tokenizer.vocabulary import Vocabulary


class Scored(NamedTuple):
    """A token of a prompt, and its place among all ids."""

    token: Token
    rank: int | None  # 1 for the best; None: the engine does not say


def scored_tokens(prompt_ids: list[int], found: PromptLogprobs) -> list[Scored]:
    """The tokens of a prompt but its first, each given those before it."""
    num = len(found.logprobs) // 4
    if not num:
        return []
    own: list[float] = np.frombuffer(found.logprobs, "<f4").tolist()
    ids: list[list[int]] = np.frombuffer(found.top_ids, "<i4").reshape(num, -1).tolist()
    best: list[list[float]] = np.frombuffer(found.top_logprobs, "<f4").reshape(num, -1).tolist()
    ranks: list[int | None] = (
        np.frombuffer(found.ranks, "<i4").tolist() if found.ranks else [None] * num
    )
    rows = zip(prompt_ids[found.first :], own, ids, best, ranks, strict=True)
    return [Scored(Token(t, p, list(zip(i, b, strict=True))), rank) for t, p, i, b, rank in rows]


class PromptField:
    """The field's value, once the engine has told the log-probabilities."""

    def __init__(self, prompt_ids: list[int], num_top: int, vocabulary: Vocabulary) -> None:
        self._prompt_ids = prompt_ids
        self._num_top = num_top
        self._vocabulary = vocabulary
        self._found: PromptLogprobs | None = None

    def take(self, found: PromptLogprobs) -> None:
        """What the engine says."""
        self._found = found

    def value(self) -> list[Json | None]:
        """For each token null (the first) or an object by id: its own entry, then the best ones.

        Raises:
            LookupError: they have not been told.
        """
        if self._found is None:
            raise LookupError("the engine brought no log-probabilities of the prompt")
        scored = scored_tokens(self._prompt_ids, self._found)
        return [None, *(self._entries(token, rank) for token, rank in scored)]

    def _entries(self, token: Token, rank: int | None) -> Json:
        entries: Json = {str(token.id): self._entry(token.id, token.logprob or 0.0, rank)}
        for place, (other, logprob) in enumerate(token.top[: self._num_top], 1):
            entries[str(other)] = self._entry(other, logprob, place)
        return entries

    def _entry(self, token_id: int, logprob: float, rank: int | None) -> Json:
        return {
            "logprob": clamp_logprob(logprob),
            "rank": rank,
            "decoded_token": self._vocabulary.name_of(token_id),
        }
