"""Workload files: one JSON object a line, one request each (docs/simulator.md)."""

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from deepmesh.errors import UserError

from .clock import SECOND
from .requests import SimRequest
from .traffic import MAX_LEN, VOCAB, shared_tokens

Line = dict[str, Any]  # what json.loads gives; each field is checked below
FIELDS = {
    "arrival_s": (int, float),
    "prompt_tokens": (int,),
    "output_tokens": (int,),
    "prefix": (str,),
    "prefix_tokens": (int,),
    "priority": (int,),
    "seed": (int,),
    "grammar": (bool,),
}
REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")


def read(lines: Iterable[str], *, name: str, seed: int) -> Iterator[SimRequest]:
    """The requests of a file, which must be in order of arrival.

    Raises:
        UserError: names line and field at fault.
    """
    draw, last = random.Random(seed), 0.0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        line = _parse(text, f"{name}:{number}")
        if line["arrival_s"] < last:
            raise UserError(f"{name}:{number}: arrival_s goes back, from {last:g}")
        last = line["arrival_s"]
        yield _request(number, line, draw)


def _parse(text: str, where: str) -> Line:
    try:
        found: Line = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):  # pyright: ignore[reportUnnecessaryIsInstance]: it may be
        raise UserError(f"{where}: not a JSON object")
    for field in REQUIRED:
        if field not in found:
            raise UserError(f"{where}: {field} is missing")
    for field, value in found.items():
        if field not in FIELDS:
            raise UserError(f"{where}: unknown field {field!r}; known: {', '.join(FIELDS)}")
        kinds = FIELDS[field]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{where}: {field} must be {names}, it is {value!r}")
    _check(found, where)
    return found


def _check(line: Line, where: str) -> None:
    prefix, total = line.get("prefix_tokens", 0), line["prompt_tokens"] + line["output_tokens"]
    rules = (
        ("arrival_s", line["arrival_s"] >= 0, "must not be negative"),
        ("prompt_tokens", line["prompt_tokens"] >= 1, "must be at least 1"),
        ("output_tokens", line["output_tokens"] >= 1, "must be at least 1"),
        ("output_tokens", total <= MAX_LEN, f"and prompt_tokens together exceed {MAX_LEN}"),
        ("prefix_tokens", 0 <= prefix < line["prompt_tokens"], "must be less than prompt_tokens"),
        (
            "prefix_tokens",
            not prefix or "prefix" in line,
            "needs prefix, the name of what is shared",
        ),
        ("priority", -1000 <= line.get("priority", 0) <= 1000, "must lie in -1000..1000"),
        ("seed", line.get("seed", 0) >= 0, "must not be negative"),
    )
    for field, holds, text in rules:
        if not holds:
            raise UserError(f"{where}: {field} {text}")


def _request(number: int, line: Line, draw: random.Random) -> SimRequest:
    shared = shared_tokens(line.get("prefix", ""), line.get("prefix_tokens", 0))
    own = line["prompt_tokens"] - len(shared)
    return SimRequest(
        rid=number.to_bytes(16, "big"),
        prompt=shared + draw.choices(range(VOCAB), k=own),
        max_tokens=line["output_tokens"],
        arrival_ns=round(line["arrival_s"] * SECOND),
        seed=line.get("seed", draw.randrange(1 << 30)),
        priority=line.get("priority", 0),
        grammar=line.get("grammar", False),
    )
