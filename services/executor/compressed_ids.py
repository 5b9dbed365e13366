"""Compressed token ids of Engram: ids whose texts look alike share one."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers

REPLACEMENT = "\ufffd"  # a token that is not whole UTF-8
SPACE_GUARD = "\ue000"  # keeps a text that is one space from being stripped away


def compressed_ids(tokenizer_file: Path, vocab_size: int) -> list[int]:
    """Compressed id of every token id, numbered in order of first appearance.

    The table's length enters the hash multipliers, so the caller must compare it with
    `engram_compressed_vocab_size`.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    table: list[int] = []
    for token_id in range(vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalizer.normalize_str(text) or text
        table.append(numbers.setdefault(key, len(numbers)))
    return table


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), SPACE_GUARD),
            normalizers.Strip(),
            normalizers.Replace(SPACE_GUARD, " "),
        ]
    )
