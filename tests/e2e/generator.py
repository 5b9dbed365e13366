"""Random requests from our OpenAPI document: mostly right, some with one thing wrong."""

import random
import string
from typing import Any

Json = dict[str, Any]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MAIN_LIMIT = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
TEXTS = [
    "",
    "Hello",
    "Grüße 👋🏽",
    "日本語",
    "a b\n\nc",
    "<think>",
    "</think>",
    "<｜User｜>",
    "\x00",
    "x" * 300,
]
QUERIES = ["?limit=2", "?order=asc", "?limit=0", "?after=x", "?a=b", "?stream=true", "?stream=1"]
QUERIES += ["?stream=true&starting_after=2", "?stream=true&starting_after=-1", "?starting_after=1"]
MOST_TOKENS = 5  # of an answer: the generator tests the edges, not the engine


class Generator:
    """Draws requests; the same seed gives the same ones."""

    def __init__(self, document: Json, model: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._paths: Json = document["paths"]
        self._model = model
        self._known_ids = ["resp_" + "0" * 32, model, "nothing"]

    def knows(self, id: str) -> None:
        """An id that later requests may ask for."""
        self._known_ids = [*self._known_ids[-20:], id]

    def request(self) -> tuple[str, str, Json | None]:
        """Method, path with its parameters filled in, and body."""
        draw = self._random
        path = draw.choice(sorted(self._paths))
        method = draw.choice(sorted(self._paths[path]))
        operation: Json = self._paths[path][method]
        target = path.replace("{id}", draw.choice(self._known_ids))
        if "requestBody" not in operation:
            if draw.random() < 0.3:
                target += draw.choice(QUERIES)
            return method.upper(), target, None
        schema: Json = operation["requestBody"]["content"]["application/json"]["schema"]
        body: Json = self.value(schema)
        body["model"] = self._model if draw.random() < 0.97 else "gpt-9"
        if path == "/detokenize" or (path == "/tokenize" and draw.random() < 0.5):
            body.pop("model")
        self._bound(path, body)
        if draw.random() < 0.3:
            self._spoil(body)
        return method.upper(), target, body

    def value(self, schema: Json) -> Any:  # noqa: ANN401  any JSON
        """Something that the schema allows."""
        draw = self._random
        if "enum" in schema:
            return draw.choice(schema["enum"])
        if "oneOf" in schema:
            return self.value(draw.choice(schema["oneOf"]))
        match schema.get("type"):
            case "string":
                if "pattern" in schema:
                    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 8)))
                return draw.choice(TEXTS)
            case "boolean":
                return draw.random() < 0.5
            case "integer":
                return self._integer(schema)
            case "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
                high = schema["maximum"]
                return draw.choice([low or 0.01, high, round(draw.uniform(low or 0.01, high), 3)])
            case "array":
                count = draw.randint(schema.get("minItems", 0), min(schema.get("maxItems", 3), 3))
                return [self.value(schema["items"]) for _ in range(count)]
            case _:
                return self._object(schema)

    def _integer(self, schema: Json) -> int:
        low, high = schema.get("minimum", 0), schema.get("maximum", 200)
        return self._random.choice([low, high, self._random.randint(low, min(high, low + 100))])

    def _object(self, schema: Json) -> Json:
        properties: Json = schema.get("properties", {})
        required = schema.get("required", [])
        optional = [name for name in properties if name not in required]
        chosen = self._random.sample(optional, self._random.randint(0, min(5, len(optional))))
        body = {name: self.value(properties[name]) for name in [*required, *chosen]}
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict) and self._random.random() < 0.7:
            body[str(self._random.randint(0, 300))] = self.value(extra)
        return body

    def _bound(self, path: str, body: Json) -> None:
        """Short answers, few choices."""
        main = MAIN_LIMIT.get(path)
        if main is None:
            return
        body[main] = self._random.randint(1, MOST_TOKENS)
        for name in (*LIMITS, "min_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], body[main])
        if "n" in body:
            body["n"] = self._random.choice([1, 2, 3])

    def _spoil(self, body: Json) -> None:
        """One thing wrong, or odd."""
        draw = self._random
        if not body:
            return
        odd = [None, [], {}, "", "x", -1, 0, 1.5, 10**30, True, [None], {"a": [1]}, [[[]]]]
        match draw.randint(0, 3):
            case 0:
                body[draw.choice(["frobnicate", "n", "best_of", "tools", "stop"])] = draw.choice(
                    odd
                )
            case 1:
                body.pop(draw.choice(sorted(body)))
                if not any(name in body for name in LIMITS) and "prompt" not in body:
                    body["max_tokens"] = 1
            case _:
                name = draw.choice(sorted(body))
                was = body[name]
                body[name] = draw.choice(odd)
                if name in LIMITS and body[name] is None:
                    body[name] = was
