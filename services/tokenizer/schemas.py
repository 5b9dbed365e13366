"""JSON Schemas of clients: what cannot be kept to is refused by its keyword, with its path."""

import re
from collections.abc import Iterator
from typing import Any

from services.tokenizer.reading import Json, is_array, is_object, kind_of
from services.tokenizer.refusal import Refusal

MAX_DEPTH = 64
MAX_NODES = 20_000
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
FORMATS = (
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_VALUES = (
    "type",
    "enum",
    "const",
    "$ref",
    "required",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "$schema",
    "$id",
    "$anchor",
)
SUPPORTED = frozenset((*_MAPS, *_LISTS, *_SINGLE, *_VALUES))
# they say something of values, and forbid none
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "discriminator",
        "externalDocs",
        "xml",
        "strict",
    )
)
_ADVICE = {
    "nullable": 'write the type as ["…", "null"]',
    "not": "list what is allowed",
    "uniqueItems": "leave it out, and check the answer",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "dependencies": "use anyOf",
    "x-guidance": "options of the grammar engine belong to the server",
}
_METASCHEMA = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20\d\d-\d\d)/schema#?")
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
_BACK_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")


def clean_schema(schema: object, param: str, *, strict: bool = False) -> Json | bool:
    """The schema without its annotations, ready to be compiled.

    Args:
        param: path of the field that holds it.
        strict: it came with `"strict": true`: the answer has to be an object.
    Raises:
        Refusal: names the first keyword that cannot be kept to, and where it stands.
    """
    if not is_object(schema) and not isinstance(schema, bool):
        raise Refusal(f"`{param}` must be a JSON Schema, not {kind_of(schema)}.", param)
    if strict and (not is_object(schema) or schema.get("type") != "object"):
        raise Refusal(
            f'`{param}`: with `strict` the schema must have `"type": "object"` at the top.',
            f"{param}.type",
        )
    return _Cleaner().clean(schema, param, 0)


class _Cleaner:
    """One walk through one schema."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def clean(self, schema: object, path: str, depth: int) -> Json | bool:
        self._num_nodes += 1
        if depth > MAX_DEPTH:
            raise Refusal(f"`{path}`: the schema is nested more than {MAX_DEPTH} deep.", path)
        if self._num_nodes > MAX_NODES:
            raise Refusal(f"The schema has more than {MAX_NODES} parts: simplify it.", path)
        if isinstance(schema, bool):
            return schema
        if not is_object(schema):
            raise Refusal(f"`{path}` must be a JSON Schema, not {kind_of(schema)}.", path)
        kept: Json = {}
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword not in _ADVICE):
                continue
            where = f"{path}.{keyword}"
            if keyword not in SUPPORTED:
                advice = f": {_ADVICE[keyword]}" if keyword in _ADVICE else ""
                raise Refusal(
                    f"`{where}`: the JSON Schema keyword `{keyword}` is not supported{advice}.",
                    where,
                )
            kept[keyword] = self._value(keyword, value, where, depth)
        return kept

    def _value(self, keyword: str, value: object, where: str, depth: int) -> Any:  # noqa: ANN401
        if keyword in _MAPS:
            if not is_object(value):
                raise _wrong(where, "an object of schemas", value)
            return {
                name: self.clean(part, f"{where}.{name}", depth + 1) for name, part in value.items()
            }
        if keyword in _LISTS or (keyword == "items" and is_array(value)):
            if not is_array(value) or (not value and keyword != "items"):
                raise _wrong(where, "an array of schemas, not an empty one", value)
            return [self.clean(part, f"{where}[{i}]", depth + 1) for i, part in enumerate(value)]
        if keyword in _SINGLE:
            return self.clean(value, where, depth + 1)
        for text in _problems(keyword, value):
            raise Refusal(f"`{where}`: {text}.", where)
        return value


def _wrong(where: str, wanted: str, value: object) -> Refusal:
    return Refusal(f"`{where}` must be {wanted}, not {kind_of(value)}.", where)


def _problems(keyword: str, value: object) -> Iterator[str]:
    """What is wrong with the value of a keyword that holds no schemas."""
    match keyword:
        case "enum":
            if not is_array(value) or not value:
                yield "`enum` must be an array of at least one value"
        case "type":
            named: list[Any] = value if is_array(value) else [value]
            if not named or any(name not in TYPES for name in named):
                yield f"`type` must be one or several of {', '.join(TYPES)}"
        case "$schema":
            if not isinstance(value, str) or not _METASCHEMA.fullmatch(value):
                yield "`$schema` must be a draft of json-schema.org; nothing else is fetched"
        case "$ref":
            if not isinstance(value, str) or not value.startswith("#"):
                yield "`$ref` must point into the schema itself (`#/$defs/…`); nothing is fetched"
        case "pattern":
            if not isinstance(value, str):
                yield f"`pattern` must be a string, not {kind_of(value)}"
            elif _LOOK_AROUND.search(value):
                yield "`pattern` with look-ahead or look-behind is not supported"
            elif _BACK_REFERENCE.search(value):
                yield "`pattern` with back-references is not supported"
        case "format":
            if value not in FORMATS:
                yield f"the `format` {value!r} is not supported: {', '.join(FORMATS)} are"
        case "required":
            if not is_array(value) or any(not isinstance(name, str) for name in value):
                yield "`required` must be an array of names"
        case _:
            pass


def blamed_keyword(text: str, schema: Json | bool) -> str:
    """The keyword of the schema that a text of llguidance speaks of; empty if it names none."""
    present = set(_keywords(schema))
    for keyword in sorted(present, key=len, reverse=True):
        if re.search(rf"\b{re.escape(keyword.lstrip('$'))}\b", text):
            return keyword
    return next((keyword for keyword in _HARD if keyword in present), "")


# what llguidance can keep to in part, the most likely culprit first
_HARD = (
    "oneOf",
    "allOf",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "$ref",
    "pattern",
    "multipleOf",
    "format",
    "anyOf",
    "enum",
    "const",
    "type",
)


def _keywords(schema: object) -> Iterator[str]:
    if not is_object(schema):
        return
    for keyword, value in schema.items():
        yield keyword
        parts: list[Any] = []
        if keyword in _MAPS and is_object(value):
            parts = list(value.values())
        elif is_array(value) and (keyword in _LISTS or keyword == "items"):
            parts = value
        elif keyword in _SINGLE:
            parts = [value]
        for part in parts:
            yield from _keywords(part)
