"""What is asked: prompts out of a file, or made up to a length in tokens."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

Json = dict[str, object]
Api = str  # "chat" or "completions"

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Frequent words: about one token each in most vocabularies; `Fit` finds out how many here.
_FREQUENT = (
    "the of and to in is that for it on as with his they at be this from have or by one had not "
    "but what all were when we there can an your which their said if do will each about how up "
    "out them then she many some so these would other into has more her two like him see time "
    "could no make than first been its who now people my made over did down only way find use "
    "may water long little very after words called just where most know"
)
_WORDS = tuple(_FREQUENT.split())
_PROBES = (16, 272)  # words of the two requests that a fit takes


class PromptsError(ValueError):
    """The file of prompts cannot be used; the text says why."""


@dataclass(frozen=True)
class Fit:
    """Tokens of a prompt of so many words: measured, since only the server knows its template."""

    per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def of(cls, counts: tuple[int, int]) -> "Fit":
        """From what the server counted for the two probes."""
        slope = (counts[1] - counts[0]) / (_PROBES[1] - _PROBES[0])
        return cls(slope, counts[0] - slope * _PROBES[0]) if slope > 0 else cls()

    def words(self, tokens: int) -> int:
        """As many words as make a prompt of about `tokens`."""
        return max(1, round((tokens - self.overhead) / self.per_word))


@dataclass(frozen=True)
class Shape:
    """Everything about the requests but their prompts."""

    model: str
    api: Api = "chat"
    output_tokens: int = 128
    temperature: float | None = None  # None: the server's
    ignore_eos: bool = False  # an extension that some servers know
    extra: Json = field(default_factory=dict[str, object])  # further fields

    def body(self, prompt: Json, output_tokens: int = 0) -> bytes:
        """The JSON of one request."""
        count = output_tokens or self.output_tokens
        fields: Json = {
            "model": self.model,
            **prompt,
            "max_tokens": count,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields |= {"ignore_eos": True, "min_tokens": count}
        return msgspec.json.encode(fields | self.extra)


def text(draw: random.Random, num_words: int) -> str:
    """Words in an order that hardly ever comes again, so that no server has it cached."""
    return " ".join(draw.choices(_WORDS, k=num_words))


def prompt_of(api: Api, words: str) -> Json:
    """The field that carries a prompt."""
    if api == "completions":
        return {"prompt": words}
    return {"messages": [{"role": "user", "content": words}]}


def probes(shape: Shape) -> list[bytes]:
    """Two requests whose usage tells the lengths of prompts."""
    draw = random.Random("probe")
    return [shape.body(prompt_of(shape.api, text(draw, n)), 1) for n in _PROBES]


def synthetic(
    shape: Shape, fit: Fit, *, tokens: Callable[[random.Random], int], seed: int
) -> Iterator[bytes]:
    """Bodies without end; the same for the same seed."""
    draw = random.Random(seed)
    while True:
        words = text(draw, fit.words(tokens(draw)))
        yield shape.body(prompt_of(shape.api, words))


def from_file(shape: Shape, path: Path) -> Iterator[bytes]:
    """Bodies of the prompts in a file, again and again.

    Each line is text, or a JSON object with `prompt` or `messages`, and perhaps `output_tokens`.

    Raises:
        PromptsError: there are none, or one is neither.
    """
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: {error}") from error
    if not lines:
        raise PromptsError(f"{path}: no prompts in it")
    bodies = [_of_line(shape, line, f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    return _forever(bodies)


def _forever(bodies: list[bytes]) -> Iterator[bytes]:
    while True:
        yield from bodies


def _of_line(shape: Shape, line: str, where: str) -> bytes:
    if not line.lstrip().startswith("{"):
        return shape.body(prompt_of(shape.api, line))
    try:
        entry = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise PromptsError(f"{where}: {error}") from error
    count = entry.get("output_tokens", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise PromptsError(f"{where}: output_tokens must be a number of tokens")
    if shape.api == "chat" and "messages" in entry:
        return shape.body({"messages": entry["messages"]}, count)
    if "prompt" in entry:
        if shape.api == "completions":
            return shape.body({"prompt": entry["prompt"]}, count)
        return shape.body(prompt_of(shape.api, str(entry["prompt"])), count)
    wanted = "`messages` or `prompt`" if shape.api == "chat" else "`prompt`"
    raise PromptsError(f"{where}: has no {wanted}")
