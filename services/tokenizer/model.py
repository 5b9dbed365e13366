"""What the tokenizer needs to know of the checkpoint: its tokenizer, its limits, its end."""

import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import deepseek_recipe as dr

from services.tokenizer.vocabulary import ModelError, Vocabulary

EOS = "<｜end▁of▁sentence｜>"
BOS = "<｜begin▁of▁sentence｜>"


class Model(NamedTuple):
    """Read once at the start."""

    tokenizer: dr.Tokenizer
    vocabulary: Vocabulary
    vocab_size: int
    max_positions: int
    bos_id: int
    eos_ids: frozenset[int]


def load_model(folder: Path) -> Model:
    """Read config.json and tokenizer.json of a checkpoint.

    Raises:
        ModelError: a file or key is missing or wrong.
    """
    config = _read_json(folder / "config.json")
    text = cast("dict[str, Any]", config.get("text_config") or config)  # both config spellings
    try:
        tokenizer_json = (folder / "tokenizer.json").read_text("utf-8")
    except OSError as error:
        raise ModelError(f"{folder / 'tokenizer.json'}: {error.strerror}") from error
    try:
        vocabulary = Vocabulary(tokenizer_json)
        tokenizer = dr.Tokenizer.from_str(tokenizer_json)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"{folder / 'tokenizer.json'}: {error}") from error
    bos, eos = vocabulary.special_id(BOS), vocabulary.special_id(EOS)
    return Model(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        vocab_size=_positive(folder, text, "vocab_size"),
        max_positions=_positive(folder, text, "max_position_embeddings"),
        bos_id=bos,
        eos_ids=frozenset({eos, *_listed_eos(folder, config, text)}),
    )


def _listed_eos(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> list[int]:
    generation = folder / "generation_config.json"
    for source in (_read_json(generation) if generation.exists() else {}, config, text):
        listed: object = source.get("eos_token_id")
        if isinstance(listed, int):
            return [listed]
        if isinstance(listed, list):
            return [int(token) for token in cast("list[int]", listed)]
    return []


def _positive(folder: Path, config: dict[str, Any], key: str) -> int:
    value: object = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder / 'config.json'}: {key} must be a positive integer")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: object = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return cast("dict[str, Any]", value)
