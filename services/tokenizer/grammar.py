"""What an answer has to look like: formats, guided decoding and calls of tools, as one grammar.

Only checked here; the mask worker beside the executor compiles and enforces it.
"""

from typing import NamedTuple

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from deepmesh.grammar_judge import judge
from deepmesh.grammars import Kind, make_grammar, schema_text
from deepmesh.wire.messages import Grammar
from deepmesh.wire.packed import pack_ids
from services.tokenizer.reading import Json, as_list, as_object, as_text, boolean, is_object
from services.tokenizer.refusal import Refusal
from services.tokenizer.schemas import blamed_keyword, clean_schema
from services.tokenizer.tool_choice import read_calls

MAX_CHOICES = 1024
_GUIDED: dict[str, str] = {
    # vLLM's and SGLang's names of the same things
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_STRUCTURED = ("json", "json_object", "regex", "choice", "grammar")
_STYLE = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties")
_FORMAT_FIELDS = {
    "chat": ("response_format",),
    "completions": ("response_format",),
    "responses": ("text", "format"),
    "messages": ("output_config", "format"),
}


class Wanted(NamedTuple):
    """One way in which the client says what the answer has to look like."""

    param: str
    kind: Kind
    text: str
    schema: Json | bool | None = None  # of a JSON format


class Constraint(NamedTuple):
    """What holds for the answer."""

    grammar: Grammar | None
    body: Json  # the request as the recipe may see it


def read_constraint(protocol: str, given: Json, passed: Json, *, thinking: bool) -> Constraint:
    """The grammar that the fields of a request ask for.

    Args:
        given: the fields; none of them is null.
        passed: those of them that the recipe would see.
        thinking: the model thinks before it answers.
    Raises:
        Refusal: it cannot be kept to, or two of them contradict each other.
    """
    if protocol == "count_tokens":
        protocol = "messages"
    wanted = [*_formats(protocol, given), *_guided(given)]
    if len(wanted) > 1:
        first, second = wanted[0].param, wanted[1].param
        raise Refusal(f"`{second}` and `{first}` both constrain the answer; send one.", second)
    calls = read_calls(protocol, given, passed, wanted[0] if wanted else None, thinking=thinking)
    grammar: Grammar | None = None
    if calls.text:
        grammar = make_grammar("calls" if calls.must_call else "tools", calls.text)
        _check(grammar, calls.param, None)
    elif wanted:
        (format_,) = wanted
        grammar = make_grammar(format_.kind, format_.text)
        _check(grammar, format_.param, format_.schema)
    if grammar is not None and given.get("ignore_eos"):
        raise Refusal(
            "`ignore_eos` contradicts an answer that has to end where its format does.",
            "ignore_eos",
        )
    body = calls.body
    if wanted and wanted[0].kind != "json_schema":  # nothing that a prompt could say
        body = {key: value for key, value in body.items() if key != "response_format"}
    if protocol == "messages" and wanted and wanted[0].param.startswith("output_"):
        body = _with_format_told(body, wanted[0].text)
    return Constraint(grammar, body)


def starts_after(grammar: Grammar, prompt_ids: list[int], think: int, answer: int) -> Grammar:
    """The grammar behind the thinking that the prompt has begun, if it has.

    Args:
        think, answer: ids of `<think>` and `</think>`.
    """
    for token in reversed(prompt_ids):
        if token == answer:
            break
        if token == think:
            return msgspec.structs.replace(grammar, start_after=pack_ids([answer]))
    return grammar


def _with_format_told(body: Json, schema: str) -> Json:
    """What the recipe tells the model in the other protocols."""
    told = (
        "## Response Format:\n\n"
        f"You MUST strictly adhere to the following schema to reply:\n{schema}"
    )
    config = {k: v for k, v in body.get("output_config", {}).items() if k != "format"}
    system: object = body.get("system") or []
    if isinstance(system, str):
        system = [{"type": "text", "text": system}]
    blocks = [*as_list(system, "system"), {"type": "text", "text": told}]
    return {**body, "system": blocks, **({"output_config": config} if config else {})}


def _check(grammar: Grammar, param: str, schema: Json | bool | None) -> None:
    """What the engine says of it, in a sentence that names the field."""
    problem = judge(grammar)
    if not problem:
        return
    text = " ".join(problem.split())[:500]
    keyword = blamed_keyword(text, schema) if schema is not None else ""
    if keyword:
        raise Refusal(f"`{param}`: `{keyword}` cannot be kept to as it is used here: {text}", param)
    raise Refusal(f"`{param}` cannot be compiled: {text}", param)


# ---------------------------------------------------------------- formats of the protocols


def _formats(protocol: str, given: Json) -> list[Wanted]:
    path = _FORMAT_FIELDS[protocol]
    holder: object = given
    for name in path:
        holder = holder.get(name) if is_object(holder) else None
    found = [_format(as_object(holder, ".".join(path)), ".".join(path))] if holder else []
    if protocol == "messages" and given.get("output_format") is not None:
        name = "output_format"  # of the beta
        found.append(_format(as_object(given[name], name), name))
    return [wanted for wanted in found if wanted is not None]


def _format(given: Json, param: str) -> Wanted | None:
    kind = given.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return _json({"type": "object"}, param)
        case "json_schema":
            holder, where = given, param
            if "json_schema" in given:  # Chat's spelling
                where = f"{param}.json_schema"
                holder = as_object(given["json_schema"], where)
            elif param == "response_format" and "schema" not in given:
                raise Refusal(f"`{param}.json_schema` is missing.", f"{param}.json_schema")
            if holder.get("schema") is None:
                raise Refusal(f"`{where}.schema` is missing.", f"{where}.schema")
            strict = boolean(holder, "strict")
            return _json(holder["schema"], f"{where}.schema", strict=strict)
        case "regex":
            return _regex(given.get("pattern", given.get("regex")), f"{param}.pattern")
        case "grammar":
            return _lark(given.get("grammar"), f"{param}.grammar")
        case _:
            raise Refusal(
                f"`{param}.type` {kind!r} is not supported: text, json_object, json_schema, "
                "regex and grammar are.",
                f"{param}.type",
            )


# ---------------------------------------------------------------- vLLM's and SGLang's fields


def _guided(given: Json) -> list[Wanted]:
    found = [
        _one(kind, given[name], name)
        for name, kind in _GUIDED.items()
        if given.get(name) is not None
    ]
    options = given.get("structured_outputs")
    if options is not None:
        for key, value in as_object(options, "structured_outputs").items():
            param = f"structured_outputs.{key}"
            if value is None or (key in _STYLE and not boolean(as_object(options, ""), key)):
                continue
            if key not in _STRUCTURED:
                raise Refusal(f"`{param}` is not supported: {', '.join(_STRUCTURED)} are.", param)
            found.append(_one(key, value, param))
    return [wanted for wanted in found if wanted is not None]


def _one(kind: str, value: object, param: str) -> Wanted | None:
    match kind:
        case "json":
            return _json(_parsed(value, param), param)
        case "json_object":
            if not isinstance(value, bool):
                raise Refusal(f"`{param}` must be a boolean.", param)
            return _json({"type": "object"}, param) if value else None
        case "regex":
            return _regex(value, param)
        case "choice":
            return _choice(value, param)
        case _:
            return _lark(value, param)


def _parsed(value: object, param: str) -> object:
    """A schema may come as text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise Refusal(f"`{param}` is not valid JSON: {error}.", param) from error


def _json(schema: object, param: str, *, strict: bool = False) -> Wanted:
    clean = clean_schema(schema, param, strict=strict)
    if clean is False:
        raise Refusal(f"`{param}`: the schema `false` allows no answer.", param)
    if isinstance(clean, bool):
        clean = dict[str, object]()
    return Wanted(param, "json_schema", schema_text(clean), clean)


def _regex(value: object, param: str) -> Wanted:
    return Wanted(param, "regex", as_text(value, param))


def _choice(value: object, param: str) -> Wanted:
    words = [as_text(word, f"{param}[{i}]") for i, word in enumerate(as_list(value, param))]
    if not words or len(words) > MAX_CHOICES:
        raise Refusal(f"`{param}` must list 1 to {MAX_CHOICES} texts.", param)
    if "" in words:
        raise Refusal(f"`{param}[{words.index('')}]` is empty.", f"{param}[{words.index('')}]")
    literals = " | ".join(msgspec.json.encode(word).decode() for word in dict.fromkeys(words))
    return Wanted(param, "lark", f"start: {literals}\n")


def _lark(value: object, param: str) -> Wanted:
    """Lark as llguidance reads it, or GBNF."""
    text = as_text(value, param)
    try:
        return Wanted(param, "lark", any_to_lark(text))
    except Exception as error:  # what the converter raises is not declared
        raise Refusal(f"`{param}` is neither Lark nor GBNF: {error}", param) from error
