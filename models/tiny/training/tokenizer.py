"""Train the byte-level BPE tokenizer and tokenise the corpus."""

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.tiny.training import tasks, text
from models.tiny.training.config import VOCAB_SIZE
from models.tiny.training.material import Material
from models.tiny.training.render import BOS, END_THINK, EOS, SPECIAL_TOKENS, THINK

NUM_CONVERSATIONS = 8000
MAX_DOCUMENT_TOKENS = 2000
HELD_OUT_SHARE = 0.02


def train(documents: list[str], material: Material) -> Tokenizer:
    """Train a tokenizer whose added tokens are the recipe's special tokens, ids from 0."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(t, normalized=False, special=t not in (THINK, END_THINK)) for t in SPECIAL_TOKENS
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(documents, material), trainer)
    return tokenizer


def _training_text(documents: list[str], material: Material) -> Iterator[str]:
    yield from documents
    rng = random.Random(5)
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for _ in range(NUM_CONVERSATIONS):
        conversation = tasks.draw(rng, material, max_lookup_tokens=300)
        yield special.sub("\n", "".join(piece.text for piece in conversation.pieces()))


def tokenise(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of training and held-out text, in documents of at most 2,000 tokens."""
    rng = random.Random(3)
    train_runs: list[list[int]] = []
    held_out_runs: list[list[int]] = []
    bos, eos = SPECIAL_TOKENS.index(BOS), SPECIAL_TOKENS.index(EOS)  # added first, in this order
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        for start in range(0, len(encoding.ids), MAX_DOCUMENT_TOKENS):
            runs = held_out_runs if rng.random() < HELD_OUT_SHARE else train_runs
            runs.append([bos, *encoding.ids[start : start + MAX_DOCUMENT_TOKENS], eos])
    rng.shuffle(train_runs)
    flat = (
        np.array([i for run in runs for i in run], np.uint16)
        for runs in (train_runs, held_out_runs)
    )
    return next(flat), next(flat)


def main() -> None:
    """Fetch the text, train the tokenizer and write what the trainer reads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder for the fetched text and ids"
    )
    parser.add_argument("--out", type=Path, required=True, help="where tokenizer.json goes")
    parser.add_argument("--no-fetch", action="store_true", help="the text is there already")
    options = parser.parse_args()
    source = options.data / "source"
    if not options.no_fetch:
        text.fetch(source)
    documents, material = text.documents(source), text.material(source)
    tokenizer = train(documents, material)
    tokenizer.save(str(options.out))
    train_ids, held_out_ids = tokenise(tokenizer, documents)
    np.savez_compressed(options.data / "text.npz", train=train_ids, held_out=held_out_ids)
    (options.data / "material.json").write_text(json.dumps(asdict(material)))
    print(f"{len(train_ids):,} training and {len(held_out_ids):,} held-out tokens of text")


if __name__ == "__main__":
    main()
