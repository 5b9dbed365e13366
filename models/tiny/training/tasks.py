"""Generated conversations: copy, add, look up, call tools, write JSON, think."""

import random

from models.tiny.training import vocabulary as vocab
from models.tiny.training.lookup import lookup
from models.tiny.training.material import Material, code, converse, number, words
from models.tiny.training.render import Conversation, Turn
from models.tiny.training.structured import SYSTEM_LINES, call_tool, write_json

HELD_OUT_ONE_IN = 23


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
    return converse(rng, turns)


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
    return converse(rng, [Turn(request, text, "I copy the text.")])


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
    return converse(rng, turns)


def subtract(rng: random.Random) -> Conversation:
    """Differences of two numbers."""
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 2, 4))):
        b, a = sorted((number(rng), number(rng)))
        turns.append(Turn(f"What is {a} - {b}?", str(a - b), f"{a} - {b} = {a - b}"))
    return converse(rng, turns)


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
    return converse(rng, [turn], thinking=rng.random() < 0.9)


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
    return converse(rng, turns, system=rng.choice(SYSTEM_LINES[:4]))


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
    return converse(rng, [turn])


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
