"""A thousand hot outputs under fifty schemas, regular expressions and EBNF grammars: all valid."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest

from tests.e2e.conftest import RunningMesh

RUNS = 20  # of each constraint
AT_ONCE = 32


class Form(NamedTuple):
    """One constraint, and what an output under it must be."""

    fields: dict[str, Any]
    is_valid: Callable[[str], bool]


def schema(given: dict[str, Any]) -> Form:
    validator = jsonschema.Draft202012Validator(
        given, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return Form({"guided_json": given}, lambda text: validator.is_valid(json.loads(text)))


def regex(pattern: str) -> Form:
    return Form({"guided_regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)


def ebnf(grammar: str, pattern: str) -> Form:
    """With a regular expression that says the same, or what can be said without nesting."""
    return Form({"guided_grammar": grammar}, lambda text: bool(re.fullmatch(pattern, text, re.S)))


def _object(**properties: Any) -> dict[str, Any]:  # noqa: ANN401 - schemas
    return {"type": "object", "properties": properties, "required": list(properties)}


SHORT = {"type": "string", "maxLength": 10}
SCHEMAS = [
    _object(a={"type": "integer", "minimum": 0, "maximum": 99}),
    _object(a=SHORT, b=SHORT),
    _object(a={"type": "boolean"}, b={"type": "null"}, c={"enum": [1, "x", None]}),
    _object(a={"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3}),
    {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [SHORT, {"type": "boolean"}], "items": False, "minItems": 2},
    _object(id={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}),
    _object(p={"type": "string", "pattern": "^[a-z]+$", "maxLength": 6}),
    _object(d={"type": "string", "format": "date"}),
    _object(t={"type": "string", "format": "date-time"}),
    _object(u={"type": "string", "format": "uuid"}),
    _object(i={"type": "string", "format": "ipv4"}),
    _object(n={"type": "number", "minimum": -1, "maximum": 1}),
    _object(m={"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 1000}),
    {"anyOf": [_object(a=SHORT), _object(b={"type": "integer", "maximum": 5, "minimum": 1})]},
    {"enum": ["north", "south", "east", "west"]},
    {"const": {"fixed": [1, 2, 3]}},
    _object(
        inner={"$ref": "#/$defs/point"},
    )
    | {"$defs": {"point": _object(x={"enum": [0, 1]}, y={"enum": [0, 1]})}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 12},
]
REGEXES = [
    "[a-z]{1,8}",
    "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "(red|green|blue)( (red|green|blue)){0,3}",
    "[A-Z][a-z]{2,10}",
    r"\+[0-9]{2} [0-9]{3} [0-9]{4,6}",
    "0x[0-9a-f]{2,8}",
    r"[a-z]{1,6}@[a-z]{1,6}\.(com|org)",
    "(yes|no|maybe)",
    r"v[0-9]\.[0-9]{1,2}\.[0-9]{1,3}",
    "#[0-9A-F]{6}",
    "[01]{8}",
    "(ha){1,6}!",
    r"[äöüß]{1,4}",
    r"\$[1-9][0-9]{0,3}\.[0-9]{2}",
    "([A-D]{2},){2}[A-D]{2}",
]
EBNFS = [
    ('start: "a" b+ "."\nb: "b" | "c"\n', r"a[bc]+\."),
    ('root ::= "a" b+ "."\nb ::= "b" | "c"\n', r"a[bc]+\."),
    ('start: WORD (" " WORD){0,2}\nWORD: /[a-z]{1,5}/\n', r"[a-z]{1,5}( [a-z]{1,5}){0,2}"),
    ('root ::= [0-9] [0-9]? ":" [0-5] [0-9]\n', r"[0-9]{1,2}:[0-5][0-9]"),
    ('start: "(" start ")" | "x"\n', r"\(*x\)*"),
    ('root ::= "[" ("x" ("," "x")*)? "]"\n', r"\[(x(,x)*)?\]"),
    ('start: num op num\nnum: /[1-9][0-9]?/\nop: "+" | "-"\n', r"[1-9][0-9]?[+-][1-9][0-9]?"),
    ('root ::= ("yes" | "no") "!"?\n', r"(yes|no)!?"),
    ('start: %json {"type": "boolean"}\n', r"true|false"),
    ('start: "<b>" /[a-z]{1,6}/ "</b>"\n', r"<b>[a-z]{1,6}</b>"),
    ('root ::= digit{3} "-" digit{2}\ndigit ::= [0-9]\n', r"[0-9]{3}-[0-9]{2}"),
    ('start: /[A-C]/ ("," /[A-C]/)~1..2\n', r"[A-C](,[A-C]){1,2}"),
    ('root ::= "SELECT " col " FROM t"\ncol ::= "a" | "b" | "*"\n', r"SELECT [ab*] FROM t"),
    ('start: line{1,2}\nline: /[a-z]{1,4}/ "\\n"\n', r"([a-z]{1,4}\n){1,2}"),
    ('root ::= "\\"" [a-z]+ "\\""\n', r'"[a-z]+"'),
]
FORMS = [
    *map(schema, SCHEMAS),
    *map(regex, REGEXES),
    *(ebnf(grammar, pattern) for grammar, pattern in EBNFS),
]


async def judge(url: str, model: str, runs: int) -> tuple[Counter[str], list[str]]:
    """How many outputs are valid, were cut, or are neither; these ones."""
    found, bad = Counter[str](), list[str]()
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, form: Form, seed: int) -> None:
        body = {
            "model": model,
            "prompt": "Answer:",
            "temperature": 1.5,
            "seed": seed,
            "max_tokens": 200,
            **form.fields,
        }
        async with limit:
            answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            found["refused"] += 1
            bad.append(f"{form.fields}: {answer.text}")
            return
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "length":
            found["cut"] += 1
        elif form.is_valid(choice["text"]):
            found["valid"] += 1
        else:
            found["invalid"] += 1
            bad.append(f"{form.fields}: {choice['text']!r}")

    async with httpx.AsyncClient(base_url=url, timeout=200) as client:
        await asyncio.gather(*(one(client, form, s) for form in FORMS for s in range(runs)))
    return found, bad


def test_fifty_forms_once(mesh: RunningMesh) -> None:
    assert len(FORMS) == 50
    found, bad = asyncio.run(judge(mesh.url, mesh.model, runs=1))
    assert not bad, bad[:5]
    assert found["valid"] >= 40, found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_hot_outputs(mesh: RunningMesh, capsys: pytest.CaptureFixture[str]) -> None:
    found, bad = asyncio.run(judge(mesh.url, mesh.model, RUNS))
    with capsys.disabled():
        print(f"\noutputs at temperature 1.5: {dict(found)} of {RUNS * len(FORMS)}")
    assert not bad, bad[:5]
    assert found["valid"] + found["cut"] == RUNS * len(FORMS)
    assert found["valid"] >= 0.9 * RUNS * len(FORMS)
