"""What conversations are drawn from: words, numbers, and pairs taken from the fetched text."""

import random
import string
from dataclasses import dataclass
from typing import Any

from models.tiny.training import vocabulary as vocab
from models.tiny.training.render import Conversation, Tool, Turn

THINKING_SHARE = 0.25


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


def converse(
    rng: random.Random,
    turns: list[Turn],
    thinking: bool | None = None,
    *,
    system: str = "",
    tools: tuple[Tool, ...] = (),
    response_format: dict[str, Any] | None = None,
) -> Conversation:
    """Return the turns as a conversation, with thinking on in a part of the draws."""
    thinks = rng.random() < THINKING_SHARE if thinking is None else thinking
    effort = rng.choice((50, 75, 75, 75, 100)) if thinks else None
    return Conversation(tuple(turns), system, tools, response_format, effort)
