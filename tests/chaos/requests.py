"""What is asked: every way in which an answer can go wrong when it is taken up again."""

import random
from typing import NamedTuple

SALTED = 0.5  # share of requests whose prompt no cache knows
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "colours": {
            "type": "array",
            "items": {"type": "string", "enum": ["red", "green", "blue"]},
            "minItems": 6,
            "maxItems": 12,
        },
        "count": {"type": "integer", "minimum": 0, "maximum": 100_000},
    },
    "required": ["name", "colours", "count"],
    "additionalProperties": False,
}


class Request(NamedTuple):
    """A path and a body."""

    path: str
    body: dict[str, object]


def _make() -> list[Request]:
    """Greedy and sampled, raw and chat, with and without log probabilities, penalties, grammars."""
    made: list[Request] = []
    for n in range(10):
        body: dict[str, object] = {
            "model": "tiny",
            "max_tokens": 110 + 10 * (n % 3),
            "temperature": 0.0 if n % 4 == 1 else 0.9,
            "seed": n,
            "ignore_eos": True,
        }
        if n % 3 == 1:  # counted from the tokens that are there, also by the next executor
            body |= {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}
        words = f"The {n}th river runs past the old mill and on to the sea. " * (1 + 7 * (n % 3))
        if n in (3, 8):  # as long as the grammar says
            del body["ignore_eos"]
            body["messages"] = [{"role": "user", "content": f"Describe river {n} as JSON."}]
            body["thinking"] = {"type": "disabled"}
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "river", "schema": SCHEMA, "strict": True},
            }
            made.append(Request("/v1/chat/completions", body))
        elif n % 2:
            body["messages"] = [{"role": "user", "content": words}]
            body["thinking"] = {"type": "disabled"}
            body |= {"logprobs": True, "top_logprobs": 2}
            made.append(Request("/v1/chat/completions", body))
        else:
            body |= {"prompt": words, "logprobs": 2 * (n % 3)}
            made.append(Request("/v1/completions", body))
    return made


def _short() -> list[Request]:
    """Of a few tokens."""
    return [
        Request(
            "/v1/completions",
            {"model": "tiny", "prompt": f"Hello {n},", "max_tokens": 8, "seed": n, "logprobs": 1},
        )
        for n in range(4)
    ]


REQUESTS = _make()
NUM_LONG = len(REQUESTS)
REQUESTS += _short()


def salted(request: Request, draw: random.Random) -> Request:
    """Half of the requests are new to every cache; the answer is the same."""
    if draw.random() >= SALTED:
        return request
    salt = {"cache_salt": f"{draw.getrandbits(64):016x}"}
    return Request(request.path, {**request.body, **salt})
