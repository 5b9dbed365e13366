"""The bytes behind each token id, read from tokenizer.json."""

import json
import re
from collections.abc import Iterable
from typing import Any, cast

THINK, THINK_END = "<think>", "</think>"
MARKER = "｜DSML｜"
USER = "<｜User｜>"
# What answers are parsed by. Checkpoints differ in whether these are special.
PARSED = frozenset({THINK, THINK_END, MARKER})
_CONTROL = re.compile("<｜.+｜>")  # special or not, as checkpoints differ here, too


class ModelError(ValueError):
    """The model folder cannot be served; the text names the file and the key."""


class Vocabulary:
    """The bytes that each token id stands for (byte-level BPE and added tokens)."""

    def __init__(self, tokenizer_json: str) -> None:
        spec = cast("dict[str, Any]", json.loads(tokenizer_json))
        if "ByteLevel" not in json.dumps(spec.get("decoder")):
            raise ModelError("tokenizer.json: only byte-level decoders are supported")
        to_byte = _byte_of_char()
        self._bytes: dict[int, bytes] = {}
        vocab = cast("dict[str, int]", spec["model"]["vocab"])
        for text, token_id in vocab.items():
            # an added token may use any character; it is overwritten below
            self._bytes[token_id] = bytes(to_byte[c] for c in text if c in to_byte)
        self._added: dict[str, int] = {}
        control: set[int] = set()
        self._is_lossless = _is_lossless(spec)
        for token in cast("list[dict[str, Any]]", spec.get("added_tokens") or []):
            token_id, text = int(token["id"]), str(token["content"])
            self._bytes[token_id] = text.encode()
            self._added[text] = token_id
            if text not in PARSED and (token.get("special") or _CONTROL.fullmatch(text)):
                control.add(token_id)
        self.control_ids = frozenset(control)  # structure of a conversation, no part of its text

    def special_id(self, text: str) -> int:
        """The id of an added token.

        Raises:
            ModelError: it is missing.
        """
        if text not in self._added:
            raise ModelError(f"tokenizer.json: the token {text} is missing")
        return self._added[text]

    def added_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Those of added tokens with just these texts."""
        return frozenset(self._added[text] for text in texts if text in self._added)

    @property
    def max_token_bytes(self) -> int | None:
        """No token stands for more bytes of a text; None when that cannot be told."""
        return max(map(len, self._bytes.values())) if self._is_lossless else None

    def bytes_of(self, token_id: int) -> bytes:
        """Ids without an entry (padding rows of the embedding) stand for nothing."""
        return self._bytes.get(token_id, b"")

    def text_of(self, token_ids: list[int]) -> str:
        """All of it at once; bytes that are no character become U+FFFD."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """The token alone, for logprobs; part of a character is spelled `bytes:\\xf0…`."""
        data = self.bytes_of(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _is_lossless(spec: dict[str, Any]) -> bool:
    """Whether the tokens of any text stand for all of its bytes: nothing is rewritten or cut."""
    normalizer: dict[str, Any] = spec.get("normalizer") or {}
    rewrites = bool(normalizer) and normalizer.get("normalizers") != []
    cuts = '"Removed"' in json.dumps(spec.get("pre_tokenizer"))
    added = cast("list[dict[str, Any]]", spec.get("added_tokens") or [])
    return not (rewrites or cuts or any(t.get("lstrip") or t.get("rstrip") for t in added))


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
