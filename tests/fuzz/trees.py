"""Valid values of MessagePack and JSON, damaged in a few places: what garbage never gets to."""

import copy
import math
from collections.abc import Sequence
from typing import Any

from tests.fuzz.source import Source

# What a field is replaced by: ends of every integer's range, what no decimal holds, odd lengths,
# text that breaks lines, terminals, JSON and file names, other types.
VALUES: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    7,
    255,
    2**31 - 1,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.0,
    -0.5,
    1e308,
    -1e-320,
    math.inf,
    -math.inf,
    math.nan,
    True,
    False,
    None,
    "",
    "a",
    "tokenizer-0",
    "executor-0-0",
    "scheduler-0",
    "executor-0-²",
    "x" * 5000,
    "../../etc/passwd",
    "\x00\x1b[2J\r\n",
    "😀 é \u2028",
    "prefill",
    "decode",
    [],
    {},
    [[]],
    [None] * 40,
    [0] * 300,
)
BYTES = (b"", b"\x00", b"abc", b"\xff" * 4, b"\x00" * 16, b"\x7f" * 64, b"\xff" * 61, bytes(4096))
Path = tuple[Any, ...]


def paths(tree: Any, at: Path = ()) -> list[Path]:  # noqa: ANN401 - any MessagePack or JSON
    """Where its values stand, containers included."""
    found = [at]
    if isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            found += paths(item, (*at, index))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            found += paths(item, (*at, key))
    return found


def damaged(tree: Any, source: Source, *, first: int = 0) -> Any:  # noqa: ANN401
    """A copy, changed in one to four places.

    Args:
        first: of the places, that may be changed; 0 is the tree as a whole.
    """
    tree = copy.deepcopy(tree)
    for _ in range(1 + source.below(4)):
        places = paths(tree)[first:]
        if not places:
            return tree
        tree = _change(tree, source.pick(places), source)
    return tree


def _change(tree: Any, place: Path, source: Source) -> Any:  # noqa: ANN401
    if not place:
        return _other(tree, source)
    *way, last = place
    holder = tree
    for step in way:
        holder = holder[step]
    holder[last] = _other(holder[last], source)
    return tree


def _other(value: Any, source: Source) -> Any:  # noqa: ANN401
    """Mostly of the same kind: a value of another one is refused by the first check."""
    how = source.below(8)
    match value:
        case bytes() if how < 6:
            return _bytes(value, source)
        case bool():
            return _any(source) if how == 7 else not value
        case int() if how < 6:
            near = min(value + 1, 2**64 - 1), max(value - 1, -(2**63))
            return source.pick([*(v for v in VALUES if type(v) is int), *near])
        case float() if how < 6:
            return source.pick([v for v in VALUES if type(v) is float])
        case str() if how < 6:
            return source.pick([*(v for v in VALUES if type(v) is str), value + "x", value * 2])
        case list() if how < 6:
            return _list(value, source)
        case dict() if how < 6:
            return _dict(value, source)
        case _:
            return _any(source, BYTES if isinstance(value, bytes) else ())


def _any(source: Source, more: Sequence[Any] = ()) -> Any:  # noqa: ANN401
    # A copy: the next change may be within it, and the next input is to find it as it was.
    return copy.deepcopy(source.pick((*VALUES, *more)))


def _bytes(value: bytes, source: Source) -> bytes:
    match source.below(5):
        case 0:
            return source.pick(BYTES)
        case 1:
            return value[: source.below(len(value) + 1)]
        case 2:
            return value + source.take(1 + source.below(8))
        case 3 if value:
            at = source.below(len(value))
            return value[:at] + source.take(1) + value[at + 1 :]
        case _:
            return value * (1 + source.below(5))


def _list(value: list[Any], source: Source) -> list[Any]:
    match source.below(4):
        case 0:
            return []
        case 1:
            return value * (2 + source.below(40))
        case 2 if value:
            at = source.below(len(value))
            return value[:at] + value[at + 1 :]
        case _:
            return [*value, _any(source)]


def _dict(value: dict[Any, Any], source: Source) -> dict[Any, Any]:
    match source.below(3):
        case 0 if value:
            gone = source.pick(list(value))
            return {key: item for key, item in value.items() if key != gone}
        case 1 if value:
            return {**value, source.pick(["x", *value]): _any(source)}
        case _:
            return {**value, source.pick([v for v in VALUES if type(v) is str]): _any(source)}
