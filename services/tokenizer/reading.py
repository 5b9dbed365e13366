"""Reading values out of a JSON object; every complaint names the field."""

import math
from typing import Any, TypeGuard

import msgspec

from services.tokenizer.refusal import Refusal

Json = dict[str, Any]  # Any: the values are what the client sent, checked one by one


def parse_object(body: bytes) -> Json:
    """The JSON object in a request body."""
    if not body.strip():
        raise Refusal("The body is empty; send a JSON object.")
    try:
        value: object = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise Refusal(f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise Refusal("The body is nested too deeply.") from error
    return as_object(value, "")


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Whether the value is a JSON array."""
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[Json]:
    """Whether the value is a JSON object."""
    return isinstance(value, dict)


def as_object(value: object, param: str) -> Json:
    """The value if it is an object."""
    if not is_object(value):
        where = f"`{param}`" if param else "The body"
        raise Refusal(f"{where} must be a JSON object, not {kind_of(value)}.", param)
    return value


def as_list(value: object, param: str) -> list[Any]:
    """The value if it is an array."""
    if not is_array(value):
        raise Refusal(f"`{param}` must be an array, not {kind_of(value)}.", param)
    return value


def as_text(value: object, param: str) -> str:
    """The value if it is a string."""
    if not isinstance(value, str):
        raise Refusal(f"`{param}` must be a string, not {kind_of(value)}.", param)
    return value


def integer(body: Json, name: str, low: int, high: int) -> int | None:
    """Field `name` as an integer in [low, high]; None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refusal(f"`{name}` must be an integer, not {kind_of(value)}.", name)
    if not low <= value <= high:
        raise Refusal(f"`{name}` is {value}; it must be between {low} and {high}.", name)
    return value


def number(body: Json, name: str, low: float, high: float, *, above: bool = False) -> float | None:
    """Field `name` as a number in [low, high], or (low, high] with `above`; None when absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refusal(f"`{name}` must be a number, not {kind_of(value)}.", name)
    if not (math.isfinite(value) and (low < value if above else low <= value) and value <= high):
        start = f"above {low:g}" if above else f"between {low:g}"
        link = "and at most" if above else "and"
        raise Refusal(f"`{name}` is {value}; it must be {start} {link} {high:g}.", name)
    return float(value)


def boolean(body: Json, name: str, default: bool = False) -> bool:
    """Field `name` as a truth value."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refusal(f"`{name}` must be true or false, not {kind_of(value)}.", name)
    return value


def token_ids(value: object, param: str, vocab_size: int) -> list[int]:
    """A list of token ids of the model."""
    ids = as_list(value, param)
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise Refusal(
                f"`{param}[{index}]` must be a token id, not {kind_of(token)}.", f"{param}[{index}]"
            )
        if not 0 <= token < vocab_size:
            raise Refusal(
                f"`{param}[{index}]` is {token}; token ids are 0 to {vocab_size - 1}.",
                f"{param}[{index}]",
            )
    return ids


def stop_strings(body: Json, name: str, most: int) -> list[str]:
    """Field `name` as a list of at most `most` stop strings; one string counts as a list."""
    value = body.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    stops = [as_text(item, f"{name}[{i}]") for i, item in enumerate(as_list(value, name))]
    if len(stops) > most:
        raise Refusal(f"`{name}` has {len(stops)} strings; at most {most} are allowed.", name)
    for index, stop in enumerate(stops):
        if not stop:
            raise Refusal(f"`{name}[{index}]` is empty.", f"{name}[{index}]")
    return stops


def kind_of(value: object) -> str:
    """JSON's name for the type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
