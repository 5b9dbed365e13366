"""What is wrong with a mesh.toml, in its own words: the section, the key, and what was meant."""

import difflib
import re
from typing import Any, Literal, get_args, get_origin

import msgspec

_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`(?: - at `\$\.(?P<path>[^`]*)`)?")
_WRONG = re.compile(r"(?P<what>.*?) - at `\$\.(?P<path>[^`]*)`$")
_KINDS = {
    "object": "a table",
    "array": "a list",
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
}


def words(error: str, config: type[msgspec.Struct]) -> str:
    """msgspec's complaint about a table of tables, said to who wrote the file."""
    if found := _UNKNOWN.search(error):
        return _unknown(found["key"], found["path"] or "", config)
    if found := _WRONG.match(error):
        return f"{found['path']}: {_wrong(found['what'], found['path'], config)}"
    return error


def _unknown(key: str, section: str, config: type[msgspec.Struct]) -> str:
    sections = {field.name: _keys(field.type) for field in msgspec.structs.fields(config)}
    homes = [f"[{name}]" for name, keys in sections.items() if key in keys and name != section]
    known = list(sections[section]) if section in sections else list(sections)
    where = f"[{section}] has no key `{key}`" if section else f"[{key}] is no section"
    if homes:
        return f"{where}; `{key}` is a key of {' and '.join(homes)}"
    if near := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
        return f"{where}; did you mean `{near[0]}`?"
    every = {other: f"{name}.{other}" for name, keys in sections.items() for other in keys}
    if near := difflib.get_close_matches(key, every, n=1, cutoff=0.75):
        return f"{where}; did you mean `{every[near[0]]}`?"
    return f"{where}; it may have {', '.join(known)}"


def _wrong(what: str, path: str, config: type[msgspec.Struct]) -> str:
    if what.startswith("Invalid enum value "):
        section, _, key = path.partition(".")
        values = get_args(_keys(dict(_fields(config))[section])[key.partition("[")[0]])
        if values and get_origin(values[0]) is Literal:  # of a list's items
            values = get_args(values[0])
        value = what.removeprefix("Invalid enum value ")
        return f"{value} is none of {', '.join(map(repr, values))}"
    for name, kind in _KINDS.items():
        what = what.replace(f"Expected `{name}`", f"expected {kind}")
        what = what.replace(f"got `{name}`", f"got {kind}")
    return what


def _fields(struct: type[msgspec.Struct]) -> list[tuple[str, Any]]:  # Any: types, of any kind
    return [(field.name, field.type) for field in msgspec.structs.fields(struct)]


def _keys(section: Any) -> dict[str, Any]:  # noqa: ANN401  the same
    return dict(_fields(section))
