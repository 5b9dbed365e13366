"""What a soak asks: short and long prompts, conversations, forms, requests that are given up."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from bench.load.workload import text

Json = dict[str, object]

TURNS = 4  # of a conversation
OPEN_CONVERSATIONS = 12
SCHEMAS = 10  # different ones: an automaton grows until it has seen nearly all outputs
KINDS = {  # name: weight
    "short": 30,
    "long": 8,
    "turn": 30,
    "structured": 10,
    "completion": 8,
    "whole": 8,  # not streamed
    "abort": 6,
}


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: str
    api: str  # chat, completions
    body: bytes
    give_up_s: float = 0.0  # the client hangs up so long after sending; 0: never


class Mix:
    """An endless row of requests out of one seed; prompts do not repeat, conversations grow."""

    def __init__(self, model: str, seed: int) -> None:
        self._model = model
        self._draw = random.Random(seed)
        self._open: list[list[Json]] = []

    def __iter__(self) -> Iterator[Ask]:
        names, weights = list(KINDS), list(KINDS.values())
        while True:
            kind = self._draw.choices(names, weights)[0]
            yield getattr(self, f"_{kind}")()

    def _short(self) -> Ask:
        return self._chat("short", self._says(self._draw.randint(4, 24)), self._tokens(8, 64))

    def _long(self) -> Ask:
        return self._chat("long", self._says(self._draw.randint(300, 700)), self._tokens(8, 32))

    def _abort(self) -> Ask:
        asked = self._chat("abort", self._says(16), 400)
        return Ask("abort", asked.api, asked.body, give_up_s=self._draw.uniform(0.01, 1.5))

    def _whole(self) -> Ask:
        return self._chat("whole", self._says(12), self._tokens(8, 32), stream=False)

    def _completion(self) -> Ask:
        fields: Json = {"prompt": text(self._draw, 20), "logprobs": 2}
        return self._ask("completion", "completions", fields, self._tokens(8, 32))

    def _structured(self) -> Ask:
        number = self._draw.randrange(SCHEMAS)
        schema: Json = {
            "type": "object",
            "properties": {
                f"name{number}": {"type": "string", "maxLength": 6},
                "count": {"type": "integer", "minimum": 0, "maximum": 9 + number},
                "done": {"type": "boolean"},
            },
            "required": [f"name{number}", "count", "done"],
        }
        more: Json = {"guided_json": schema, "ignore_eos": False, "min_tokens": 0}
        return self._chat("structured", self._says(8), 120, **more)

    def _turn(self) -> Ask:
        """The next turn of a conversation: what was said before is cached."""
        if len(self._open) < OPEN_CONVERSATIONS:
            self._open.append([{"role": "system", "content": text(self._draw, 120)}])
            messages = self._open[-1]
        else:
            messages = self._draw.choice(self._open)
        messages += self._says(self._draw.randint(8, 30))
        asked = self._chat("turn", messages, self._tokens(8, 32))
        messages.append({"role": "assistant", "content": text(self._draw, 16)})
        if len(messages) > 2 * TURNS:
            self._open.remove(messages)
        return asked

    def _says(self, num_words: int) -> list[Json]:
        return [{"role": "user", "content": text(self._draw, num_words)}]

    def _tokens(self, least: int, most: int) -> int:
        return self._draw.randint(least, most)

    def _chat(self, kind: str, messages: list[Json], num_tokens: int, **more: object) -> Ask:
        fields: Json = {"messages": messages, "thinking": {"type": "disabled"}}
        return self._ask(kind, "chat", fields, num_tokens, **more)

    def _ask(self, kind: str, api: str, fields: Json, num_tokens: int, **more: object) -> Ask:
        common: Json = {
            "model": self._model,
            "max_tokens": num_tokens,
            "seed": self._draw.randrange(1 << 31),
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }
        body = common | fields | more
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        return Ask(kind, api, msgspec.json.encode(body))
