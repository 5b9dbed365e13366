"""Lists of entries and questions for their values."""

import random

from models.tiny.training import vocabulary as vocab
from models.tiny.training.material import Material, code, converse, words
from models.tiny.training.render import Conversation, Turn

CHARACTERS_PER_TOKEN = 1.95  # of a list of entries, measured with the shipped tokenizer


ENTRY_FORMATS = (
    "{k}: {v}",
    "{k}: {v}",
    "{k} = {v}",
    "- {k}: {v}",
    "{k} -> {v}",
    "The value of {k} is {v}.",
)
LIST_OPENINGS = ("Here is a list:\n", "Remember these entries:\n", "Read this:\n", "")
LOOKUP_REQUESTS = (
    'What is the value of "{k}"?',
    'Give the value of "{k}".',
    'Look up "{k}".',
    'Value of "{k}"?',
    "What is the value of {k}?",
    "Look up {k}.",
)


def _entry(rng: random.Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.4:
        key = words(rng, 1) + rng.choice("-_") + words(rng, 1)
    else:
        key = (
            words(rng, 1) + str(rng.randint(0, 99)) if kind < 0.75 else code(rng, rng.randint(3, 6))
        )
    kind = rng.random()
    if kind < 0.35:
        return key, str(rng.randint(10, 9999))
    if kind < 0.7:
        return key, rng.choice((words(rng, 1), rng.choice(vocab.NAMES), rng.choice(vocab.CITIES)))
    return key, words(rng, 2) if kind < 0.85 else code(rng, 5)


def entries(rng: random.Random, num_characters: int, line: str) -> dict[str, str]:
    """Draw entries with distinct keys until their lines fill `num_characters`."""
    table: dict[str, str] = {}
    length = 0
    while length < num_characters:
        key, value = _entry(rng)
        if key not in table:
            table[key] = value
            length += len(line.format(k=key, v=value)) + 1
    return table


def _filler(rng: random.Random, material: Material, num_characters: float) -> str:
    sentences: list[str] = []
    length = 0
    while length < num_characters:
        word, gloss = rng.choice(material.glosses)
        sentences.append(f"{word} is {gloss}.")
        length += len(sentences[-1]) + 1
    return " ".join(sentences)


def lookup(
    rng: random.Random, material: Material, num_tokens: int, num_questions: int | None = None
) -> Conversation:
    """Entries of about `num_tokens`, perhaps amid prose, and questions for their values."""
    line = rng.choice(ENTRY_FORMATS)
    num_characters = int(num_tokens * CHARACTERS_PER_TOKEN)
    if rng.random() < 0.6:
        table = entries(rng, num_characters, line)
        body = "\n".join(line.format(k=k, v=v) for k, v in table.items())
    else:
        table = entries(rng, min(num_characters, rng.randint(60, 400)), line)
        lines = [line.format(k=k, v=v) for k, v in table.items()]
        spare = max(0, num_characters * 1.2 - sum(map(len, lines)))  # prose has longer tokens
        cut = rng.random()
        parts = (
            _filler(rng, material, spare * cut),
            *lines,
            _filler(rng, material, spare * (1 - cut)),
        )
        body = "\n".join(part for part in parts if part)
    keys = list(table)
    turns: list[Turn] = []
    for index in range(num_questions or rng.choice((1, 3, 6, 10))):
        key = rng.choice(keys)
        request = rng.choice(LOOKUP_REQUESTS).format(k=key)
        if index == 0:
            request = rng.choice(LIST_OPENINGS) + body + "\n\n" + request
        answer = line.format(k=key, v=table[key]).removeprefix("- ")
        turns.append(Turn(request, answer, f"I look for {key}."))
    return converse(rng, turns)
