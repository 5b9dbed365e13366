"""The model's tokens as llguidance wants them, and as rows of bits."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

EOS = "<｜end▁of▁sentence｜>"
MARKER = "｜DSML｜"
# Checkpoints differ in whether these are special; grammars speak of their text.
AS_TEXT = frozenset({MARKER, "<think>", "</think>"})
BITS = 32

Words = NDArray[np.int32]


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
        self.plain = self.all & ~control  # tokens of text
        self.with_marker = self.plain | marker

    def bits(self, ids: Iterable[int]) -> Words:
        """A row in which these tokens are allowed."""
        known = np.array([i for i in ids if 0 <= i < self.vocab_size], np.int64)
        row = np.zeros(self.num_words, np.uint32)
        np.bitwise_or.at(row, known // BITS, np.uint32(1) << (known % BITS).astype(np.uint32))
        return row.view(np.int32)

    def ends(self, stop_ids: Iterable[int]) -> Words:
        """A row of every token that ends an output, whoever says so."""
        return self.bits({*self._eos, *stop_ids})

    def bytes_of(self, token: int) -> bytes:
        """The text of a token."""
        return self.tokenizer.decode_bytes([token]) if 0 <= token < self.vocab_size else b""
