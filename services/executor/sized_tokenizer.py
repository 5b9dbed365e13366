"""A byte-level BPE tokenizer cut or padded to another vocabulary. No torch."""

import json
from pathlib import Path
from typing import Any

FILLER = "Ġv{}"  # reads as " v4096"; no merge leads to it, so no text is encoded with it


class TokenizerSizeError(ValueError):
    """The tokenizer cannot have so many tokens."""


def sized_tokenizer(file: Path, vocab_size: int) -> str:
    """tokenizer.json of `file` with exactly `vocab_size` ids: 0 to vocab_size - 1.

    Cut, it loses its latest merges; padded, it gains tokens that only decode.

    Raises:
        TokenizerSizeError: added tokens and single bytes alone are more than that.
    """
    spec: dict[str, Any] = json.loads(file.read_text("utf-8"))
    model = spec["model"]
    vocab: dict[str, int] = model["vocab"]
    merged = {"".join(_pair(merge)) for merge in model["merges"]}
    added = {token["content"]: token["id"] for token in spec.get("added_tokens") or []}
    needed = 1 + max(
        [number for text, number in vocab.items() if text not in merged] + list(added.values())
    )
    if vocab_size < needed:
        raise TokenizerSizeError(
            f"{file}: needs {needed} ids for its special tokens and single bytes, not {vocab_size}"
        )
    kept = {text: number for text, number in vocab.items() if number < vocab_size}
    for number in range(max([*vocab.values(), *added.values()]) + 1, vocab_size):
        kept[FILLER.format(number)] = number
    model["vocab"] = kept
    model["merges"] = [merge for merge in model["merges"] if _is_whole(merge, kept)]
    return json.dumps(spec, ensure_ascii=False)


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _is_whole(merge: str | list[str], vocab: dict[str, int]) -> bool:
    left, right = _pair(merge)
    return left in vocab and right in vocab and left + right in vocab
