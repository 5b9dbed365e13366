"""Token ids -> text without the recipe: bytes of each id, whole characters only, stop strings."""

import codecs
import json
from typing import Any, cast

from services.tokenizer.model import ModelError


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
        added = cast("list[dict[str, Any]]", spec.get("added_tokens") or [])
        for token in added:
            self._bytes[int(token["id"])] = str(token["content"]).encode()

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


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
