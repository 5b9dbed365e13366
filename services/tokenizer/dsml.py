"""Calls of tools as a Lark grammar: DSML as the model was taught to write it.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="weather">
    <｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

Text goes as it is, everything else as JSON with `string="false"`. Parameters come in the order of
the schema. The lexer of llguidance is greedy where a rule is not `lazy`, so free text is lazy up
to the tag that ends it; complements of regular expressions refuse correct calls (tried). Free text
holds no mark ｜DSML｜ but in such a tag: nobody could tell what it means.
"""

import re
from typing import NamedTuple

import msgspec

from services.tokenizer.reading import Json, is_array, is_object

OPEN = "<｜DSML｜ calls>\n"
CLOSE = "</｜DSML｜ calls>"
# compact JSON with the blanks that models like
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# Texts without ｜DSML｜, as an automaton that looks for it would read them: other characters, and
# runs that begin the mark and do not end it, the last of them at the end.
_RUN = "｜(?:｜|D｜|DS｜|DSM｜)*"
_UNMARKED = (
    f"(?:[^｜]|{_RUN}(?:[^｜D]|D[^｜S]|DS[^｜M]|DSM[^｜L]|DSML[^｜]))*(?:{_RUN}(?:D|DS|DSM|DSML)?)?"
)
_NAME = re.compile(r'[^"<>&\n]+')
_SHAPES = frozenset(("pattern", "minLength", "maxLength", "format"))
_PLAIN = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
_BESIDE = frozenset(("definitions", "$schema", "$id"))


class Tool(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: Json | bool | None  # a clean schema; None: anything that an object can hold


class Shape(NamedTuple):
    """What the calls of an answer have to look like."""

    must_call: bool  # else free text, which may end in calls
    is_opened: bool = False  # the prompt ends with OPEN
    parallel: bool = True
    json_schema: str = ""  # an answer that is no call keeps to this schema


def has_plain_name(name: str) -> bool:
    """Whether it can stand in a tag as it is."""
    return _NAME.fullmatch(name) is not None


def is_plain_object(parameters: Json | bool | None) -> bool:
    """Whether each parameter has a schema of its own, so that calls can be kept to it."""
    if not is_object(parameters):
        return False
    if set(parameters) - _PLAIN - _BESIDE or parameters.get("type", "object") != "object":
        return False
    properties: object = parameters.get("properties", {})
    required: object = parameters.get("required", [])
    if not is_object(properties) or not is_array(required):
        return False
    return set(required) <= set(properties) and all(map(has_plain_name, properties))


def calls_grammar(tools: list[Tool], shape: Shape) -> str:
    """Lark text.

    Args:
        tools: at least one, with plain names and parameters that are a plain object or None.
    """
    rules = _Rules()
    calls = " | ".join(rules.call(tool) for tool in tools)
    block = f"call{'+' if shape.parallel else ''} {_literal(CLOSE)}"
    if shape.must_call:
        start = block if shape.is_opened else f"{_literal(chr(10) * 2 + OPEN)} {block}"
    elif shape.json_schema:
        start = f"answer | {_literal(chr(10) * 2 + OPEN)} {block}"
        rules.add(f"answer: %json {shape.json_schema}")
    else:
        start = f"text | open {block}"
        rules.add("text: TEXT", f"TEXT: /{_UNMARKED}/")
        rules.add(f"open[lazy]: /{_UNMARKED}{_regex(OPEN)}/")
    return "\n".join((f"start: {start}", f"call: {calls}", *rules.lines, ""))


class _Rules:
    """Rules so far; equal ones are shared."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def add(self, *lines: str) -> None:
        self.lines += [line for line in lines if line not in self.lines]

    def named(self, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self._names:
            self._names[body] = f"r{len(self._names)}"
            self.lines.append(f"{self._names[body]}: {body}")
        return self._names[body]

    def call(self, tool: Tool) -> str:
        """One call of a tool."""
        begin = _literal(f'<｜DSML｜ invoke name="{tool.name}">\n')
        return self.named(f"{begin} {self._parameters(tool.parameters)} {_literal(_END_INVOKE)}")

    def _parameters(self, schema: Json | bool | None) -> str:
        if not is_object(schema) or not is_plain_object(schema):
            return f"{self._anything()}*"
        properties: Json = schema.get("properties", {})
        if not properties and schema.get("additionalProperties", True) is not False:
            return f"{self._anything()}*"
        required: list[str] = schema.get("required", [])
        defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts: list[str] = []
        for name, part in properties.items():
            if part is False:  # may not be given
                continue
            rule = self._parameter(name, part, defs)
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def _anything(self) -> str:
        """A parameter of any name and value."""
        text = f'/[^"<>\\n]+/ {_literal(_AS_TEXT)} {self._text()}'
        value = f'/[^"<>\\n]+/ {_literal(_AS_JSON)} {self._json(True, {})} {_literal(_END)}'
        return self.named(f"{_literal(_BEGIN)} ({self.named(text)} | {self.named(value)})")

    def _parameter(self, name: str, schema: Json | bool, defs: Json) -> str:
        begin = _literal(f"{_BEGIN}{name}")
        text, other = _split(schema)
        ways: list[str] = []
        if isinstance(text, list):
            words = " | ".join(_literal(word) for word in text)
            ways.append(f"{_literal(_AS_TEXT)} ({words}) {_literal(_END)}")
        elif text:
            ways.append(f"{_literal(_AS_TEXT)} {self._text()}")
        if other is not None:
            ways.append(f"{_literal(_AS_JSON)} {self._json(other, defs)} {_literal(_END)}")
        return self.named(f"{begin} ({' | '.join(self.named(way) for way in ways)})")

    def _text(self) -> str:
        """Free text and the tag that ends it."""
        self.add(f"str[lazy]: /{_UNMARKED}{_regex(_END)}/")
        return "str"

    def _json(self, schema: Json | bool, defs: Json) -> str:
        whole: Json = {"x-guidance": _COMPACT, **defs}
        whole |= schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        return self.named(f"%json {msgspec.json.encode(whole).decode()}")


_BEGIN = '<｜DSML｜ parameter name="'
_AS_TEXT, _AS_JSON = '" string="true">', '" string="false">'
_END = "</｜DSML｜ parameter>\n"
_END_INVOKE = "</｜DSML｜ invoke>\n"


def _split(schema: Json | bool) -> tuple[bool | list[str], Json | bool | None]:
    """How a parameter goes as text (any, or one of some words), and what is left for JSON.

    A text with a shape goes as a JSON string: there the schema holds to the letter.
    """
    if isinstance(schema, bool):
        return schema, schema
    if schema.keys() & {"enum", "const"}:
        values: list[object] = schema["enum"] if "enum" in schema else [schema["const"]]
        words = [v for v in values if isinstance(v, str) and v and not set(v) & set("<｜")]
        if not words or len(schema) - ("type" in schema) > 1:
            return False, schema
        rest = [value for value in values if value not in words]
        return words, {**schema, "enum": rest} if rest else None
    kinds: object = schema.get("type")
    if kinds == "string" and not schema.keys() & _SHAPES and schema.keys() <= {"type"}:
        return True, None
    if is_array(kinds) and "string" in kinds and not schema.keys() & _SHAPES:
        others = [kind for kind in kinds if kind != "string"]
        return True, {**schema, "type": others} if others else None
    if not schema:
        return True, True
    return False, schema


def _literal(text: str) -> str:
    """A Lark string."""
    return msgspec.json.encode(text).decode()


def _regex(text: str) -> str:
    """Text of tags inside /…/: nothing in it is special there but the slash."""
    return text.replace("/", r"\/").replace("\n", r"\n")
