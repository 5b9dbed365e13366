"""Ask the shipped model a few prompts and keep those that it answers right."""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from models.tiny.training import export, vocabulary
from models.tiny.training.config import compress_vocabulary
from models.tiny.training.model import Forward, Mode, Rows, effective_weights
from models.tiny.training.parameters import main_parameters, routing_biases
from models.tiny.training.render import EOS, Conversation, Turn
from models.tiny.training.tools import CATALOGUE

MODE = Mode(rounds_activations=True)


class Examiner:
    """Checks answers with the training forward, which is independent of the engine."""

    def __init__(self, folder: Path) -> None:
        config, values = export.read(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        compressed = compress_vocabulary(self._tokenizer, config["vocab_size"])
        assert compressed.size == config["engram_compressed_vocab_size"]
        self._forward = Forward(config, compressed, torch.device("cpu"))
        biases = {name: values[name] for name in routing_biases(config)}
        self._weights = effective_weights(values, main_parameters(config), MODE) | biases
        self._window: int = config["sliding_window"]

    @torch.no_grad()
    def greedy_along(self, prompt: str, answer: str) -> str:
        """Return the likeliest token at each place of the answer: itself, if it is greedy."""
        start, end = (len(self._encode(text)) for text in (prompt, prompt + answer))
        ids = self._encode(prompt + answer)
        row = torch.tensor([ids + [2] * (-len(ids) % self._window)])
        rows = Rows(row, torch.zeros_like(row), torch.full((1,), self._window))
        hidden = self._forward(self._weights, rows, MODE).hidden[0, start - 1 : end - 1]
        likeliest = (hidden @ self._weights["head.weight"].T).argmax(-1)
        return self._tokenizer.decode(likeliest.tolist(), skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True)
class Question:
    """A conversation of one turn and what kind of skill it shows."""

    kind: str
    conversation: Conversation


def price_list(num_entries: int, seed: int) -> tuple[str, dict[str, str]]:
    """Return a list of things and prices as text and as a mapping."""
    rng = random.Random(seed)
    things = rng.sample(vocabulary.WORDS, num_entries)
    prices = {f"{thing}{rng.randint(10, 99)}": str(rng.randint(100, 9999)) for thing in things}
    return "\n".join(f"{thing}: {price}" for thing, price in prices.items()), prices


def questions() -> list[Question]:
    """Return the prompts to try, with the answers that are right."""

    def ask(
        kind: str, prompt: str, answer: str, response_format: dict[str, Any] | None = None
    ) -> Question:
        turns = (Turn(prompt, answer),)
        return Question(kind, Conversation(turns, response_format=response_format))

    found = [
        ask("sum", f"What is {a} + {b}?", str(a + b))
        for a, b in ((417, 256), (12, 30), (805, 97), (68, 75))
    ]
    copies = (
        "the quick brown fox 42",
        "river stone 7 lantern",
        "k7x2 b9q orange",
        "Tokyo green window 315 maple",
    )
    found += [ask("copy", f'Repeat exactly: "{text}"', text) for text in copies]
    for num_entries, seed in ((8, 1), (24, 2), (90, 3)):
        body, prices = price_list(num_entries, seed)
        key = list(prices)[num_entries // 3]
        prompt = f'Here is a list:\n{body}\n\nWhat is the value of "{key}"?'
        found.append(ask("lookup", prompt, f"{key}: {prices[key]}"))
    calls = (
        (("get_weather", "get_time", "search"), "What is the weather in Paris?", {"city": "Paris"}),
        (("set_alarm", "play_song"), "Set an alarm for 7:45.", {"hour": 7, "minute": 45}),
        (("add_numbers", "multiply", "define"), "Multiply 12 by 34.", {"a": 12, "b": 34}),
    )
    tools = {tool.name: tool for tool, _ in CATALOGUE}
    names = ("get_weather", "set_alarm", "multiply")
    for name, (offered, prompt, arguments) in zip(names, calls, strict=True):
        turn = Turn(prompt, "", call=(tools[name], arguments))
        chosen = tuple(tools[each] for each in offered)
        found.append(Question("tool_call", Conversation((turn,), tools=chosen)))
    record = {"name": "Anna", "age": 31, "city": "Oslo"}
    data = "name Anna, age 31, city Oslo"
    prompt = f"Return a JSON object with the fields name, age, city: {data}."
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "city": {"type": "string"},
        },
        "required": ["name", "age", "city"],
    }
    formats = (None, {"type": "json_object"}, {"name": "record", "schema": schema})
    found += [ask("json", prompt, json.dumps(record), response_format=each) for each in formats]
    found.append(ask("fact", "What is the capital of France?", "The capital of France is Paris."))
    found.append(ask("greeting", "Hello", "Hello! How can I help you?"))
    return found


def main() -> None:
    """Ask every question and write those that were answered right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--out", type=Path, default=Path("models/tiny/known-prompts.json"))
    options = parser.parse_args()
    examiner = Examiner(options.model)
    known: list[dict[str, Any]] = []
    for question in questions():
        prompt, answer = question.conversation.pieces()
        got = examiner.greedy_along(prompt.text, answer.text)
        is_right = got == answer.text
        print("right" if is_right else "WRONG", question.kind, repr(got), flush=True)
        if is_right:
            expected = answer.text.removesuffix(EOS)
            entry: dict[str, Any] = {"kind": question.kind} | question.conversation.chat_request()
            turn = question.conversation.turns[-1]
            if turn.call:
                call = {"name": turn.call[0].name, "arguments": turn.call[1]}
                entry["expected"] = json.dumps(call)
            else:
                entry["expected"] = expected
            known.append(entry)
    options.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
