"""Requests that are answered by a tool call or by a JSON object."""

import json
import random
from collections.abc import Callable
from typing import Any

from models.tiny.training import vocabulary as vocab
from models.tiny.training.material import code, converse, number, words
from models.tiny.training.render import Conversation, Turn
from models.tiny.training.tools import CATALOGUE, argument

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
    return converse(rng, turns, tools=tools, system=rng.choice(SYSTEM_LINES))


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
    return converse(rng, [turn], response_format=response_format)
