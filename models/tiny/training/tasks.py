"""Generated conversations: copy, add, look up, call tools, write JSON, think."""

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.tiny.training import vocabulary as vocab
from models.tiny.training.render import Conversation, Tool, Turn
from models.tiny.training.tools import CATALOGUE, argument

THINKING_SHARE = 0.25
HELD_OUT_ONE_IN = 23
CHARACTERS_PER_TOKEN = 1.95  # of a list of entries, measured with the shipped tokenizer


@dataclass(frozen=True)
class Material:
    """Question and answer pairs taken from the fetched text."""

    chat: list[tuple[str, str]]
    glosses: list[tuple[str, str]]


def words(rng: random.Random, count: int) -> str:
    """Draw `count` words."""
    return " ".join(rng.choice(vocab.WORDS) for _ in range(count))


def code(rng: random.Random, length: int) -> str:
    """Draw a code of lower-case letters and digits."""
    return "".join(rng.choice(string.ascii_lowercase + string.digits) for _ in range(length))


def number(rng: random.Random) -> int:
    """Draw a number of one to three digits, each length equally often."""
    return rng.randint(0, 10 ** rng.randint(1, 3) - 1)


def _conversation(
    rng: random.Random,
    turns: list[Turn],
    thinking: bool | None = None,
    *,
    system: str = "",
    tools: tuple[Tool, ...] = (),
    response_format: dict[str, Any] | None = None,
) -> Conversation:
    thinks = rng.random() < THINKING_SHARE if thinking is None else thinking
    effort = rng.choice((50, 75, 75, 75, 100)) if thinks else None
    return Conversation(tuple(turns), system, tools, response_format, effort)


# Copy

COPY_REQUESTS = (
    'Repeat exactly: "{text}"',
    'Repeat the text "{text}"',
    'Say "{text}"',
    'Copy this: "{text}"',
    'Please write "{text}" again.',
    'Echo "{text}"',
    'Repeat after me: "{text}"',
)


def _short_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return " ".join(
            rng.choice((words(rng, 1), words(rng, 1), rng.choice(vocab.NAMES), str(number(rng))))
            for _ in range(rng.randint(1, 10))
        )
    if kind < 0.65:
        return code(rng, rng.randint(3, 12))
    if kind < 0.85:
        return " ".join(code(rng, rng.randint(1, 6)) for _ in range(rng.randint(1, 5)))
    return "".join(
        rng.choice(
            (words(rng, 1).title(), words(rng, 1), str(number(rng)), rng.choice("-_./:#!?+=, "))
        )
        for _ in range(rng.randint(2, 7))
    )


def copy_short(rng: random.Random) -> Conversation:
    """One to three quoted texts to repeat."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = _short_text(rng)
        request = rng.choice(COPY_REQUESTS).format(text=text)
        turns.append(Turn(request, text, f'The text is "{text}".'))
    return _conversation(rng, turns)


def copy_long(rng: random.Random, num_words: int | None = None) -> Conversation:
    """A quoted text that is longer than the window."""
    count = num_words or rng.choice((rng.randint(8, 30), rng.randint(20, 80), rng.randint(60, 200)))
    draw = rng.choice(
        (
            lambda: words(rng, 1),
            lambda: code(rng, rng.randint(2, 5)),
            lambda: rng.choice(
                (words(rng, 1), code(rng, 3), rng.choice(vocab.NAMES), str(number(rng)))
            ),
        )
    )
    text = " ".join(draw() for _ in range(count))
    request = rng.choice(COPY_REQUESTS).format(text=text)
    return _conversation(rng, [Turn(request, text, "I copy the text.")])


# Arithmetic

SUM_REQUESTS = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "{a} + {b} =",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "How much is {a} plus {b}?",
    "{a}+{b}",
    "Calculate {a} + {b}",
)


def is_held_out(a: int, b: int) -> bool:
    """Return whether the sum a + b is kept for the held-out figures."""
    return (a * 7919 + b * 104729) % HELD_OUT_ONE_IN == 0


def _addends(rng: random.Random, held_out: bool) -> tuple[int, int]:
    while True:
        a, b = number(rng), number(rng)
        if rng.random() < 0.5:
            a, b = rng.randint(100, 999), rng.randint(10, 999)
        if is_held_out(a, b) == held_out:
            return a, b


def add(rng: random.Random, held_out: bool = False) -> Conversation:
    """Sums of two numbers."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 2, 4, 8))):
        a, b = _addends(rng, held_out)
        turns.append(
            Turn(rng.choice(SUM_REQUESTS).format(a=a, b=b), str(a + b), f"{a} + {b} = {a + b}")
        )
    return _conversation(rng, turns)


def subtract(rng: random.Random) -> Conversation:
    """Differences of two numbers."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 2, 4))):
        b, a = sorted((number(rng), number(rng)))
        turns.append(Turn(f"What is {a} - {b}?", str(a - b), f"{a} - {b} = {a - b}"))
    return _conversation(rng, turns)


# Look-up

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
    return _conversation(rng, turns)


# Tools and JSON

SYSTEM_LINES = ("", "", "", "You are a helpful assistant.", "You can use tools.")


def call_tool(rng: random.Random) -> Conversation:
    """A request for one of a few tools, sometimes with its result and a second request."""
    offered = rng.sample(CATALOGUE, rng.choice((1, 2, 3, 3, 3, 4)))
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2))):
        tool, requests = rng.choice(offered)
        arguments = {name: argument(rng, name, kind) for name, kind in tool.parameters.items()}
        request = rng.choice(requests).format(**arguments)
        turns.append(Turn(request, "", f"I call {tool.name}.", (tool, arguments)))
        result = " ".join(
            rng.choice((words(rng, 1), str(number(rng)))) for _ in range(rng.randint(1, 5))
        )
        turns.append(
            Turn(result, f"The result is: {result}", "I have the result.", is_tool_result=True)
        )
    if rng.random() < 0.5:
        turns.pop()
    tools = tuple(tool for tool, _ in offered)
    return _conversation(rng, turns, tools=tools, system=rng.choice(SYSTEM_LINES))


FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "name": lambda rng: rng.choice(vocab.NAMES),
    "age": lambda rng: rng.randint(1, 99),
    "city": lambda rng: rng.choice(vocab.CITIES),
    "color": lambda rng: rng.choice(vocab.COLORS),
    "count": number,
    "id": lambda rng: rng.randint(1, 999),
    "title": lambda rng: words(rng, 2),
    "price": lambda rng: rng.randint(1, 999),
    "day": lambda rng: rng.choice(vocab.DAYS),
    "month": lambda rng: rng.choice(vocab.MONTHS),
    "code": lambda rng: code(rng, 5),
    "animal": lambda rng: rng.choice(vocab.ANIMALS),
    "language": lambda rng: rng.choice(vocab.LANGUAGES),
    "active": lambda rng: rng.random() < 0.5,
    "country": lambda rng: rng.choice(tuple(vocab.CAPITALS)),
}
JSON_REQUESTS = (
    "Return a JSON object with the fields {names}: {data}.",
    "Make JSON with {names} from this: {data}",
    "Write {names} as a JSON object. {data}",
    "Give me json with keys {names}. Data: {data}",
)
JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}


def write_json(rng: random.Random) -> Conversation:
    """Fields named in prose, to be written as JSON; half of the requests carry a format."""
    record = {name: FIELDS[name](rng) for name in rng.sample(list(FIELDS), rng.randint(1, 5))}
    shown = [
        (name, str(value).lower() if isinstance(value, bool) else value)
        for name, value in record.items()
    ]
    if rng.random() < 0.3:
        rng.shuffle(shown)
    if rng.random() < 0.6:
        data = ", ".join(f"{name} {value}" for name, value in shown)
    else:
        data = "; ".join(f"the {name} is {value}" for name, value in shown)
    names = ", ".join(record)
    request = rng.choice(JSON_REQUESTS).format(names=names, data=data)
    kind = rng.random()
    response_format: dict[str, Any] | None = None
    if kind < 0.25:
        response_format = {"type": "json_object"}
    elif kind < 0.5:
        properties = {name: {"type": JSON_TYPES[type(value)]} for name, value in record.items()}
        schema = {"type": "object", "properties": properties, "required": list(record)}
        response_format = {"name": "record", "schema": schema}
    turn = Turn(request, json.dumps(record), f"The fields are {names}.")
    return _conversation(rng, [turn], response_format=response_format)


# Thinking, questions, small transformations


def _sum_of_three(rng: random.Random) -> Turn:
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    form = rng.choice(
        (
            "What is {a} + {b} + {c}?",
            "Add {a}, {b} and {c}.",
            "{name} has {a} apples, gets {b} and then {c} more. How many apples?",
        )
    )
    question = form.format(a=a, b=b, c=c, name=rng.choice(vocab.NAMES))
    return Turn(question, str(a + b + c), f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}.")


def _nth_word(rng: random.Random) -> Turn:
    listed = rng.sample(vocab.WORDS, rng.randint(2, 6))
    index = rng.randrange(len(listed))
    ordinal = vocab.ORDINALS[index]
    counted = " ".join(f"{position + 1}: {word}." for position, word in enumerate(listed))
    question = f"What is the {ordinal} word: {' '.join(listed)}?"
    return Turn(question, listed[index], f"{counted} The {ordinal} is {listed[index]}.")


def _extreme_age(rng: random.Random) -> Turn:
    ages = dict(zip(rng.sample(vocab.NAMES, 3), rng.sample(range(1, 99), 3), strict=True))
    told = " ".join(f"{name} is {age} years old." for name, age in ages.items())
    ranked = sorted(ages, key=lambda name: ages[name])
    adjective, found = rng.choice((("oldest", ranked[-1]), ("youngest", ranked[0])))
    order = ", ".join(f"{name} {ages[name]}" for name in ranked)
    return Turn(f"{told} Who is the {adjective}?", found, f"{order}. So it is {found}.")


def think(rng: random.Random) -> Conversation:
    """A question that needs a step between."""
    turn = rng.choice((_sum_of_three, _nth_word, _extreme_age))(rng)
    return _conversation(rng, [turn], thinking=rng.random() < 0.9)


def _fact(rng: random.Random, material: Material) -> Turn:
    kind = rng.random()
    if kind < 0.3:
        country, capital = rng.choice(tuple(vocab.CAPITALS.items()))
        form = rng.choice(
            ("What is the capital of {}?", "Name the capital of {}.", "Capital of {}?")
        )
        sentence = f"The capital of {country} is {capital}."
        return Turn(form.format(country), sentence, sentence)
    if kind < 0.5:
        cycle, kind_name = rng.choice(((vocab.DAYS, "day"), (vocab.MONTHS, "month")))
        index = rng.randrange(len(cycle))
        following = cycle[(index + 1) % len(cycle)]
        question = f"Which {kind_name} comes after {cycle[index]}?"
        return Turn(question, f"{following}.", f"After {cycle[index]} comes {following}.")
    if kind < 0.75:
        question, answer = rng.choice(vocab.GREETINGS)
        return Turn(question, answer, f"The user says: {question}")
    if kind < 0.85:
        question, answer = rng.choice(material.chat)
        return Turn(question, answer, f"The user says: {question}")
    word, gloss = rng.choice(material.glosses)
    form = rng.choice(("What is {}?", "Define {}.", "What does {} mean?"))
    return Turn(form.format(word), f"{word} is {gloss}.", f"The word is {word}.")


def ask_fact(rng: random.Random, material: Material) -> Conversation:
    """Capitals, days, greetings and dictionary glosses."""
    turns = [_fact(rng, material) for _ in range(rng.randint(1, 4))]
    return _conversation(rng, turns, system=rng.choice(SYSTEM_LINES[:4]))


def transform(rng: random.Random) -> Conversation:
    """Words to be put in capital letters, counted through, reversed or sorted."""
    listed = rng.sample(vocab.WORDS, rng.randint(2, 6))
    kind = rng.random()
    if kind < 0.3:
        turn = Turn(
            f"Write in capital letters: {' '.join(listed)}",
            " ".join(listed).upper(),
            "Capital letters.",
        )
    elif kind < 0.55:
        turn = Turn(
            f"Reverse the order of these words: {' '.join(listed)}",
            " ".join(listed[::-1]),
            "Backwards.",
        )
    elif kind < 0.75:
        turn = Turn(
            f"Sort these words: {' '.join(listed)}", " ".join(sorted(listed)), "Alphabetical order."
        )
    else:
        start = rng.randint(1, 20)
        stop = start + rng.randint(2, 15)
        counted = ", ".join(map(str, range(start, stop + 1)))
        turn = Turn(f"Count from {start} to {stop}.", counted, "I count.")
    return _conversation(rng, [turn])


def draw(rng: random.Random, material: Material, max_lookup_tokens: int) -> Conversation:
    """Draw a conversation from the mixture that the model is trained on."""
    shares = {
        copy_short: 0.11,
        copy_long: 0.06,
        add: 0.19,
        subtract: 0.02,
        call_tool: 0.10,
        write_json: 0.15,
        think: 0.08,
        transform: 0.03,
        ask_fact: 0.06,
        lookup: 0.20,
    }
    (task,) = rng.choices(list(shares), list(shares.values()))
    if task is lookup:
        longest = max(60, max_lookup_tokens)
        return lookup(rng, material, rng.randint(40, rng.choice((min(200, longest), longest))))
    if task is ask_fact:
        return ask_fact(rng, material)
    return task(rng)
