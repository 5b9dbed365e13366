"""Which tokens a model has: what a tokenizer and an engine must agree on before they talk."""

import hashlib
from pathlib import Path

import msgspec


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def vocabulary_digest(folder: Path) -> str:
    """Digest of all (id, token) pairs of a checkpoint's tokenizer.json, 32 hex digits.

    How the file is written, and the rules by which text is cut, do not enter it. Empty if there
    is no such file, or none of this kind: then there is nothing to compare.
    """
    try:
        spec = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError):
        return ""
    tokens = {token_id: token for token, token_id in spec.model.vocab.items()}
    tokens |= {added.id: added.content for added in spec.added_tokens}
    digest = hashlib.blake2b(digest_size=16)
    for token_id in sorted(tokens):
        digest.update(f"{token_id}\t{tokens[token_id]}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
