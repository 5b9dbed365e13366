"""The model's tokens as llguidance wants them, and as rows of bits."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from deepmesh.wire.messages import Ids
from deepmesh.wire.packed import unpack_ids

EOS = "<｜end▁of▁sentence｜>"
MARKER = "｜DSML｜"
# Checkpoints differ in whether these are special; grammars speak of their text.
AS_TEXT = frozenset({MARKER, "<think>", "</think>"})
BITS = 32

MAX_STOPS = 256  # sets of stop ids whose rows are kept

Words = NDArray[np.int32]


class Stops(NamedTuple):
    """Rows of bits for outputs that the same ids end."""

    stops: Words  # what may end the output where it is whole
    plain: Words  # tokens of text that do not end it
    with_marker: Words  # these, and the marker of calls
    unended: Words  # all ids that do not end it


class MaskVocabulary:
    """Tokens of one checkpoint."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Read tokenizer.json.

        Args:
            vocab_size: of the model's logits; ids beyond the tokenizer's are never allowed.
        Raises:
            ValueError: there is no such file, or none that llguidance can use.
        """
        try:
            spec = cast("dict[str, Any]", json.loads((folder / "tokenizer.json").read_bytes()))
        except OSError as error:
            raise ValueError(f"{folder / 'tokenizer.json'}: {error.strerror}") from error
        added = cast("list[dict[str, Any]]", spec.get("added_tokens") or [])
        ids = {str(token["content"]): int(token["id"]) for token in added}
        for token in added:
            if token["content"] in AS_TEXT:
                token["special"] = False
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // BITS)
        self.tokenizer = LLTokenizer(
            json.dumps(spec, ensure_ascii=False), n_vocab=vocab_size, eos_token=ids.get(EOS)
        )
        self._eos = frozenset(self.tokenizer.eos_tokens)
        self.all = self.bits(range(vocab_size))
        control = self.bits(ids.values())
        marker = self.bits([ids[MARKER]] if MARKER in ids else [])
        self._plain = self.all & ~control  # tokens of text
        self._with_marker = self._plain | marker
        self._stops: dict[Ids, Stops] = {}

    def bits(self, ids: Iterable[int]) -> Words:
        """A row in which these tokens are allowed."""
        known = np.array([i for i in ids if 0 <= i < self.vocab_size], np.int64)
        row = np.zeros(self.num_words, np.uint32)
        np.bitwise_or.at(row, known // BITS, np.uint32(1) << (known % BITS).astype(np.uint32))
        return row.view(np.int32)

    def stops(self, stop_ids: Ids) -> Stops:
        """The rows of a request's stop ids; most requests have the same."""
        if (known := self._stops.get(stop_ids)) is not None:
            return known
        ids = unpack_ids(stop_ids).tolist()
        goes_on = ~self.bits({*self._eos, *ids})
        found = Stops(
            stops=self.bits(ids),
            plain=self._plain & goes_on,
            with_marker=self._with_marker & goes_on,
            unended=self.all & goes_on,
        )
        if len(self._stops) >= MAX_STOPS:
            self._stops.clear()
        self._stops[stop_ids] = found
        return found

    def bytes_of(self, token: int) -> bytes:
        """The text of a token."""
        return self.tokenizer.decode_bytes([token]) if 0 <= token < self.vocab_size else b""
